"""Download and check wheels for a GPU machine without a network, and install them there.

Standard library and pip only. `pack` runs where a package index is available, `install` on the GPU
machine. torch, triton and numpy must already be there: torch's wheel alone is 500 MB.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from collections.abc import Set as AbstractSet

ROOT: Final = Path(__file__).parents[2]
LEASE: Final = ROOT / "build" / "gpu-lease"
WHEELS: Final = LEASE / "wheels"
MANIFEST: Final = "manifest.json"
MAX_BYTES: Final = 64 * 2**20
"""Largest size of working tree and wheels together: what can be copied to such a machine at
once."""
THERE: Final = ("torch>=2.11", "triton>=3.6", "numpy>=2.0")
"""Packages expected on the GPU machine, in these versions. torch 2.11 comes with Triton 3.6."""
TESTING: Final = ("pytest", "pytest-trio", "pytest-timeout", "hypothesis", "transformers")
"""Packages of the extra `dev` that the stages need; transformers computes the references of
tests."""
GLIBC: Final = "2.31"
"""The oldest glibc with a wheel of llguidance, as in Debian 11 and Ubuntu 20.04."""
ROUNDS: Final = 3
"""Most download rounds. pip evaluates markers for its own Python, not for the target's. `unmet`
finds what the target needs beyond that, and another round downloads it."""


class PackError(Exception):
    """Wheels cannot be packed, or have changed since. The message says what to do."""


def needs() -> list[str]:
    """Return the requirements of the stages, without packages expected on the machine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    present = {_name(one) for one in THERE}
    chosen = [one for one in project["dependencies"] if _name(one) not in present]
    extra = project["optional-dependencies"]["dev"]
    return chosen + [one for one in extra if _name(one) in TESTING]


def lacking(requirements: Iterable[str]) -> list[str]:
    """Return the requirements that this interpreter's environment does not meet."""
    found = []
    for line in requirements:
        requirement = Requirement(line)
        try:
            is_met = requirement.specifier.contains(version(requirement.name), prereleases=True)
        except PackageNotFoundError:
            is_met = False
        if not is_met:
            found.append(line)
    return found


def pack(python: str, glibc: str, folder: Path, say: Callable[[str], None]) -> None:
    """Download the wheels for a Python and a glibc on x86-64, check them, write the manifest.

    Raises:
      PackError: a wheel is missing or they are too large; the folder then holds no manifest.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    present = {canonicalize_name(_name(one)) for one in THERE}
    wanted = needs()
    for _ in range(ROUNDS):
        _download(wanted, python, glibc, folder)
        for wheel in folder.glob("*.whl"):
            if canonicalize_name(wheel.name.split("-")[0]) in present:
                wheel.unlink()
        problems = unmet(folder, wanted, python, present)
        if not problems:
            break
        wanted = [*wanted, *problems]
    else:
        raise PackError(f"the wheels for Python {python} do not meet: {'; '.join(problems)}")
    check_size(folder, tree_bytes(), say)
    manifest = {
        "python": python,
        "glibc": glibc,
        "expected_there": list(THERE),
        "wheels": {wheel.name: _sha256(wheel) for wheel in sorted(folder.glob("*.whl"))},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def check_size(folder: Path, other_bytes: int, say: Callable[[str], None]) -> None:
    """Print the sizes of the wheels and check the total.

    Args:
      folder: folder of the wheels.
      other_bytes: bytes copied along with the wheels.
      say: prints a line.

    Raises:
      PackError: the total exceeds `MAX_BYTES`.
    """
    sizes = {wheel.name: wheel.stat().st_size for wheel in folder.glob("*.whl")}
    for name, num_bytes in sorted(sizes.items(), key=lambda item: -item[1])[:8]:
        say(f"{num_bytes / 2**20:6.2f} MiB  {name}")
    wheels = sum(sizes.values())
    total = (
        f"{len(sizes)} wheels {wheels / 2**20:.1f} MiB + working tree {other_bytes / 2**20:.1f} MiB"
        f" = {(wheels + other_bytes) / 2**20:.1f} of {MAX_BYTES / 2**20:.0f} MiB"
    )
    if wheels + other_bytes > MAX_BYTES:
        raise PackError(
            f"{total}: too large to copy. Remove untracked files, or the largest wheels above from "
            "`needs` in tools/gpu_lease/pack.py"
        )
    say(total)


def tree_bytes() -> int:
    """Return the size of the working tree's tracked and untracked files."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout
    paths = {ROOT / name.decode() for name in listed.split(b"\0") if name}
    return sum(path.stat().st_size for path in paths if path.is_file())


def unmet(folder: Path, roots: Sequence[str], python: str, present: AbstractSet[str]) -> list[str]:
    """Return the requirements of roots and wheels that no wheel meets on the target.

    Args:
      folder: folder of the wheels.
      roots: requirements to start from.
      python: Python version of the target, for example `3.12`.
      present: canonical names of packages on the target.
    """
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": "x86_64",
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    wheels = {
        canonicalize_name(fields["Name"]): fields for fields in map(_metadata, folder.glob("*.whl"))
    }
    problems: dict[str, None] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if name in present:
            continue
        fields = wheels.get(name)
        if fields is None or not requirement.specifier.contains(
            fields["Version"], prereleases=True
        ):
            problems[f"{requirement.name}{requirement.specifier}"] = None
            continue
        if key in seen:
            continue
        seen.add(key)
        for line in fields.get_all("Requires-Dist") or []:
            further = Requirement(line)
            if further.marker is None or any(
                further.marker.evaluate(environment | {"extra": extra})
                for extra in ("", *requirement.extras)
            ):
                waiting.append(further)
    return list(problems)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of packed wheels after checking every file; None if there is none.

    Raises:
      PackError: a wheel is missing or has other bytes.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    manifest: dict[str, Any] = json.loads(path.read_text())
    for name, digest in manifest["wheels"].items():
        if not (folder / name).exists() or _sha256(folder / name) != digest:
            raise PackError(
                f"{folder / name} is missing or damaged: copy the whole folder again, or pack "
                'again with make gpu-lease ARGS="pack"'
            )
    return manifest


def install(folder: Path, manifest: dict[str, Any], parent: Path, timeout_s: float) -> Path:
    """Install packed wheels, without a network, into a folder for PYTHONPATH and return it.

    A complete folder of an earlier call is reused. Triolet runs from the working tree; its
    metadata, which contains its version, is written into the folder too.

    Raises:
      PackError: pip failed; contains its message.
    """
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:12]
    site = parent / f"site-{digest}"
    if site.exists():
        return site
    parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=parent) as temporary:
        fresh = Path(temporary) / "site"
        wheels = [str(folder / name) for name in manifest["wheels"]]
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        command += ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
        try:
            finished = subprocess.run(
                [*command, "--target", str(fresh), *wheels],
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise PackError(f"pip took longer than {timeout_s:.0f} s to install") from error
        if finished.returncode:
            raise PackError(f"pip cannot install the wheels: {finished.stderr.strip()[-600:]}")
        _write_own_metadata(fresh)
        fresh.rename(site)
    return site


def _write_own_metadata(site: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = site / f"{project['name']}-{project['version']}.dist-info"
    folder.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {project['name']}",
        f"Version: {project['version']}",
        *(f"Requires-Dist: {line}" for line in project["dependencies"]),
    ]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")


def _download(requirements: Sequence[str], python: str, glibc: str, folder: Path) -> None:
    major, minor = map(int, glibc.split("."))
    # Oldest platform first: pip prefers earlier ones.
    tags = ["manylinux1", "manylinux2010", "manylinux2014"]
    tags += [f"manylinux_{major}_{number}" for number in range(5, minor + 1)]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for tag in tags:
        command += ["--platform", f"{tag}_x86_64"]
    finished = subprocess.run(
        [*command, "--dest", str(folder), *requirements],
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        wrong = [line for line in finished.stderr.splitlines() if line.startswith("ERROR")]
        raise PackError(f"pip cannot download: {' '.join(wrong) or finished.stderr.strip()[-600:]}")


def _metadata(wheel: Path) -> Any:  # noqa: ANN401 - items of email's Message are Any
    with zipfile.ZipFile(wheel) as archive:
        [name] = [
            n for n in archive.namelist() if n.count("/") == 1 and n.endswith("-info/METADATA")
        ]
        return HeaderParser().parsestr(archive.read(name).decode())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _name(requirement: str) -> str:
    return Requirement(requirement).name

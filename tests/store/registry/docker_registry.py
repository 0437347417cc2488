"""A real registry for tests (Debian's docker-registry) on loopback, and a proxy to it that can
break connections."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PROGRAM: Final = shutil.which("docker-registry")
START_S: Final = 30.0
PASSWORD: Final = "p%s:w@rd/1"
HTPASSWD: Final = "alice:$2b$04$dD.t7ZIh6Lbn2W6EE9LcweLZjG8ozafJ7dBMRMjivEHScHKPQUq66\n"
"""PASSWORD, by bcrypt."""


class DockerRegistry:
    """One registry, which may be killed and restarted with its data.

    Args:
      folder: for its data.
      more: lines of its configuration.
      tls: its files.
    """

    def __init__(self, folder: Path, more: str = "", tls: str = "") -> None:
        self._folder = folder
        self._tls = f", tls: {{{tls}}}" if tls else ""
        self._more = more
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """All requests so far, one per line."""
        return (self._folder / "log").read_text()

    def start(self) -> None:
        """Start it and wait until it answers."""
        assert PROGRAM is not None
        config = self._folder / "config.yml"
        config.write_text(
            "version: 0.1\nlog: {level: error}\n"
            f"storage: {{filesystem: {{rootdirectory: {self._folder / 'data'}}}}}\n"
            f"http: {{addr: '{self.host}'{self._tls}}}\n{self._more}"
        )
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [PROGRAM, "serve", str(config)],
                stdout=log,
                stderr=log,
                env={**os.environ, "OTEL_TRACES_EXPORTER": "none"},
            )
        give_up = time.monotonic() + START_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), START_S):
                return
            assert self._process.poll() is None, self.log
            assert time.monotonic() < give_up
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill it. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def running_registry(folder: Path, more: str = "", tls: str = "") -> Iterator[DockerRegistry]:
    """Run a registry; skip the test if it is not installed."""
    if PROGRAM is None:
        pytest.skip("docker-registry is not installed: `apt-get install docker-registry` brings it")
    folder.mkdir(exist_ok=True)
    registry = DockerRegistry(folder, more, tls)
    registry.start()
    try:
        yield registry
    finally:
        registry.kill()


class BreakingProxy:
    """Forwards bytes in both directions, counts them, and breaks each connection once after a given
    number of bytes.

    Args:
      port: of the registry, on loopback.
    """

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.down_left: int | None = None
        self.up_left: int | None = None
        self.on_break: Callable[[], None] = lambda: None
        self.num_down = self.num_up = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    registry = socket.create_connection(("127.0.0.1", self._upstream), START_S)
                except OSError:
                    client.close()
                    continue
                for ends in ((client, registry), (registry, client)):
                    is_down = ends[0] is registry
                    threading.Thread(
                        target=self._hand_on, args=(*ends, is_down), daemon=True
                    ).start()

    def _hand_on(self, source: socket.socket, target: socket.socket, is_down: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(65_536):
                if self._is_broken(len(piece), is_down):
                    break
                target.sendall(piece)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _is_broken(self, count: int, is_down: bool) -> bool:
        with self._lock:
            if is_down:
                self.num_down += count
            else:
                self.num_up += count
            left = self.down_left if is_down else self.up_left
            if left is None:
                return False
            left -= count
            if left > 0:
                self.down_left, self.up_left = (
                    (left, self.up_left) if is_down else (self.down_left, left)
                )
                return False
            self.down_left = self.up_left = None
            self.on_break()
            return True


@contextmanager
def breaking_proxy(port: int) -> Iterator[BreakingProxy]:
    proxy = BreakingProxy(port)
    try:
        yield proxy
    finally:
        proxy.close()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])

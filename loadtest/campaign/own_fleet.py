"""A fleet of one's own whose supervisor may die too, and is started again in the same place.

Knows `triolet serve`, its log and its port; asks nothing of it but whether it is ready.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from ..server_process import START_DEADLINE_S, stop, wait_ready
from .injectors import PROOF_TIMEOUT_S, Injected
from .processes import FleetLog, is_gone, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SUPERVISOR = "supervisor"


class OwnFleet:
    """A `triolet serve`, over as many lives as it takes.

    Args:
      command: to start it, without the port.
      log_path: where all of its lives write.
      kept: a socket that is bound to its port.

    Attributes:
      url: of its servers.
      log: what it has written.
    """

    def __init__(self, command: Sequence[str], log_path: Path, kept: socket.socket) -> None:
        port: int = kept.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = FleetLog(log_path)
        self._command = [*command, "--port", str(port)]
        self._process = self._start()

    def stop(self) -> None:
        """End it as its user would."""
        stop(self._process)

    async def kill_supervisor(self) -> Injected:
        """SIGKILL the supervisor, wait until every child is gone too, and start another one."""
        pids, pid = self.log.pids(), self._process.pid
        at, epoch_s = trio.current_time(), time.time()
        os.kill(pid, signal.SIGKILL)
        self._process.wait()
        await wait_until(
            lambda: all(map(is_gone, pids.values())),
            PROOF_TIMEOUT_S,
            f"the children {pids} of the killed supervisor are gone",
        )
        proof = f"pid {pid} gone, its {len(pids)} children {trio.current_time() - at:.2f} s later"
        self._process = await trio.to_thread.run_sync(self._start)
        return Injected(f"{SUPERVISOR}-kill", SUPERVISOR, pid, at, epoch_s, proof)

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.path.open("ab") as output:
            process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            wait_ready(process, f"{self.url}/health/ready", self.log.path, START_DEADLINE_S)
        except BaseException:
            stop(process)
            raise
        return process


@contextmanager
def own_fleet(options: Sequence[str], log_path: Path) -> Iterator[OwnFleet]:
    """Run `triolet serve` with these options and yield it.

    Raises:
      ServerDidNotStartError: with the end of its log.
    """
    program = str(Path(sys.executable).with_name("triolet"))
    log_path.write_bytes(b"")
    with socket.socket() as kept:
        # Bound and never listening: nobody else gets the port while nobody is there. Several
        # servers share it, and may only do so with sockets that say so from the start.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(("127.0.0.1", 0))
        fleet = OwnFleet([program, "serve", *options], log_path, kept)
        try:
            yield fleet
        finally:
            fleet.stop()

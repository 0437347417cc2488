"""A fleet of real processes for the fault matrix, in which every link goes through the proxy.

One server, two prefill and two decode workers, so that requests can move.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from loadtest.harness.http import get
from tests import forked
from transport.frames import WorkerHeartbeat
from triolet.audit import FleetAudit
from triolet.invariants import check_at_rest

from .processes import RoleProcess, within
from .proxy import FrameProxy, Place
from .rules import Fate, Rule, Way, with_fields
from .state import state_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from transport.frames import AnyFrame

    from .rules import Link

SERVER: Final = "server"
PREFILLS: Final = ("p0", "p1")
DECODES: Final = ("d0", "d1")
WORKERS: Final = (*PREFILLS, *DECODES)
SENDS_BYTES: Final = "p1"
"""The prefill worker without shared memory, so that KV bytes on the wire can be damaged too."""

START_DEADLINE_S = 240.0
"""Timeout for five interpreters, four of which import torch: seconds on an idle machine."""
SETTLE_DEADLINE_S = 120.0
"""Timeout that includes restarting a killed worker."""
POLL_S = 0.05
"""Polling interval: for an audit each of four workers reads its whole pool."""

ARM_DEADLINE_S = 30.0
"""Timeout for a worker's thread, which may have to share its core."""

STALL_TIMEOUT_S = 4.0
"""Shorter than the default of 10 s, because each cell with a silent client takes that long. Still
longer than any process is stopped: a server's pause is not its clients' silence."""
MAX_NUM_SEQS = 4
SERVER_OPTIONS = (
    *("--set", f"server.stall_timeout_s={STALL_TIMEOUT_S}"),
    # Small, so that little unread data pauses a row.
    *("--set", "server.token_window=16"),
    *("--set", "server.drain_timeout_s=1"),
    # Short prompts must go through prefill, or some phases would never occur.
    *("--set", "server.routing.max_local_tokens=0"),
    # Both questions of a cell go to one prefill worker whose step is held. A busy machine computes
    # less than one of their prompts in the default of 0.25 s, and the second one would wait in the
    # server.
    *("--set", "server.routing.backlog_s=60"),
    # Avoid a broken pair for the rest of a partition (3 s, noticed after 2 s), but not in the next
    # cells, which use that pair too.
    *("--set", "server.recovery.path_avoid_s=1"),
    # A held question must not make another one refused, shortened or moved.
    *("--set", "server.overload.slo.default_s=600"),
)
ENGINE_OPTIONS = (
    *("--set", "worker.engine.dtype=float32"),
    *("--set", "worker.engine.threads=1"),
    *("--set", f"worker.engine.max_num_seqs={MAX_NUM_SEQS}"),
    # Several steps for a long prompt, so that one can be held in the middle.
    *("--set", "worker.engine.max_num_batched_tokens=128"),
    # An audit finds writes to free blocks.
    *("--set", "worker.engine.poison_freed_blocks=true"),
)
PREFILL_OPTIONS = ("--set", "worker.engine.kv_pool_bytes=64MiB")
DECODE_OPTIONS = ("--set", "worker.engine.kv_pool_bytes=11MiB")
"""116 blocks of the demo model: too few for two answers of full length with 64 blocks each."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class FleetUnwellError(Exception):
    """The fleet did not come back to rest."""


class Fleet:
    """The processes and the proxy.

    Args:
      directory: private folder for sockets.
      logs: folder for the processes' output.
      nursery: runs readers and bridges.

    Attributes:
      port: the server's port.
      url: the server's URL.
      proxy: the proxy between all processes.
      processes: the processes by name.
    """

    def __init__(self, directory: Path, logs: Path, nursery: trio.Nursery) -> None:
        # Bound but never listening, so that no other process gets the port, even while the server
        # is down.
        self._kept = socket.socket()
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._kept.bind(("127.0.0.1", 0))
        self.port: int = self._kept.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._nursery = nursery
        places = [
            Place(name, kind, directory / f"{name}.{kind}", directory / f"{name}.{kind}.real")
            for name in WORKERS
            for kind in (("control", "kv") if name in DECODES else ("control",))
        ]
        self.proxy = FrameProxy(places)
        self.processes = {
            name: RoleProcess(name, command, os.environ | ENVIRONMENT, logs / f"{name}.log")
            for name, command in _commands(directory, self.port).items()
        }

    @property
    def server(self) -> RoleProcess:
        """The server process."""
        return self.processes[SERVER]

    async def start(self) -> None:
        """Start everything and wait until requests are accepted."""
        await self._nursery.start(self.proxy.run)
        await self.settle(START_DEADLINE_S)

    async def stop(self) -> None:
        """Stop every process."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for process in self.processes.values():
                    nursery.start_soon(process.terminate)
        self._kept.close()

    def revive(self) -> None:
        """Restart killed processes.

        Raises:
          FleetUnwellError: a process exited by itself.
        """
        for process in self.processes.values():
            if process.is_running:
                continue
            if process.fell_by_itself:
                raise FleetUnwellError(f"{process.name} exited by itself: {process.last_words()}")
            process.start(self._nursery)

    async def settle(self, deadline_s: float = SETTLE_DEADLINE_S) -> None:
        """Wait until every process is up and accepts work, every invariant holds, and nothing is
        left.

        Raises:
          FleetUnwellError: this did not happen; says what is wrong.
        """
        wrong = ["never looked"]
        with trio.move_on_after(deadline_s):
            while True:
                self.revive()
                try:
                    wrong = await self._unrest()
                except (OSError, trio.TooSlowError) as error:
                    wrong = [f"the server does not answer: {error!r}"]
                if not wrong:
                    return
                await trio.sleep(POLL_S)
        raise FleetUnwellError("; ".join(wrong))

    def within(self, limit_s: float, what: str) -> AbstractAsyncContextManager[None]:
        """Limit the time of the body; on a timeout, report the fleet's state."""
        return within(limit_s, what, lambda: state_of(self))

    async def audit(self) -> FleetAudit:
        """Return an audit of every process.

        Raises:
          OSError: the server does not answer, or not with an audit.
        """
        status, body = await get(self.url, "/fleet/audit")
        if status != 200:
            raise ConnectionError(f"no audit: {body.decode()}")
        return FleetAudit.from_json(body)

    async def arm(self, worker: str, order: str) -> None:
        """Send an order to a worker's gate, and wait until it has it: steps do not wait."""
        process = self.processes[worker]
        process.order(order)
        async with self.within(ARM_DEADLINE_S, f"the gate of {worker} to take {order!r}"):
            await process.wait_line(
                lambda line: line.event == "order_taken" and line.fields["order"] == order
            )

    def new_page(self) -> None:
        """Clear the journals of frames and logs."""
        self.proxy.sightings.clear()
        for process in self.processes.values():
            process.lines.clear()

    async def announce(self) -> None:
        """Send the heartbeats as the rules now rewrite them, instead of half a second later."""
        for name in WORKERS:
            await self.proxy.repeat_heartbeats(name)

    async def _unrest(self) -> list[str]:
        """Return what is not yet at rest, according to the server and to an audit of every
        process."""
        status, body = await get(self.url, "/health/ready")
        if status != 200:
            return [body.decode()]
        audit = await self.audit()
        wrong = [str(violation) for violation in check_at_rest(audit)]
        if audit.server.connections != 1:
            wrong.append(f"{audit.server.connections} connections, the auditor's included")
        alive = {view.name for view in audit.workers if view.state == "alive"}
        return wrong + [f"{name} is not alive" for name in WORKERS if name not in alive]


@asynccontextmanager
async def running_fleet(logs: Path) -> AsyncIterator[Fleet]:
    """Run a fleet; stop it and clean up at the end."""
    await trio.Path(logs).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        async with trio.open_nursery() as nursery:
            fleet = Fleet(Path(directory), logs, nursery)
            try:
                await fleet.start()
                yield fleet
            finally:
                await fleet.stop()
                nursery.cancel_scope.cancel()


def cordon(names: tuple[str, ...]) -> Rule:
    """Return the rule that makes workers announce that they accept no new work."""

    def wants(link: Link, way: Way, frame: AnyFrame) -> bool:
        return isinstance(frame, WorkerHeartbeat) and link.worker in names

    return Rule(Fate.REWRITE, wants, rewrite=lambda frame: with_fields(frame, is_draining=True))


def full(names: tuple[str, ...]) -> Rule:
    """Return the rule that makes workers announce that they have no room for a sequence."""

    def wants(link: Link, way: Way, frame: AnyFrame) -> bool:
        return isinstance(frame, WorkerHeartbeat) and link.worker in names

    def without_credit(frame: AnyFrame) -> AnyFrame:
        return with_fields(frame, row_credit=0, token_credit=0)

    return Rule(Fate.REWRITE, wants, rewrite=without_credit)


def _commands(directory: Path, port: int) -> dict[str, list[str]]:
    triolet = str(Path(sys.executable).with_name("triolet"))
    gated = [sys.executable, "-m", "tests.faults.worker"]
    log = ("--set", "process.log_level=info")
    server = [
        *(triolet, SERVER, "--set", f"server.port={port}", *SERVER_OPTIONS, *log),
        *("--set", f"process.supervisor_pid={forked.PARENT_PID}"),
    ]
    commands = {SERVER: server}
    for role in ("prefill", "decode"):
        own = [name for name in WORKERS if (name in PREFILLS) == (role == "prefill")]
        addresses = ",".join(f"ipc://{directory}/{name}.control" for name in own)
        server += ["--set", f"server.{role}_addresses={addresses}"]
    for name in WORKERS:
        role = "prefill" if name in PREFILLS else "decode"
        command = [*gated, role, "--set", f"worker.name={name}", *ENGINE_OPTIONS, *log]
        command += ["--set", f"worker.control_address=ipc://{directory}/{name}.control.real"]
        if role == "decode":
            command += ["--set", f"decode.kv_address=ipc://{directory}/{name}.kv.real"]
            command += DECODE_OPTIONS
        else:
            command += PREFILL_OPTIONS
            if name == SENDS_BYTES:
                command += ["--set", "link.wire.share_memory=off"]
        commands[name] = command
    return commands

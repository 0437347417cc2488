"""A fleet of real processes whose capacity is a formula: one server, and paced workers.

Knows how to start, audit and stop them; knows no load. With `cost=None` the workers are the
product's own and compute the demo model.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from triolet.audit import FleetAudit

from ..harness.processes import RoleProcess, get
from .mechanisms import EVERYTHING
from .modelled import COST, StepCost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SERVER: Final = "server"
START_DEADLINE_S: Final = 240.0
"""Three interpreters, two of which import torch: seconds on a machine with nothing else to do."""
POLL_S: Final = 0.1
ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
KV_POOL: Final = "96MiB"
"""1000 blocks of the demo model: rows are what decode runs out of, not blocks."""


class FleetDidNotStartError(Exception):
    """A process ended, or requests were not taken in time."""


@dataclass(frozen=True, slots=True)
class RealShape:
    """How large a fleet is.

    Attributes:
      prefills: workers.
      decodes: workers.
      max_num_seqs: rows of a decode step.
      cost: of a step; None lets the demo model be computed.
      mechanisms: what of the server is switched on, by name.
      server_options: more of them.
    """

    prefills: int = 1
    decodes: int = 1
    max_num_seqs: int = 32
    cost: StepCost | None = COST
    mechanisms: str = EVERYTHING
    server_options: tuple[str, ...] = ()


class RealFleet:
    """Its processes.

    Attributes:
      port: of the server.
      processes: by name.
    """

    def __init__(self, shape: RealShape, directory: Path, logs: Path) -> None:
        # Bound and never listening: nobody else gets the port, while the server is away either.
        self._kept = socket.socket()
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._kept.bind(("127.0.0.1", 0))
        self.port: int = self._kept.getsockname()[1]
        self.processes = {
            name: RoleProcess(name, command, os.environ | ENVIRONMENT, logs / f"{name}.log")
            for name, command in commands(shape, directory, self.port).items()
        }

    async def start(self, nursery: trio.Nursery) -> None:
        """Start everything and wait until requests are taken.

        Raises:
          FleetDidNotStartError: with the last words of whoever ended.
        """
        for process in self.processes.values():
            process.start(nursery)
        with trio.move_on_after(START_DEADLINE_S):
            while True:
                for process in self.processes.values():
                    if not process.is_running:
                        raise FleetDidNotStartError(f"{process.name}: {process.last_words()}")
                try:
                    status, _ = await get(self.port, "/health/ready")
                except (OSError, trio.TooSlowError):
                    status = 0
                if status == 200:
                    return
                await trio.sleep(POLL_S)
        raise FleetDidNotStartError(f"not ready within {START_DEADLINE_S:.0f} s")

    async def stop(self) -> None:
        """End every process."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for process in self.processes.values():
                    nursery.start_soon(process.terminate)
        self._kept.close()

    async def audit(self) -> FleetAudit:
        """Return every process's account of itself.

        Raises:
          OSError: the server does not answer, or not with an audit.
        """
        status, body = await get(self.port, "/fleet/audit")
        if status != 200:
            raise ConnectionError(f"no audit: {body.decode()}")
        return FleetAudit.from_json(body)


@asynccontextmanager
async def real_fleet(shape: RealShape, logs: Path) -> AsyncIterator[RealFleet]:
    """Run a fleet; end it, and everything that it left, at the end."""
    await trio.Path(logs).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="overload-") as directory:
        async with trio.open_nursery() as nursery:
            fleet = RealFleet(shape, Path(directory), logs)
            try:
                await fleet.start(nursery)
                yield fleet
            finally:
                await fleet.stop()
                nursery.cancel_scope.cancel()


def commands(shape: RealShape, directory: Path, port: int) -> dict[str, list[str]]:
    """Return what starts each process."""
    belongs = ("--set", f"process.supervisor_pid={os.getpid()}")
    server = [
        *(sys.executable, "-m", "loadtest.overload.switched_server", shape.mechanisms),
        *(SERVER, "--set", f"server.port={port}"),
        *shape.server_options,
        *belongs,
    ]
    started = {SERVER: server}
    worker = [sys.executable, "-m", "ops.cli"]
    if shape.cost is not None:
        paced = "loadtest.overload.paced_worker"
        worker = [sys.executable, "-m", paced, *map(str, shape.cost)]
    for role, number in (("prefill", shape.prefills), ("decode", shape.decodes)):
        control = {f"{role}-{n}": f"ipc://{directory}/{role}-{n}.control" for n in range(number)}
        server += ["--set", f"server.{role}_addresses={','.join(control.values())}"]
        for name, address in control.items():
            fields = {
                "worker.name": name,
                "worker.control_address": address,
                "worker.engine.threads": 1,
                "worker.engine.max_num_seqs": shape.max_num_seqs,
                "worker.engine.kv_pool_bytes": KV_POOL,
            }
            if role == "decode":
                fields["decode.kv_address"] = f"ipc://{directory}/{name}.kv"
            settings = [
                word for one in fields.items() for word in ("--set", "=".join(map(str, one)))
            ]
            started[name] = [*worker, role, *settings, *belongs]
    return started

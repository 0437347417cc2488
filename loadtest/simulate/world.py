"""One simulated fleet: servers, workers and clients on one network, in one Trio run.

Knows who there is; injector.py says what befalls them, checker.py whether they bear it.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from triolet.config import EngineConfig, LinkConfig, ServerConfig
from triolet.ids import Role
from triolet.units import MILLISECONDS, SECONDS

from .engine import Cost
from .faults import Fault
from .process import ServerProcess, WorkerProcess
from .weather import control_address, make_network

if TYPE_CHECKING:
    from collections import Counter

    from .client import Client
    from .faults import Plan
    from .process import Process
    from .trace import Trace

BLOCK_SIZE: Final = 4
BYTES_PER_BLOCK: Final = BLOCK_SIZE * 4
MANY_BLOCKS: Final = 64
FEW_BLOCKS: Final = 15
"""A long request fits alone; two of them push one another out."""
SWEEP_S: Final = 200 * MILLISECONDS
"""Four times the product's: a sweep is most of what an idle process costs, and nothing that is
simulated hangs on its length."""
COSTS: Final = {
    Role.PREFILL: Cost(20 * MILLISECONDS, 2 * MILLISECONDS),
    Role.DECODE: Cost(60 * MILLISECONDS, 5 * MILLISECONDS),
}
"""Slow, so that few steps fill the time in which faults come."""


class World:
    """Everything that a seed made.

    Args:
      seed: decides epochs, and what the network draws.
      plan: whether blocks are few.
      trace: takes down what happens.
      happened: counts faults that come out of the inside.
      causes: counts why attempts are begun anew.

    Attributes:
      violations: what must not have happened, the first first.
      clients: everybody who ever asked.
    """

    def __init__(
        self,
        seed: int,
        plan: Plan,
        trace: Trace,
        happened: Counter[Fault],
        causes: Counter[str],
    ) -> None:
        self.rng = random.Random(f"world {seed}")
        self.trace = trace
        self.violations: list[str] = []
        self.clients: list[Client] = []
        self.network, self.weather = make_network(seed, trace)
        self.link = LinkConfig(
            sweep_interval_s=SWEEP_S,
            kv_chunk_bytes=2 * BYTES_PER_BLOCK,
            kv_window_bytes=4 * BYTES_PER_BLOCK,
            kv_ring_bytes=8 * BYTES_PER_BLOCK,
        )
        self.happened = happened
        self.causes = causes
        self._num_blocks = FEW_BLOCKS if Fault.EXHAUSTION in plan.enabled else MANY_BLOCKS
        names = {role: [f"{role}-{n}" for n in range(2)] for role in (Role.PREFILL, Role.DECODE)}
        self.workers = [self._worker(role, name) for role in names for name in names[role]]
        num_servers = self.rng.choice((1, 1, 2))
        self.servers = [
            self._server(f"server-{number}", names[Role.PREFILL], names[Role.DECODE])
            for number in range(num_servers)
        ]

    @property
    def processes(self) -> list[Process]:
        """Everybody who can be killed."""
        return [*self.workers, *self.servers]

    def report(self, what: str) -> None:
        """Take down what must not happen."""
        if what not in self.violations:
            self.violations.append(what)
            self.note(f"VIOLATION {what}")

    def note(self, what: str) -> None:
        """Take down what happened."""
        self.trace.note(what)

    def _worker(self, role: Role, name: str) -> WorkerProcess:
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            target_step_s=100 * MILLISECONDS,
        )
        return WorkerProcess(role, name, self, config, self._num_blocks, COSTS[role])

    def _server(self, name: str, prefills: list[str], decodes: list[str]) -> ServerProcess:
        config = ServerConfig(
            model_dir="",
            model_name="simulated",
            prefill_addresses=tuple(control_address(worker) for worker in prefills),
            decode_addresses=tuple(control_address(worker) for worker in decodes),
            link=self.link,
            token_window=8,
            stall_timeout_s=4 * SECONDS,
            worker_wait_s=10 * SECONDS,
        )
        return ServerProcess(name, self, config)

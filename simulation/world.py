"""The simulated fleet of one seed: servers, workers and clients on one in-memory network, in one
Trio run."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.config import (
    EngineConfig,
    LinkConfig,
    LocalPrefill,
    RecoveryConfig,
    RoutingConfig,
    ServerConfig,
)
from triolet.ids import Role
from triolet.units import MILLISECONDS, SECONDS

from .network import control_address, draw_hosts, make_network
from .roles import ServerProcess, WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .client import Client
    from .engine import SimulatedCost
    from .faults import Tally
    from .process import Process
    from .trace import Trace

BLOCK_SIZE: Final = 4
BYTES_PER_BLOCK: Final = BLOCK_SIZE * 4
HOST_BLOCKS: Final = 6
"""Few bytes of host cache, so that blocks are evicted from it too."""
RETURN_S: Final = 4 * SECONDS
"""Short, so that a lost zone has returned before the end."""
SWEEP_S: Final = 250 * MILLISECONDS
"""Five times the default: sweeps are most of an idle process's cost, and no check depends on their
interval."""


class Sizes(NamedTuple):
    """Sizes of the fleet.

    Attributes:
      num_servers: number of servers; there are two workers of each role.
      num_blocks: blocks of each worker's pool.
      max_num_seqs: rows of a step.
      costs: cost of steps, by role.
      has_guesses: whether decode workers guess coming tokens.
      local_prefill: which workers compute prompts.
      zones: zones of the first and the second worker of each role; empty without zones.
      sweep_s: interval at which deadlines are checked.
      candidates: workers of each role that a request compares at first.
    """

    num_servers: int
    num_blocks: int
    max_num_seqs: int
    costs: Mapping[Role, SimulatedCost]
    has_guesses: bool = False
    local_prefill: LocalPrefill = LocalPrefill.AUTO
    zones: tuple[str, str] = ("", "")
    sweep_s: float = SWEEP_S
    candidates: int = 2


class World:
    """The fleet of a seed.

    Args:
      seed: random seed of epochs and the network's faults.
      sizes: sizes of the fleet.
      trace: records events.
      tally: counts faults.

    Attributes:
      violations: descriptions of violations, in order.
      clients: all clients so far.
    """

    def __init__(self, seed: int, sizes: Sizes, trace: Trace, tally: Tally) -> None:
        self.rng = random.Random(f"world {seed}")
        self.trace = trace
        self.violations: list[str] = []
        self.clients: list[Client] = []
        self.network, self.weather = make_network(seed, trace)
        self.link = LinkConfig(
            sweep_interval_s=sizes.sweep_s,
            kv_chunk_bytes=2 * BYTES_PER_BLOCK,
            kv_window_bytes=4 * BYTES_PER_BLOCK,
            kv_ring_bytes=8 * BYTES_PER_BLOCK,
        )
        self.tally = tally
        self._sizes = sizes
        names = {role: [f"{role}-{n}" for n in range(2)] for role in (Role.PREFILL, Role.DECODE)}
        self._hosts = draw_hosts(seed, [name for role in names for name in names[role]])
        self.workers = [self._worker(role, name) for role in names for name in names[role]]
        self.servers = [
            self._server(f"server-{number}", names[Role.PREFILL], names[Role.DECODE])
            for number in range(sizes.num_servers)
        ]

    @property
    def processes(self) -> list[Process]:
        """All processes that can be killed."""
        return [*self.workers, *self.servers]

    def zones_of(self, request_id: bytes) -> frozenset[str]:
        """Return the zones that a client's request is bound to; empty for any."""
        mine = (client for client in self.clients if client.request_id == request_id)
        client = next(mine, None)
        return frozenset() if client is None else client.wish.scheduling.placement.zones

    def report(self, what: str) -> None:
        """Record a violation."""
        if what not in self.violations:
            self.violations.append(what)
            self.note(f"VIOLATION {what}")

    def note(self, what: str) -> None:
        """Record an event."""
        self.trace.note(what)

    def _worker(self, role: Role, name: str) -> WorkerProcess:
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            max_num_seqs=self._sizes.max_num_seqs,
            max_num_batched_tokens=16,
            target_step_s=100 * MILLISECONDS,
            host_cache_bytes=HOST_BLOCKS * BYTES_PER_BLOCK,
        )
        sizes = self._sizes
        return WorkerProcess(
            role,
            name,
            self,
            config,
            sizes.num_blocks,
            sizes.costs[role],
            self._hosts[name],
            guesses=sizes.has_guesses and role is Role.DECODE,
            zone=sizes.zones[int(name[-1])],
        )

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
            routing=RoutingConfig(self._sizes.local_prefill, candidates=self._sizes.candidates),
            recovery=RecoveryConfig(zone_return_s=RETURN_S),
            zone=self._sizes.zones[0],
        )
        return ServerProcess(name, self, config)

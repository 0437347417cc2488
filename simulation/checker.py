"""Check the invariants of a run: at every moment, and at its end.

Reads the state of servers and workers and changes nothing. Each finding is one sentence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from prefill.core import PrefillCore
from server.contract.generation import FinishReason
from triolet.errors import LocalProtocolError
from triolet.invariants import check_at_rest, check_invariants
from triolet.units import SECONDS

from .client import EMBEDDED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triolet.ids import AttemptKey

    from .roles import WorkerProcess
    from .world import World

WHOLE: Final = frozenset({EMBEDDED, *FinishReason})
"""Endings of clients that received everything."""
SLACK_S: Final = 0.7 * SECONDS
"""Interval of the checks, plus time for messages that are sent only at a sweep."""


class Checker:
    """Invariants of one run.

    Args:
      world: the fleet to check.
      latest_s: longest delay of a frame.
    """

    def __init__(self, world: World, latest_s: float) -> None:
        self._world = world
        link = world.link
        self._orphan_s = link.lease_ttl_s + link.sweep_interval_s + latest_s + SLACK_S
        # Time since which no server claims a lease, by worker, epoch and attempt.
        self._orphans: dict[tuple[str, int, AttemptKey], float] = {}

    def look(self) -> None:
        """Check everything that must hold at any moment."""
        lives = [
            w.core._identity.me.is_process_of for w in self._world.workers if w.engine is not None
        ]
        for server in self._world.servers:
            if server.fleet is not None:
                try:
                    server.fleet.check_accounting()
                except LocalProtocolError as error:
                    self._report(f"{server}: {error}")
                live = server.fleet._requests.table
                server.charges[-1].check(one.spec.request_id for one in live)
                assert server.routes is not None
                server.routes.look()
                deaths = {life for one in live for life in one.poison.deaths}
                for dead in [one for one in deaths if any(is_process(one) for is_process in lives)]:
                    self._report(f"{server} considers {dead} dead, but its process lives")
        self._check_workers()

    def is_quiet(self) -> bool:
        """Return whether nothing is leased or running, and no client waits."""
        return all(map(_is_idle, self._world.workers)) and not any(
            worker.attempts
            for server in self._world.servers
            if server.fleet is not None
            for worker in server.fleet.status().workers
        )

    def look_at_end(self) -> None:
        """Check that nothing is left over."""
        self._check_strays()
        self._check_charges()
        for worker in self._world.workers:
            if worker.engine is None:
                self._report(f"{worker} did not come back")
                continue
            leased = worker.engine.ledger.leased_blocks
            if leased:
                self._report(f"{worker} still leases {leased} blocks")
            if worker.core.attempt_table.attempts:
                self._report(
                    f"{worker} still has attempts "
                    f"{list(map(str, worker.core.attempt_table.attempts))}"
                )
            if isinstance(worker.core, PrefillCore) and worker.core.shipper.ring_bytes:
                self._report(f"{worker} still holds {worker.core.shipper.ring_bytes} bytes of KV")
        for server in self._world.servers:
            if server.fleet is None:
                self._report(f"{server} did not come back")
                continue
            status = server.fleet.status()
            if status.queued or status.running:
                self._report(f"{server} still has {status.queued} + {status.running} requests")
            requests = server.fleet._requests
            for queue in requests.queues:
                if queue.num_running or queue.num_tenants:
                    self._report(f"{server} still charges {queue.num_tenants} tenants")
            for worker_status in status.workers:
                if worker_status.attempts:
                    self._report(f"{server} still counts attempts on {worker_status.name}")

    async def audit(self) -> None:
        """Audit the idle fleet from each server, like an operator."""
        for server in self._world.servers:
            if server.fleet is not None:
                audit = await server.fleet.audit()
                for found in {*check_invariants(audit), *check_at_rest(audit)}:
                    self._report(f"audit of {server}: {found}")

    def _check_strays(self) -> None:
        """Check that nothing was computed long after its client had disconnected."""
        for client in self._world.clients:
            for worker in self._world.workers:
                if client.left_at is None or worker.engine is None:
                    continue
                sampled_at = worker.engine.sampled_at.get(client.wish.chosen_by, 0.0)
                late_s = sampled_at - max(client.left_at, worker.away_until)
                if late_s > self._orphan_s:
                    self._report(f"{worker} computed for {client} {late_s:.1f} s after it left")

    def _check_charges(self) -> None:
        """Check that every client is charged for what it received, despite faults."""
        charges = {
            request_id: charge
            for server in self._world.servers
            for of_life in server.charges
            for request_id, charge in of_life.of.items()
        }
        for client in self._world.clients:
            charge = charges.get(client.request_id)
            if charge is None:
                if client.ending in WHOLE:
                    self._report(f"{client} got its answer and is not charged")
                continue
            usage, num_read = charge.usage, len(client.token_ids)
            if usage.prompt_tokens != len(client.wish.prompt_ids):
                self._report(f"{client} is charged for a prompt of {usage.prompt_tokens} tokens")
            if client.ending in WHOLE and not charge.is_begun:
                self._report(f"{client} got its answer without a charge")
            # A client that disconnected or was cut off may not have read everything.
            is_right = usage.completion_tokens == num_read
            is_right |= client.ending not in WHOLE and usage.completion_tokens > num_read
            if not is_right:
                self._report(
                    f"{client} is charged {usage.completion_tokens} tokens, not {num_read}"
                )

    def _check_workers(self) -> None:
        wanted = set(self._wanted())
        orphans: dict[tuple[str, int, AttemptKey], float] = {}
        now = trio.current_time()
        for worker in self._world.workers:
            if worker.engine is None or not worker.is_running:
                continue
            core = worker.core
            try:
                core.attempt_table.check_agreement()
                worker.engine.prefix_cache.check_invariants()
                if isinstance(core, PrefillCore):
                    core.shipper.check_invariants()
            except AssertionError as error:
                self._report(f"{worker}: {error}")
            worker.engine.check_poison()
            for key in core.attempt_table.attempts:
                if key in wanted:
                    continue
                name = (worker.name, worker.lives, key)
                since = max(self._orphans.get(name, now), worker.away_until)
                orphans[name] = since
                if now - since > self._orphan_s:
                    self._report(
                        f"{worker} keeps {key}, which no server wants for {now - since:.1f} s"
                    )
        self._orphans = orphans

    def _wanted(self) -> Iterable[AttemptKey]:
        for server in self._world.servers:
            if server.fleet is not None:
                for request in server.fleet._requests.table:
                    if request.attempt is not None:
                        yield request.attempt.key

    def _report(self, what: str) -> None:
        self._world.report(what)


def _is_idle(worker: WorkerProcess) -> bool:
    if worker.engine is None or not worker.core.attempt_table.is_empty:
        return False
    return not (isinstance(worker.core, PrefillCore) and worker.core.shipper.ring_bytes)

"""The workers of one server, and the few of them that a request compares. Open it when the cost of
a request grows with the fleet, or when a worker that joined gets nothing.

What follows from the list of workers is kept until the list changes. Whether a worker is usable is
not kept: routing asks the worker.

A request compares `candidates` workers of each role: some that hold most of its prompt, and random
ones. The least loaded of d random workers has ln ln n / ln d + O(1) requests more than the average
of n workers (Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001).
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.ids import Role

from .routing import MIN_GAIN_TOKENS

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Iterable

    from triolet.service_class import Placement

    from .routing import Need
    from .workers import PrefixHolders, Worker

ROLES: Final = (Role.DECODE, Role.PREFILL)
MAX_POOLS: Final = 64
"""Placements of which the workers are kept. Tenants use few combinations of zones and pools."""


class AdmissionLimits(NamedTuple):
    """The largest request that workers can hold.

    Attributes:
      max_model_len: positions; the minimum over workers.
      pool_tokens: tokens in the largest decode pool; None if no decode worker has ever connected.
      prefill_pool_tokens: tokens in the largest prefill pool; None likewise.
    """

    max_model_len: int
    pool_tokens: int | None = None
    prefill_pool_tokens: int | None = None


class WorkerPool:
    """The workers that requests of one placement may use, connected or not, in the roster's order.
    Those that were not greeted yet are included: they may turn out to be of it.

    Attributes:
      workers: all of them.
      of_role: the same by role.
      most_of_role: number of workers of the role that has more.
      of_zone: the same by role and zone.
      block_size: tokens per block of their prefix caches.
      limits: the largest request that they can hold.
    """

    def __init__(self, workers: Iterable[Worker], max_model_len: int) -> None:
        self.workers = dict.fromkeys(workers)
        self.of_role = {role: [w for w in self.workers if w.role is role] for role in ROLES}
        self.most_of_role = max(map(len, self.of_role.values()))
        self.of_zone: dict[tuple[Role, str], list[Worker]] = {}
        for worker in self.workers:
            self.of_zone.setdefault((worker.role, worker.site.zone), []).append(worker)
        # Including workers that have gone.
        capacities = {
            role: [worker.capacity for worker in members if worker.capacity is not None]
            for role, members in self.of_role.items()
        }
        known = [capacity for of_role in capacities.values() for capacity in of_role]
        self.block_size = min((one.block_size for one in known), default=1)
        self.limits = AdmissionLimits(
            min([max_model_len, *(one.max_model_len for one in known)]),
            *(
                max((one.num_blocks * one.block_size for one in capacities[role]), default=None)
                for role in ROLES
            ),
        )


class Roster:
    """The workers of one server.

    Args:
      workers: its first workers.
      max_model_len: maximum tokens of prompt and completion together, whatever workers hold.
      candidates: workers of each role that a request compares.
      rng: draws them.

    Attributes:
      workers: members, and former members that still have attempts; changed by `add` and `remove`.
    """

    def __init__(
        self, workers: Iterable[Worker], max_model_len: int, candidates: int, rng: random.Random
    ) -> None:
        self.workers: list[Worker] = []
        self._pool = lru_cache(2 * MAX_POOLS)(self._make_pool)
        self._max_model_len = max_model_len
        self._candidates = candidates
        self._rng = rng
        self._holders: dict[Role, PrefixHolders] = {role: {} for role in ROLES}
        for worker in workers:
            self.add(worker)

    def add(self, worker: Worker) -> None:
        """Add a new worker."""
        self.workers.append(worker)
        worker.prefixes.holders = self._holders[worker.role]
        self.changed()

    def remove(self, worker: Worker) -> None:
        """Remove a worker that has left."""
        self.workers.remove(worker)
        worker.prefixes.clear()
        self.changed()

    def changed(self) -> None:
        """Forget the pools: a worker joined, left, or told its labels and capacity."""
        self._pool.cache_clear()

    def pool(self, placement: Placement | None, *, is_overflow: bool = True) -> WorkerPool:
        """Return the workers of a placement; all workers for None.

        Args:
          placement: the placement.
          is_overflow: whether the shared pool counts for a tenant with overflow.
        """
        has_overflow = placement is not None and placement.has_overflow
        return self._pool(placement, is_overflow=is_overflow and has_overflow)

    def _make_pool(self, placement: Placement | None, *, is_overflow: bool) -> WorkerPool:
        return WorkerPool(
            (
                worker
                for worker in self.workers
                if worker.welcome is None
                or placement is None
                or placement.admits(*worker.site, is_overflow=is_overflow)
            ),
            self._max_model_len,
        )

    def candidates(self, pool: WorkerPool, need: Need) -> Collection[Worker]:
        """Return the workers of a pool that a request compares: `pool.workers` if they are few, or
        if it failed before and has to avoid some.

        A restricted worker is left out unless it may get one more attempt.
        """
        if (
            pool.most_of_role <= self._candidates
            or need.shunned
            or need.is_isolated
            or need.is_suspect
        ):
            return pool.workers
        home = [pool.of_zone.get((Role.DECODE, need.home_zone), [])] if need.home_zone else []
        decodes = self._some(Role.DECODE, [pool.of_role[Role.DECODE], *home], pool, need)
        near: list[list[Worker]] = []
        if len(pool.of_zone) > len(ROLES) and not need.input_share:
            # KV stays in a zone, so prefill workers are drawn where the decode workers are.
            zones = dict.fromkeys(worker.site.zone for worker in decodes)
            near = [pool.of_zone.get((Role.PREFILL, zone), []) for zone in zones]
        prefills = self._some(Role.PREFILL, near, pool, need)
        chosen = dict.fromkeys([*decodes, *prefills])
        return [one for one in chosen if one.breaker.is_whole or one.has_share_left]

    def _some(
        self, role: Role, groups: list[list[Worker]], pool: WorkerPool, need: Need
    ) -> list[Worker]:
        """Return the candidates of a role: all if they are few; else holders of the prompt, and
        random workers, as many of each group, which may be drawn twice."""
        members = pool.of_role[role]
        if len(members) <= self._candidates:
            return members
        chosen = self._holders_of(role, pool, need)
        groups = [group for group in groups if group] or [members]
        count = -(-(self._candidates - len(chosen)) // len(groups))
        for group in groups:
            chosen += self._rng.choices(group, k=count)
        return chosen

    def _holders_of(self, role: Role, pool: WorkerPool, need: Need) -> list[Worker]:
        """Return workers that hold the longest beginnings of a prompt, up to half of the
        candidates, rounded up; of those that hold equally much, random ones."""
        if need.chain is None or need.prompt_tokens < MIN_GAIN_TOKENS:
            return []
        names, holders = need.chain.names(pool.block_size), self._holders[role]
        most = (self._candidates + 1) // 2
        found: dict[Worker, None] = {}
        # The last block that some hold: a worker that holds a block holds those before it.
        at = bisect_left(names, True, key=holders.__contains__)
        while at < len(names) and len(found) < most:
            held = holders[names[at]]
            if len(held) > most:
                found |= dict.fromkeys(self._rng.choices(held, k=most))
                break
            found |= dict.fromkeys(held)
            at = bisect_left(names, True, at, key=lambda name: len(holders[name]) > len(found))
        return [one for one in found if one in pool.workers][:most]

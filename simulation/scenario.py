"""Run one seed: a fleet with clients and faults, then a quiet phase and the final checks."""

from __future__ import annotations

import gc
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from triolet.config import LocalPrefill
from triolet.ids import Role
from triolet.sampling import SamplingParams
from triolet.service_class import Placement, Scheduling, ServiceClass
from triolet.units import MILLISECONDS, SECONDS

from .checker import Checker
from .client import Client, InputClient, Wish
from .deterministic import run
from .engine import VOCAB_SIZE, SimulatedCost, reference
from .faults import Fault, FaultPlan, Tally, draw_loss, draw_plan, draw_zone_loss
from .injector import Injector
from .trace import Trace
from .world import Sizes, World

if TYPE_CHECKING:
    from collections.abc import Sequence

ARRIVALS_S: Final = 4 * SECONDS
"""Clients start within this time."""
CHAOS_S: Final = 8 * SECONDS
"""Faults occur for this long, so that they hit most requests in the middle of their answer."""
SETTLE_S: Final = 40 * SECONDS
"""After the faults every client must have ended within this time."""
NOTICE_S: Final = 2.5 * SECONDS
"""Time until all processes have noticed the last fault: silence means death after 1.5 s."""
FRESH_S: Final = 10 * SECONDS
"""A request after all faults must be answered within this time."""
QUIET_S: Final = 5 * SECONDS
"""Time after the last answer at which nothing may be leased: longer than a lease."""
LOOK_S: Final = 500 * MILLISECONDS
"""Interval of the checker."""
MANY_BLOCKS: Final = 64
FEW_BLOCKS: Final = 15
"""Pool sizes in which one long request fits, but two preempt each other."""
COSTS: Final = {
    Role.PREFILL: SimulatedCost(20 * MILLISECONDS, 2 * MILLISECONDS),
    Role.DECODE: SimulatedCost(60 * MILLISECONDS, 5 * MILLISECONDS),
}
"""Slow steps, so that few steps fill the time of the faults."""
GUESSING_ONE_IN: Final = 3
"""Share of seeds in which decode workers guess coming tokens."""
MIN_CLIENTS, MAX_CLIENTS = 4, 8
NO_ANSWER: Final = ("no_worker", "quarantined", "reset")
"""Endings that no client requested, but that too many faults may cause."""
FIRST_INPUT: Final = 100
"""Number of the first client that requests vectors."""
LONGEST_WAIT_S: Final = 20 * SECONDS
"""Longest wait for a token if one frame was lost: several new attempts while workers drain. A
stream that waits longer is stuck."""
LOSS_SHARE: Final = 0.5
"""Longest wait for a token in mild seeds."""
ZONE_LOSS_SHARE: Final = 0.5
BOUND_SHARE: Final = 0.3
FORKED_SHARE: Final = 0.25
"""Share of clients that request another completion of an earlier prompt."""
MAX_BEGINNING: Final = 14
"""Length of common prefixes: three whole blocks and part of a fourth."""
INSTRUCTIONS: Final = tuple(range(900, 900 + MAX_BEGINNING))
STOP_STRINGS: Final = ("77,", "3,4", "9,1")


@dataclass(slots=True)
class Report:
    """Result of one seed.

    Attributes:
      seed: the seed.
      trace: hash of everything that happened.
      violations: descriptions of violations.
      tally: counts of faults.
      endings: counts of the endings of requests.
      virtual_s: simulated seconds.
      proposed: guesses computed by workers that are live at the end.
      accepted: correct guesses of these.
      shipped: bytes of KV received by workers that are live at the end, by path.
      found: tokens and blocks found in prefix caches of workers that are live at the end, by kind.
      lines: the trace as text, if requested.
    """

    seed: int
    trace: str = ""
    violations: list[str] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    endings: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    proposed: int = 0
    accepted: int = 0
    shipped: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    lines: Sequence[str] = ()


def simulate(seed: int, *, keeps_lines: bool = False) -> Report:
    """Run one seed."""
    report = Report(seed)
    trace = Trace(keeps_lines=keeps_lines)
    is_collecting = gc.isenabled()
    gc.disable()  # a run makes little garbage, and collecting it costs a tenth of the time
    try:
        run(partial(_Scenario(seed, trace, report).run), seed)
    finally:
        if is_collecting:
            gc.enable()
    report.trace = trace.hexdigest()
    report.lines = trace.lines
    return report


class _Scenario:
    def __init__(self, seed: int, trace: Trace, report: Report) -> None:
        self._seed = seed
        self._trace = trace
        self._report = report
        self._rng = random.Random(f"scenario {seed}")
        self._is_mild = self._has_loss = False

    async def run(self) -> None:
        zones = _zones(self._seed)
        plan = _with_loss(draw_plan(self._rng), self._seed)
        plan = _with_zone_loss(plan, zones, self._seed)
        report = self._report
        self._is_mild, self._has_loss = plan.is_mild, plan.loss is not None
        report.tally.asked.update(plan.enabled)
        sizes = _sizes(plan, self._rng)._replace(
            has_guesses=self._seed % GUESSING_ONE_IN == GUESSING_ONE_IN - 2,
            local_prefill=_local_prefill(self._seed),
            zones=zones,
            candidates=_candidates(self._seed),
        )
        world = World(self._seed, sizes, self._trace, report.tally)
        checker = Checker(world, plan.latest_s)
        injector = Injector(world, plan, self._rng, report.tally.happened)
        began_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            for process in world.processes:
                nursery.start_soon(process.keep)
            nursery.start_soon(_look, checker)
            async with trio.open_nursery() as clients:
                wishes = _with_claims(_with_forks(self._wishes(plan), self._seed), self._seed)
                bound_to = () if plan.is_mild else zones
                for wish in _bound(wishes, bound_to, self._seed):
                    clients.start_soon(self._client, world, wish)
                wishes = _with_claims(_inputs(plan, self._seed), self._seed)
                for wish in _bound(wishes, bound_to, self._seed):
                    clients.start_soon(self._client, world, wish, InputClient)
                await injector.run(CHAOS_S)
                healed_at = trio.current_time()
                clients.cancel_scope.deadline = trio.current_time() + SETTLE_S
            await self._settle(world, checker, healed_at, plan.latest_s)
            self._count_gains(world)
            nursery.cancel_scope.cancel()
        report.virtual_s = trio.current_time() - began_at
        report.violations += world.violations
        world.weather.count(report.tally.happened)
        report.tally.happened[Fault.EXHAUSTION] += (
            report.tally.causes["preempted"] + report.tally.causes["refused_no_blocks"]
        )
        for client in world.clients:
            report.endings[client.ending or "none"] += 1

    def _count_gains(self, world: World) -> None:
        """Add the counts of processes that are still running."""
        for worker in world.workers:
            if worker.is_up:
                self._report.proposed += worker.core.counters.speculative_proposed
                self._report.accepted += worker.core.counters.speculative_accepted
                if worker.role is Role.DECODE:
                    counters = worker.core.counters
                    self._report.shipped["shared"] += counters.kv_shared_bytes
                    self._report.shipped["sent"] += counters.kv_bytes - counters.kv_shared_bytes
            if worker.engine is not None:
                counts = worker.engine.prefix_cache.counts
                self._report.found["tokens"] += counts.hit_tokens
                self._report.found["restored blocks"] += counts.restored_blocks

    async def _client(self, world: World, wish: Wish, kind: type[Client] = Client) -> None:
        """Connect one client to a server, and wait until it has ended."""
        await trio.sleep(wish.comes_after_s)
        client = kind(wish, lambda: world.rng.randbytes(16), world.report, world.clients)
        world.clients.append(client)
        server = world.servers[wish.number % len(world.servers)]
        try:
            await server.serve(client.run)
            await client.is_over.wait()
        finally:
            world.note(f"{client} has ended: {client.ending}")
            self._judge(client, world)

    def _judge(self, client: Client, world: World) -> None:
        happened = self._report.tally.happened
        happened[Fault.CANCEL] += client.left_at is not None
        happened[Fault.STALL] += client.has_stalled
        if self._is_mild and client.ending in NO_ANSWER:
            world.report(f"{client} got no answer in a mild seed: {client.ending}")
        if self._has_loss and client.longest_wait_s > LONGEST_WAIT_S:
            world.report(f"{client} waited {client.longest_wait_s:.1f} s in a mild seed")
        if client.ending is None:
            world.report(f"{client} was stuck with {len(client.token_ids)} tokens")

    async def _settle(
        self, world: World, checker: Checker, healed_at: float, latest_s: float
    ) -> None:
        """Check that the fleet serves normally again, and that nothing was leaked."""
        await trio.sleep(NOTICE_S)
        async with trio.open_nursery() as clients:
            clients.cancel_scope.deadline = trio.current_time() + FRESH_S
            for number, _ in enumerate(world.servers):
                prompt_ids = self._prompt(MAX_CLIENTS + number)
                sampling = SamplingParams(max_tokens=6, seed=number)
                clients.start_soon(
                    self._client, world, Wish(MAX_CLIENTS + number, prompt_ids, sampling)
                )
        for client in world.clients[-len(world.servers) :]:
            if client.ending not in ("stop", "length"):
                world.report(f"{client} came after all faults and ended with {client.ending}")
        for _ in range(int(QUIET_S / LOOK_S)):
            if checker.is_quiet():
                break
            await trio.sleep(LOOK_S)
        # Late frames mislead servers until the next heartbeat, and a late RESERVE at a restarted
        # worker has its lease until it expires.
        link = world.link
        forgotten_at = healed_at + latest_s + link.lease_ttl_s + link.sweep_interval_s
        await trio.sleep_until(
            max(trio.current_time(), forgotten_at) + 2 * link.heartbeat_interval_s
        )
        checker.look()
        checker.look_at_end()
        self._trace.finish()  # audits contain threads and memory of this real process
        await checker.audit()

    def _wishes(self, plan: FaultPlan) -> list[Wish]:
        rng = self._rng
        wishes: list[Wish] = []
        for number in range(rng.randint(MIN_CLIENTS, MAX_CLIENTS)):
            prompt_ids = (*self._beginning(wishes), *self._prompt(number))
            sampling = SamplingParams(
                max_tokens=rng.randint(2, 28),
                seed=rng.getrandbits(32),
                ignore_eos=rng.random() < 0.3,
            )
            does_leave = Fault.CANCEL in plan.enabled and rng.random() < 0.5
            does_stall = Fault.STALL in plan.enabled and rng.random() < 0.4
            wishes.append(
                Wish(
                    number,
                    prompt_ids,
                    sampling,
                    stop=(rng.choice(STOP_STRINGS),) if rng.random() < 0.3 else (),
                    priority=rng.choice((0, 0, 0, 1)),
                    comes_after_s=rng.uniform(0.0, ARRIVALS_S),
                    leaves_after_s=rng.uniform(0.0, 4.0) if does_leave else None,
                    stalls_at=rng.randint(1, 12) if does_stall else None,
                    stalls_s=rng.uniform(0.5, 7.0),
                )
            )
        return wishes

    def _beginning(self, wishes: list[Wish]) -> tuple[int, ...]:
        """Return the prefix that a prompt shares with others: instructions, an earlier turn with
        its answer, or nothing."""
        kind = self._rng.random()
        if kind < 0.3 and wishes:
            earlier = self._rng.choice(wishes)
            turn = (*earlier.prompt_ids, *reference(earlier.prompt_ids, earlier.sampling))
            return turn[:MAX_BEGINNING]
        return INSTRUCTIONS[: self._rng.randint(4, MAX_BEGINNING)] if kind < 0.6 else ()

    def _prompt(self, number: int) -> tuple[int, ...]:
        """Return tokens that no other prompt has, so that misplaced KV shows."""
        length = self._rng.randint(0, 24 - MAX_BEGINNING)
        return (1 + number, *(self._rng.randrange(1, VOCAB_SIZE) for _ in range(length)))


def _with_loss(plan: FaultPlan, seed: int) -> FaultPlan:
    """Give every second mild seed one lost frame and one process that stops at about that time.
    Uses a separate generator, so that other draws do not change."""
    rng = random.Random(f"loss {seed}")
    if plan.is_mild and rng.random() < LOSS_SHARE:
        plan = replace(plan, once=None, loss=draw_loss(rng))
    return plan


def _sizes(plan: FaultPlan, rng: random.Random) -> Sizes:
    has_few = Fault.EXHAUSTION in plan.enabled
    return Sizes(
        num_servers=rng.choice((1, 1, 2)),
        num_blocks=FEW_BLOCKS if has_few else MANY_BLOCKS,
        max_num_seqs=4,
        costs=COSTS,
    )


def _local_prefill(seed: int) -> LocalPrefill:
    """Draw which workers compute prompts. Uses a separate generator, so that other draws do not
    change."""
    modes = (LocalPrefill.AUTO, LocalPrefill.AUTO, LocalPrefill.OFF, LocalPrefill.ALWAYS)
    return random.Random(f"local prefill {seed}").choice(modes)


def _inputs(plan: FaultPlan, seed: int) -> list[Wish]:
    """Draw requests for vectors, without common prefixes. Uses a separate generator, so that other
    draws do not change."""
    rng = random.Random(f"inputs {seed}")
    wishes = []
    for number in range(rng.choice((0, 0, 1, 3))):
        middle = (rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(0, MAX_BEGINNING)))
        names = 2 * (FIRST_INPUT + number)
        does_leave = Fault.CANCEL in plan.enabled and rng.random() < 0.5
        wishes.append(
            Wish(
                FIRST_INPUT + number,
                (names, *middle, names + 1),
                SamplingParams(),
                comes_after_s=rng.uniform(0.0, ARRIVALS_S),
                leaves_after_s=rng.uniform(0.0, 1.0) if does_leave else None,
            )
        )
    return wishes


def _with_forks(wishes: list[Wish], seed: int) -> list[Wish]:
    """Turn some wishes into another completion of an earlier prompt, soon after it and on the same
    server. Uses a separate generator."""
    rng = random.Random(f"forks {seed}")
    forked = wishes[:2]
    for wish in wishes[2:]:
        origin = forked[wish.number % 2]
        if rng.random() < FORKED_SHARE:
            wish = replace(
                wish,
                prompt_ids=origin.prompt_ids,
                origin=origin.number,
                comes_after_s=origin.comes_after_s + rng.choice((0.0, 0.05, 0.5)),
            )
        forked.append(wish)
    return forked


def _with_claims(wishes: list[Wish], seed: int) -> list[Wish]:
    """Assign wishes to tenants of all classes, some with low limits, or to no tenant in every third
    seed. Uses a separate generator."""
    rng = random.Random(f"claims {seed}")
    if rng.random() < 1 / 3:
        return wishes
    tenants = [
        Scheduling(
            f"tenant {number}",
            weight=rng.choice((1.0, 2.0, 4.0)),
            max_running=rng.choice((None, 1, 2)),
            kv_share=rng.choice((1.0, 0.25)),
        )
        for number in range(rng.randint(1, 4))
    ]
    return [
        replace(
            wish,
            scheduling=replace(rng.choice(tenants), service_class=rng.choice(list(ServiceClass))),
        )
        for wish in wishes
    ]


def _zones(seed: int) -> tuple[str, str]:
    """Return the workers' zones: two, or none in every third seed. Drawn separately."""
    return random.Random(f"zones {seed}").choice((("", ""), ("a", "b"), ("b", "a")))


def _candidates(seed: int) -> int:
    """Return how many workers of each role a request compares: one, or two in every second seed.
    Drawn separately."""
    return random.Random(f"candidates {seed}").choice((1, 2))


def _with_zone_loss(plan: FaultPlan, zones: tuple[str, str], seed: int) -> FaultPlan:
    """Add the loss of a zone to half of the seeds that have zones and are not mild. Drawn
    separately."""
    rng = random.Random(f"zone loss {seed}")
    if plan.is_mild or not any(zones) or rng.random() < ZONE_LOSS_SHARE:
        return plan
    enabled = plan.enabled | {Fault.ZONE}
    return replace(plan, enabled=enabled, zone_loss=draw_zone_loss(rng, zones))


def _bound(wishes: list[Wish], zones: tuple[str, ...], seed: int) -> list[Wish]:
    """Bind some clients to one zone. A zone may lose its only worker of a role for a while, so some
    of them get no answer. Drawn separately."""
    rng = random.Random(f"bound {seed}")
    if not any(zones):
        return wishes
    return [
        replace(
            wish,
            scheduling=replace(
                wish.scheduling, placement=Placement(frozenset({rng.choice(zones)}))
            ),
        )
        if rng.random() < BOUND_SHARE
        else wish
        for wish in wishes
    ]


async def _look(checker: Checker) -> None:
    while True:
        await trio.sleep(LOOK_S)
        checker.look()

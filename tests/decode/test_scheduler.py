"""Tests of the decode scheduler: sequences take turns in a step, a full KV pool preempts one of
them, and every sequence finishes."""

from __future__ import annotations

import random
from collections import Counter, deque
from itertools import count
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.assembly import Assembly
from decode.attempt import DecodeAttempt
from decode.scheduler import needs_block, plan_step
from transport.window import TokenWindow
from triolet.fair_lru import Keeper
from triolet.ids import AttemptKey, PeerId, Role
from triolet.sampling import SamplingParams
from triolet.service_class import SHARE_STEP, Scheduling, ServiceClass

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from decode.scheduler import StepPlan

BLOCK_SIZE = 4


def attempt(
    order: int,
    *,
    num_tokens: int = 6,
    num_blocks: int = 2,
    priority: int = 0,
    last_turn: int = 0,
    tenant: str = "",
    weight: float = 1.0,
) -> DecodeAttempt:
    """Return an attempt with KV for all but its last token."""
    return DecodeAttempt(
        key=AttemptKey(order.to_bytes(16, "big"), 0),
        server=PeerId(Role.SERVER, "s", 1),
        prompt_ids=tuple(range(num_tokens - 1)),
        replay_ids=(),
        sampling=SamplingParams(),
        eos_token_ids=(),
        priority=priority,
        order=order,
        window=TokenWindow(100),
        assembly=Assembly(first_block=0, num_blocks=1, num_tokens=1, bytes_per_block=1),
        block_table=[order * 1000 + index for index in range(num_blocks)],
        output_ids=[1],
        num_computed_tokens=num_tokens - 1,
        last_turn=last_turn,
        keeper=Keeper(tenant.encode()),
        weight=weight,
    )


def full(order: int, *, priority: int = 0, tenant: str = "", weight: float = 1.0) -> DecodeAttempt:
    """Return an attempt that needs a new block for its next token."""
    return attempt(
        order, num_tokens=9, num_blocks=2, priority=priority, tenant=tenant, weight=weight
    )


def plan_of(
    holders: Sequence[DecodeAttempt],
    runnable: Sequence[DecodeAttempt],
    free_blocks: int,
    max_num_seqs: int = 8,
) -> StepPlan:
    def num_returned(leaving: Iterable[DecodeAttempt]) -> int:
        return sum(len(a.block_table) for a in leaving)

    return plan_step(
        holders,
        runnable,
        free_blocks=free_blocks,
        num_returned=num_returned,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
    )


def test_a_block_is_needed_exactly_at_the_border() -> None:
    assert not needs_block(attempt(1, num_tokens=8, num_blocks=2), BLOCK_SIZE)
    assert needs_block(attempt(1, num_tokens=9, num_blocks=2), BLOCK_SIZE)


def test_all_runnable_get_rows_while_there_is_room() -> None:
    runnable = [attempt(order) for order in range(3)]
    plan = plan_of(runnable, runnable, free_blocks=0)
    assert plan.rows == runnable
    assert plan.growing == plan.preempted == []


def test_more_than_a_step_can_hold_take_turns() -> None:
    runnable = [attempt(order) for order in range(5)]
    seen: dict[int, int] = dict.fromkeys(range(5), 0)
    turns = count(1)
    for _ in range(10):
        plan = plan_of(runnable, runnable, free_blocks=9, max_num_seqs=2)
        for row in plan.rows:
            row.last_turn = next(turns)
            seen[row.order] += 1
    assert set(seen.values()) == {4}


def test_the_least_important_gives_way_first_then_the_youngest() -> None:
    important, other, young = full(1, priority=0), full(3, priority=1), full(5, priority=1)
    holders = [important, other, young]
    plan = plan_of(holders, holders, free_blocks=0)
    assert plan.preempted == [young]
    assert plan.rows == plan.growing == [important, other]


def test_a_flood_does_not_push_out_who_holds_less_for_its_weight() -> None:
    flood = [full(order, tenant="flood") for order in range(3)]
    heavy = [full(order, tenant="heavy", weight=4.0) for order in range(3, 8)]
    plan = plan_of([*flood, *heavy], [*flood, *heavy], free_blocks=3)
    # 6 blocks for a weight of 1, 10 for one of 4; then 4 and 2, and two blocks are back each time.
    assert plan.preempted == [flood[2], flood[1]]
    equal = [full(order, tenant="heavy") for order in range(3, 8)]
    assert plan_of([*flood, *equal], flood, free_blocks=2).preempted == [equal[-1]]


def test_among_those_with_equal_loads_the_youngest_gives_way() -> None:
    holders = [full(order, tenant="ab"[order % 2]) for order in range(4)]
    assert plan_of(holders, holders, free_blocks=3).preempted == [holders[3]]


def test_a_lower_class_gives_way_before_what_anybody_holds_counts() -> None:
    flood = [full(order, tenant="flood") for order in range(4)]
    batch = Scheduling(service_class=ServiceClass.BATCH)
    line = full(9, priority=batch.rank(-100), tenant="line", weight=100.0)
    plan = plan_of([line, *flood], [line, *flood], free_blocks=3)
    assert plan.preempted == [line]
    own = full(10, priority=5, tenant="flood")
    assert plan_of([own, *flood], flood, free_blocks=3).preempted == [own]


def test_what_a_tenants_attempts_share_counts_once() -> None:
    alike = [attempt(order, num_tokens=41, tenant="alike") for order in range(4)]
    for one in alike:
        one.block_table = [*range(1, 10), 1000 * one.order]
    apart = [attempt(order, num_blocks=7, tenant="apart") for order in range(5, 7)]
    plan = plan_of([*alike, *apart], alike, free_blocks=3)
    assert plan.preempted == [apart[1]]  # 14 blocks; 13, although 40 are named


def test_the_only_one_of_its_tenant_gives_way_to_elders_alone() -> None:
    large = attempt(3, num_tokens=80, num_blocks=20, tenant="large")
    elders = [full(order, tenant="small") for order in (1, 2)]
    younger = full(4, tenant="small")
    assert plan_of([large, *elders], elders, free_blocks=1).preempted == [large]
    assert plan_of([large, *elders, younger], elders, free_blocks=1).preempted == [younger]


def test_who_has_no_row_gives_way_too() -> None:
    running, filling = full(1), attempt(2)
    plan = plan_of([running, filling], [running], free_blocks=0)
    assert plan.preempted == [filling]
    assert plan.rows == [running]


def test_the_last_one_left_gives_way_rather_than_wait_for_ever() -> None:
    alone = full(1)
    plan = plan_of([alone], [alone], free_blocks=0)
    assert plan.preempted == [alone]
    assert plan.rows == []


def test_shared_blocks_do_not_come_back_while_somebody_else_reads_them() -> None:
    holders = [full(order) for order in range(3)]
    for holder in holders:
        holder.block_table = [0, 10 + holder.order]  # the first is everybody's

    def num_returned(leaving: Sequence[DecodeAttempt]) -> int:
        named = Counter(block for a in leaving for block in a.block_table)
        held = Counter(block for a in holders for block in a.block_table)
        return sum(held[block] == count for block, count in named.items())

    plan = plan_step(
        holders,
        holders,
        free_blocks=0,
        num_returned=num_returned,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
    )
    assert plan.preempted == [holders[2], holders[1]]
    assert plan.growing == [holders[0]]


shapes = st.tuples(st.integers(2, 20), st.integers(0, 2), st.booleans())


@given(st.lists(shapes, max_size=12), st.integers(0, 4), st.integers(1, 6))
def test_growth_always_fits(
    shapes: list[tuple[int, int, bool]], free_blocks: int, max_num_seqs: int
) -> None:
    holders = [
        attempt(order, num_tokens=n, num_blocks=-(-(n - 1) // BLOCK_SIZE), priority=priority)
        for order, (n, priority, _) in enumerate(shapes)
    ]
    runnable = [a for a, (_, _, runs) in zip(holders, shapes, strict=True) if runs]
    plan = plan_of(holders, runnable, free_blocks, max_num_seqs)
    returned = sum(len(a.block_table) for a in plan.preempted)
    assert len(plan.growing) <= free_blocks + returned
    assert len(plan.rows) <= max_num_seqs
    assert not set(plan.rows) & set(plan.preempted)
    assert set(plan.growing) == {a for a in plan.rows if needs_block(a, BLOCK_SIZE)}
    if plan.preempted:
        worst_kept = max(
            ((a.priority, a.order) for a in holders if a not in plan.preempted), default=(-1, -1)
        )
        assert all((a.priority, a.order) > worst_kept for a in plan.preempted)


NEWCOMERS = 5
"""Times those that are there at first: all that come."""


def run_to_the_end(needs: Sequence[tuple[str, float, int]], pool_blocks: int) -> int:
    """Run sequences in a pool that does not hold all of them, each until it has as many blocks as
    it needs; return how often one was pushed out. That one is first in the queue again. As
    one ends, a small one of the same tenant comes, within its tenant's share; others are beyond."""
    orders = count()
    needs = list(needs)
    num_first = len(needs)
    line = deque(enumerate(needs))
    running: dict[int, DecodeAttempt] = {}
    num_preempted = 0
    for _ in range(200 * sum(num_blocks for _, _, num_blocks in needs)):
        free_blocks = pool_blocks - sum(len(a.block_table) for a in running.values())
        # As decode admits: everybody there may grow at once.
        while line and free_blocks > len(running):
            number, (tenant, weight, _) = line.popleft()
            running[number] = attempt(
                next(orders),
                num_tokens=5,
                num_blocks=1,
                priority=SHARE_STEP * (number < num_first),
                tenant=tenant,
                weight=weight,
            )
            free_blocks -= 1
        if not running:
            return num_preempted
        holders = list(running.values())
        plan = plan_of(holders, holders, free_blocks, max_num_seqs=len(holders))
        for number, one in tuple(running.items()):
            if one in plan.preempted:
                del running[number]
                line.append((number, needs[number]))
            else:
                one.block_table.append(len(one.block_table) + 1000 * one.order)
                one.num_computed_tokens += BLOCK_SIZE
                if len(one.block_table) >= needs[number][2]:
                    del running[number]
                    if len(needs) < NEWCOMERS * num_first:
                        tenant, weight, _ = needs[number]
                        line.append((len(needs), (tenant, weight, 2)))
                        needs.append((tenant, weight, 2))
        line = deque(sorted(line))
        num_preempted += len(plan.preempted)
    pytest.fail(f"{len(running)} run and {len(line)} wait for ever")


@given(st.integers(0, 10_000))
def test_everybody_gets_to_its_end_whoever_comes_meanwhile(seed: int) -> None:
    rng = random.Random(seed)
    pool_blocks = rng.randint(4, 30)
    tenants = [(f"t{number}", rng.choice((0.5, 1.0, 4.0))) for number in range(rng.randint(1, 4))]
    needs = [(*rng.choice(tenants), rng.randint(1, pool_blocks)) for _ in range(rng.randint(1, 20))]
    run_to_the_end(needs, pool_blocks)

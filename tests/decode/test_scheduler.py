"""Rows take turns, growth fits, and who gives way is the least important and youngest."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from decode.assembly import Assembly
from decode.attempt import Attempt
from decode.scheduler import needs_block, plan_step
from transport.window import TokenWindow
from triolet.ids import AttemptKey, PeerId, Role
from triolet.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from decode.scheduler import StepPlan

BLOCK_SIZE = 4


def attempt(
    order: int, *, num_tokens: int = 6, num_blocks: int = 2, priority: int = 0, last_turn: int = 0
) -> Attempt:
    """Return an attempt whose KV holds all but its last token."""
    return Attempt(
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
        block_table=list(range(num_blocks)),
        output_ids=[1],
        num_computed_tokens=num_tokens - 1,
        last_turn=last_turn,
    )


def full(order: int, **more: int) -> Attempt:
    """Return an attempt whose next token needs another block."""
    return attempt(order, num_tokens=9, num_blocks=2, **more)


def plan_of(
    holders: Sequence[Attempt],
    runnable: Sequence[Attempt],
    free_blocks: int,
    max_num_seqs: int = 8,
) -> StepPlan:
    def num_returned(leaving: Iterable[Attempt]) -> int:
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

    def num_returned(leaving: Sequence[Attempt]) -> int:
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

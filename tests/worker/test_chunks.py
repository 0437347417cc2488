"""Tests of chunk scheduling in prefill: short prompts do not wait for long ones, and long ones do
not starve."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefill.attempt import PrefillAttempt
from triolet.ids import AttemptKey, PeerId, Role
from triolet.sampling import SamplingParams
from triolet.service_class import (
    CLASS_STEP,
    SHARE_STEP,
    Band,
    Scheduling,
    ServiceClass,
    band_of,
    class_of,
)
from worker.chunks import (
    LOWER_SHARE,
    MAX_OVERTAKES,
    MAX_URGENT_OVERTAKES,
    OLDEST_SHARE,
    ChunkScheduler,
    PromptChunk,
)

BUDGET = 64
BLOCK_SIZE = 4
MANY_BLOCKS = 100_000


def attempt(
    order: int, num_tokens: int, priority: int = 0, *, is_started: bool = False
) -> PrefillAttempt:
    return PrefillAttempt(
        key=AttemptKey(order.to_bytes(16, "big"), 0),
        server=PeerId(Role.SERVER, "s", 1),
        prompt_ids=(0,) * num_tokens,
        packed_ids=bytes(4 * num_tokens),
        cache_key=b"",
        sampling=SamplingParams(),
        eos_token_ids=(),
        priority=priority,
        order=order,
        arrived_at=0.0,
        num_blocks=-(-num_tokens // BLOCK_SIZE),
        num_needed_blocks=-(-num_tokens // BLOCK_SIZE),
        started_at=0.0 if is_started else None,
    )


def compute(chunks: list[PromptChunk[PrefillAttempt]]) -> None:
    for chunk in chunks:
        chunk.attempt.started_at = 0.0
        chunk.attempt.num_computed_tokens += chunk.num_tokens


def tokens_of(chunks: list[PromptChunk[PrefillAttempt]], attempt: PrefillAttempt) -> int:
    return sum(c.num_tokens for c in chunks if c.attempt is attempt)


def test_nothing_waiting_is_no_step() -> None:
    assert ChunkScheduler().plan([], BUDGET, MANY_BLOCKS) == []


def test_a_prompt_alone_has_the_whole_budget() -> None:
    alone = attempt(1, 1000)
    assert ChunkScheduler().plan([alone], BUDGET, MANY_BLOCKS) == [PromptChunk(alone, BUDGET)]


def test_a_short_prompt_is_done_in_the_next_step_beside_a_long_one() -> None:
    long, short = attempt(1, 100_000, is_started=True), attempt(2, BUDGET // 2)
    plan = ChunkScheduler().plan([long, short], BUDGET, MANY_BLOCKS)
    assert tokens_of(plan, short) == BUDGET // 2
    assert tokens_of(plan, long) == BUDGET // 2


def test_a_long_prompt_gets_its_share_under_a_stream_of_short_ones() -> None:
    scheduler, long = ChunkScheduler(), attempt(0, 10 * BUDGET)
    num_steps = 0
    while not long.is_computed:
        short = [attempt(num_steps * 100 + n + 1, BUDGET) for n in range(5)]
        compute(scheduler.plan([long, *short], BUDGET, MANY_BLOCKS))
        num_steps += 1
    assert num_steps <= 10 * OLDEST_SHARE


@given(
    st.integers(1, 3 * BUDGET),
    st.lists(st.integers(3 * BUDGET + 1, 100 * BUDGET), max_size=12),
    st.lists(st.integers(3 * BUDGET + 1, 100 * BUDGET), max_size=40),
)
def test_a_short_prompt_is_not_held_up_by_longer_ones_before_or_after_it(
    num_tokens: int, before: list[int], after: list[int]
) -> None:
    scheduler: ChunkScheduler[PrefillAttempt] = ChunkScheduler()
    waiting = [attempt(order, size, is_started=True) for order, size in enumerate(before)]
    short = attempt(100, num_tokens)
    waiting.append(short)
    free_share = BUDGET - BUDGET // OLDEST_SHARE
    for step in range(-(-num_tokens // free_share)):
        waiting += [attempt(101 + step, size) for size in after[step : step + 1]]
        compute(scheduler.plan([a for a in waiting if not a.is_computed], BUDGET, MANY_BLOCKS))
    assert short.is_computed


@given(st.lists(st.integers(1, 200), min_size=1, max_size=30), st.integers(1, 8))
def test_rows_are_few_and_the_oldest_has_one(sizes: list[int], max_rows: int) -> None:
    waiting = [attempt(order, size, is_started=True) for order, size in enumerate(sizes)]
    plan = ChunkScheduler[PrefillAttempt]().plan(waiting, BUDGET, 0, max_rows)
    assert 0 < len(plan) <= max_rows
    assert waiting[0] in [chunk.attempt for chunk in plan]
    assert len({id(chunk.attempt) for chunk in plan}) == len(plan)


def test_every_prompt_becomes_the_oldest_in_its_turn() -> None:
    scheduler = ChunkScheduler()
    waiting = [attempt(order, 5 * BUDGET) for order in range(4)]
    for _ in range(4 * 5):
        compute(scheduler.plan([a for a in waiting if not a.is_computed], BUDGET, MANY_BLOCKS))
    assert all(a.is_computed for a in waiting)


def test_the_more_important_comes_first_but_not_alone() -> None:
    oldest, important = attempt(1, 500, priority=5), attempt(2, 500, priority=0)
    plan = ChunkScheduler().plan([oldest, important], BUDGET, MANY_BLOCKS)
    assert tokens_of(plan, oldest) == BUDGET // OLDEST_SHARE
    assert tokens_of(plan, important) == BUDGET - BUDGET // OLDEST_SHARE


def test_a_prompt_starts_only_with_all_of_its_blocks() -> None:
    large, small = attempt(1, 40), attempt(2, 8)
    plan = ChunkScheduler().plan([large, small], BUDGET, 5)
    assert [chunk.attempt for chunk in plan] == [small]


def test_small_prompts_may_overtake_a_large_one_only_so_often() -> None:
    scheduler, large = ChunkScheduler(), attempt(0, 40)
    overtakers = 0
    for order in range(1, 3 * MAX_OVERTAKES):
        plan = scheduler.plan([large, attempt(order, 4)], BUDGET, 5)
        overtakers += len(plan)
        compute(plan)
    assert overtakers == MAX_OVERTAKES
    plan = scheduler.plan([large, attempt(99, 4)], BUDGET, 11)
    assert large in [chunk.attempt for chunk in plan]


prompts = st.tuples(st.integers(1, 300), st.integers(0, 2), st.booleans())


@given(st.lists(prompts, max_size=15), st.integers(0, 120))
def test_budget_and_blocks_are_kept(shapes: list[tuple[int, int, bool]], free_blocks: int) -> None:
    waiting = [
        attempt(order, num_tokens, priority, is_started=is_started)
        for order, (num_tokens, priority, is_started) in enumerate(shapes)
    ]
    plan = ChunkScheduler().plan(waiting, BUDGET, free_blocks)
    assert sum(chunk.num_tokens for chunk in plan) <= BUDGET
    assert len({chunk.attempt for chunk in plan}) == len(plan)
    assert all(0 < c.num_tokens <= c.attempt.num_remaining_tokens for c in plan)
    new_blocks = sum(c.attempt.num_blocks for c in plan if not c.attempt.is_started)
    assert new_blocks <= free_blocks
    could_run = [a for a in waiting if a.is_started or a.num_blocks <= free_blocks]
    wanted = sum(a.num_remaining_tokens for a in waiting if a.is_started)
    assert bool(plan) == bool(could_run)
    assert sum(chunk.num_tokens for chunk in plan) >= min(BUDGET, wanted)


def test_a_class_goes_before_a_lower_one_however_long_that_waits() -> None:
    batch = attempt(1, 1000, 2 * CLASS_STEP, is_started=True)
    long, short = attempt(2, 1000, is_started=True), attempt(3, 8)
    plan = ChunkScheduler().plan([batch, long, short], BUDGET, MANY_BLOCKS)
    assert tokens_of(plan, short) == 8
    assert tokens_of(plan, batch) == BUDGET // LOWER_SHARE
    assert tokens_of(plan, long) == BUDGET - 8 - BUDGET // LOWER_SHARE


def test_in_a_class_who_is_beyond_its_share_is_computed_later() -> None:
    flood = attempt(1, 40, SHARE_STEP + 100, is_started=True)
    quiet = attempt(2, 200, 100, is_started=True)
    plan = ChunkScheduler().plan([flood, quiet], BUDGET, MANY_BLOCKS)
    assert tokens_of(plan, flood) == BUDGET // LOWER_SHARE
    assert tokens_of(plan, quiet) == BUDGET - BUDGET // LOWER_SHARE


def test_a_lower_class_takes_no_blocks_that_a_higher_one_needs() -> None:
    batch, default = attempt(1, 40, 2 * CLASS_STEP), attempt(2, 40)
    plan = ChunkScheduler().plan([batch, default], BUDGET, default.num_needed_blocks)
    assert tokens_of(plan, default) == 40
    assert tokens_of(plan, batch) == 0


def test_a_lower_class_has_its_blocks_in_the_end() -> None:
    scheduler = ChunkScheduler()
    batch = attempt(1, 400, 2 * CLASS_STEP)
    for order in range(2, 2 + MAX_URGENT_OVERTAKES):
        plan = scheduler.plan([batch, attempt(order, 4)], BUDGET, 1)
        assert len(plan) == 1
    assert scheduler.plan([batch, attempt(10_000, 4)], BUDGET, 1) == []


def test_what_workers_are_told_says_the_class_and_whose_share_is_exceeded() -> None:
    for service_class in ServiceClass:
        for own in (-100, 0, 100):
            for is_over_share in (False, True):
                rank = Scheduling(service_class=service_class).rank(
                    own, is_over_share=is_over_share
                )
                assert class_of(rank) is service_class
                assert band_of(rank) == Band(service_class, is_over_share)
    assert class_of(-(10**9)) is ServiceClass.CRITICAL
    assert class_of(10**9) is ServiceClass.BATCH


def test_the_only_row_is_of_the_most_urgent_class() -> None:
    batch = attempt(1, 10, CLASS_STEP * 2, is_started=True)
    critical = attempt(2, 10, -CLASS_STEP, is_started=True)
    plan = ChunkScheduler().plan([batch, critical], BUDGET, MANY_BLOCKS, max_rows=1)
    assert [chunk.attempt for chunk in plan] == [critical]
    later = attempt(3, 5, -CLASS_STEP, is_started=True)
    plan = ChunkScheduler().plan([critical, later], BUDGET, MANY_BLOCKS, max_rows=1)
    assert [chunk.attempt for chunk in plan] == [critical]

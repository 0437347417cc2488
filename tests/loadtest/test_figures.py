"""Tests of the load test's figures: times of streams, percentiles, tables per protocol, and the mix
of prompts."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.figures import StreamClock, StreamRecord, failures, rows
from loadtest.harness.prompts import WEIGHTS, Prompt, PromptMix
from loadtest.harness.statistics import percentile


def timed(*pieces_s: float, tokens: int) -> StreamRecord:
    clock = StreamClock(10.0)
    for at_s in pieces_s:
        clock.piece(at_s)
    return clock.record("SSE", "short", tokens, None)


@pytest.mark.parametrize(
    ("pieces_s", "tokens", "ttft_s", "itl_s", "tokens_per_s"),
    [
        pytest.param((10.5, 10.6, 10.7), 3, 0.5, 0.1, 3 / 0.7, id="single tokens"),
        pytest.param((10.5, 11.5), 11, 0.5, 0.1, 11 / 1.5, id="merged tokens count as many"),
        pytest.param((10.5,), 5, 0.5, None, 10.0, id="one piece has no gap"),
        pytest.param((10.5,), 1, 0.5, None, 2.0, id="one token has no gap"),
        pytest.param((), 0, None, None, None, id="without text there are no times"),
    ],
)
def test_times_of_a_stream(
    pieces_s: tuple[float, ...],
    tokens: int,
    ttft_s: float | None,
    itl_s: float | None,
    tokens_per_s: float | None,
) -> None:
    record = timed(*pieces_s, tokens=tokens)
    assert record.ttft_s == pytest.approx(ttft_s)
    assert record.itl_s == pytest.approx(itl_s)
    assert record.tokens_per_s == pytest.approx(tokens_per_s)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(1, 100))
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(
    values: list[float], percent: int
) -> None:
    ordered = sorted(values)
    found = percentile(ordered, percent)

    def share(limit: float) -> float:
        return sum(value <= limit for value in ordered) * 100

    assert share(found) >= percent * len(ordered)
    below = [value for value in ordered if value < found]
    assert not below or share(below[-1]) < percent * len(ordered)


def record(protocol: str, rate: float, failure: str | None = None) -> StreamRecord:
    return StreamRecord(protocol, "short", failure, 5, 1 / rate, 0.01, rate)


def test_rows_are_per_protocol_and_leave_out_what_failed() -> None:
    records = [record("WS", 10), record("SSE", 20), record("SSE", 40), record("SSE", 1, "broke")]
    table = rows(records)
    assert [row.name for row in table] == [
        f"{protocol} {figure}"
        for protocol in ("SSE", "WS")
        for figure in ("TTFT", "ITL", "tokens/s")
    ]
    assert [row.count for row in table] == [2, 2, 2, 1, 1, 1]
    assert table[0].percentiles == (25.0, 50.0, 50.0)


def test_the_bad_end_of_tokens_per_second_is_the_low_one() -> None:
    table = rows([record("SSE", rate) for rate in range(1, 101)])
    assert table[2].percentiles == (51, 11, 2)


def test_failures_are_counted_by_reason() -> None:
    records = [record("WS", 1, "broke"), record("WS", 1, "broke"), record("SSE", 1)]
    assert failures(records) == {"WS: broke": 2}


def drawn(user: int, many: int) -> list[Prompt]:
    mix = PromptMix(user)
    return [mix.draw() for _ in range(many)]


def test_prompts_repeat_for_a_user_and_differ_between_users() -> None:
    assert drawn(1, 20) == drawn(1, 20)
    assert [p.text for p in drawn(1, 20)] != [p.text for p in drawn(2, 20)]


def test_no_two_prompts_share_a_seed() -> None:
    seeds = [prompt.seed for user in (1, 2, 3) for prompt in drawn(user, 200)]
    assert len(set(seeds)) == len(seeds)


def test_every_kind_is_drawn_about_as_often_as_its_weight() -> None:
    prompts = drawn(1, 2000)
    for kind, weight in WEIGHTS.items():
        share = sum(p.kind == kind for p in prompts) / len(prompts)
        assert share == pytest.approx(weight / sum(WEIGHTS.values()), abs=0.05)


def test_long_prompts_are_long() -> None:
    lengths = {p.kind: len(p.text) for p in islice(drawn(1, 100), 100)}
    assert lengths["long"] > 10 * lengths["story"]

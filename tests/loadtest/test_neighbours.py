"""Tests of the noisy neighbour benchmark: the evaluation of its rounds, and the attackers'
requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadtest.harness.streams import Stream
from loadtest.hostile_clients import Watch
from loadtest.neighbour_attacks import ATTACKS, NUMBER, requests_of
from loadtest.neighbours import Beside, Half, row_of, table_of, wrongs_of

WIRE = [name for name, attack in ATTACKS.items() if attack.is_websocket or attack.is_chunked]
NOT_JSON = ("deep", "repeated", "models", *WIRE)
BODIES = [
    pytest.param(name, marks=[pytest.mark.slow] if name in {"detokenize", "tools_each"} else [])
    for name in ATTACKS
    if name not in NOT_JSON
]


def half(ttft_s: float, gap_s: float, delay_s: float = 0.01, *failures: str) -> Half:
    return Half([ttft_s] * 3, [gap_s] * 3, [*failures], Watch([delay_s] * 100))


def beside(*rounds: tuple[Half, Half]) -> Beside:
    one = Beside([*rounds])
    one.answered.update({"200": 7, "429": 2})
    return one


def test_ratios_are_the_median_of_paired_rounds() -> None:
    rounds = [(1.0, 1.5, 2.0), (2.0, 3.0, 2.0), (1.0, 9.0, 0.5), (4.0, 4.0, 8.0), (1.0, 2.0, 3.0)]
    seen = beside(*((half(a, b), half(a * t, b * g)) for a, t, g in rounds for b in (0.1,)))
    assert seen.ttft_ratio == pytest.approx(3.0)
    assert seen.gap_ratio == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("attacked", "said"),
    [
        (half(0.019, 0.019, 0.249), []),
        (half(0.021, 0.01), ["the first token took 2.10 times as long"]),
        (half(0.01, 0.03), ["the worst gap took 3.00 times as long"]),
        (half(0.01, 0.01, 0.26), ["/health/live took 260 ms at p99"]),
        (half(0.01, 0.01, 0.01, "503"), ["1 failed: 503"]),
        (Half(), ["the first token took inf times", "the worst gap took inf times"]),
    ],
)
def test_each_target_that_is_missed_is_said_once(attacked: Half, said: list[str]) -> None:
    wrongs = wrongs_of({"parts": beside((half(0.01, 0.01), attacked))})
    assert len(wrongs) == len(said)
    assert all(f"parts: {words}" in wrong for words, wrong in zip(said, wrongs, strict=True))


def test_a_row_has_a_cell_for_each_column() -> None:
    seen = {"parts": beside((half(0.01, 0.02), half(0.03, 0.02, 0.2)))}
    assert row_of("parts", seen["parts"]) == [
        "parts", "10.0 / 30.0", "3.00", "20.0 / 20.0", "1.00", "20", "200", "200",
        "7 x 200, 2 x 429",
    ]  # fmt: skip
    assert len(table_of(seen).columns) == 9


def stream(*moments: float, is_whole: bool = True) -> Stream:
    return Stream(1.0, [*moments], head=b"HTTP/1.1 200 OK\r\n", is_whole=is_whole)


def test_streams_that_break_or_have_no_gap_are_failures() -> None:
    seen = Half()
    for one in (stream(1.5, 1.6, 2.6), stream(1.5), stream(1.5, 1.6, is_whole=False)):
        seen.take(one)
    assert (seen.ttfts_s, len(seen.failures)) == ([0.5], 2)
    assert seen.worst_gaps_s == [pytest.approx(1.0)]


def body_of(name: str) -> bytes:
    return next(requests_of(ATTACKS[name])).partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("name", BODIES)
def test_bodies_are_json_of_the_length_that_their_heads_say(name: str) -> None:
    head, _, body = next(requests_of(ATTACKS[name])).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head
    assert len(body) <= 16 << 20
    fields: dict[str, Any] = json.loads(body)
    assert fields


def test_each_request_has_a_number_of_its_own() -> None:
    for name in ("enum", "idempotent"):
        requests = requests_of(ATTACKS[name])
        first, second = next(requests), next(requests)
        assert first != second
        assert len(first) == len(second)
        assert NUMBER not in first


@pytest.mark.slow
def test_what_is_at_a_bound_is_just_inside_of_it() -> None:
    schema = json.loads(body_of("enum"))["response_format"]["json_schema"]["schema"]
    assert 16_000 < len(json.dumps(schema)) <= 16_384
    assert len(json.loads(body_of("tools_each"))["tools"]) == 128
    assert len(json.loads(body_of("detokenize"))["tokens"]) == 999_999
    assert body_of("chunks").count(b"1\r\n") > 20_000

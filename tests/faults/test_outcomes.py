"""Tests of the fault matrix's judge: it finds every wrong outcome, and the report shows it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.faults.answer import Answer, Said
from tests.faults.client import Surface
from tests.faults.matrix import Bound, Cell, cells
from tests.faults.outcomes import Ending, Outcome, judge
from tests.faults.phases import Phase
from tests.faults.report import broken_bounds, json_of, lines_of, markdown_of, percentile
from tests.faults.run_cell import CellResult

WANTED = Said(("a", "b", "c"), "abc", 3, ("length",))
PART = Said(("a", "b"), "ab", None, ())


def complaints(outcome: Outcome, said: Said, *outcomes: str) -> list[str]:
    return judge(outcome, [Ending("SSE", said, WANTED, outcomes)])


@pytest.mark.parametrize(
    ("outcome", "said", "server_says"),
    [
        (Outcome.EXACT, WANTED, "length"),
        (Outcome.GONE, PART, "client_gone"),
        (Outcome.GONE, PART, "stopped"),
        (Outcome.STALLED, PART, "stalled"),
        (Outcome.EXACT_OR_ERROR, WANTED, "length"),
        (Outcome.EXACT_OR_ERROR, replace(PART, ends=("error:no_worker",)), "no_worker"),
    ],
)
def test_what_should_be_is_no_complaint(outcome: Outcome, said: Said, server_says: str) -> None:
    assert complaints(outcome, said, server_says) == []


def test_a_server_that_died_says_nothing_and_nothing_wrong() -> None:
    assert complaints(Outcome.CUT, PART) == []
    assert complaints(Outcome.CUT, replace(PART, ends=("length",)))


@pytest.mark.parametrize("outcome", list(Outcome))
def test_another_token_is_always_found(outcome: Outcome) -> None:
    said = replace(PART, tokens=("a", "x"))
    assert any("from token 1 on" in line for line in complaints(outcome, said, "length"))


@pytest.mark.parametrize(
    ("outcome", "said", "server_says"),
    [
        (Outcome.EXACT, PART, ("length",)),
        (Outcome.EXACT, replace(WANTED, num_tokens=4), ("length",)),
        (Outcome.EXACT, replace(WANTED, text="abd"), ("length",)),
        (Outcome.EXACT, replace(WANTED, ends=("length", "length")), ("length",)),
        (Outcome.EXACT, WANTED, ()),
        (Outcome.EXACT, WANTED, ("length", "length")),
        (Outcome.EXACT, WANTED, ("error",)),
        (Outcome.GONE, PART, ("length",)),
        (Outcome.STALLED, PART, ("client_gone",)),
        (Outcome.EXACT_OR_ERROR, PART, ("error",)),
    ],
)
def test_what_should_not_be_is_a_complaint(
    outcome: Outcome, said: Said, server_says: tuple[str, ...]
) -> None:
    assert complaints(outcome, said, *server_says)


def test_both_surfaces_say_the_same_in_their_own_words() -> None:
    sse, ws = Answer(), Answer()
    logprobs = '{"token": "a", "logprob": -1.0}'
    sse.take_sse(
        '{"choices": [{"delta": {"content": "a"}, "finish_reason": "length", '
        f'"logprobs": {{"content": [{logprobs}]}}}}], "usage": {{"completion_tokens": 1}}}}'
    )
    sse.take_sse("[DONE]")
    ws.take_ws(f'{{"type": "response.output_text.delta", "delta": "a", "logprobs": [{logprobs}]}}')
    ws.take_ws(
        '{"type": "response.incomplete", "response": {"usage": {"output_tokens": 1}, '
        '"incomplete_details": {"reason": "max_output_tokens"}}}'
    )
    assert sse.said == ws.said == Said(("a",), "a", 1, ("length",))
    assert sse.is_done
    assert ws.is_done


def test_errors_are_ends_on_both_surfaces() -> None:
    sse, ws = Answer(), Answer()
    sse.take_sse('{"error": {"code": "no_worker"}}')
    ws.take_ws('{"type": "response.failed", "response": {"error": {"code": "no_worker"}}}')
    assert sse.ends == ws.ends == ["error:no_worker"]


def cell(bound: Bound) -> Cell:
    return next(cell for cell in cells() if cell.bound is bound)


def test_times_are_held_to_their_promises() -> None:
    quick = CellResult(cell(Bound.CANCEL), free_s=[0.010] * 99 + [0.5])
    assert broken_bounds(lines_of([quick])) == []
    slow = CellResult(cell(Bound.CANCEL), free_s=[0.010] * 9 + [0.5])
    assert "500 ms" in broken_bounds(lines_of([slow]))[0]
    dead = CellResult(cell(Bound.OWNER), free_s=[2.4])
    assert broken_bounds(lines_of([dead])) == []
    dead.free_s.append(2.6)
    assert "2.60 s" in broken_bounds(lines_of([dead]))[0]


def test_the_report_gathers_runs_of_one_cell() -> None:
    one = cell(Bound.CANCEL)
    lines = lines_of([CellResult(one, free_s=[0.02]), CellResult(one, ["broke"], [0.04])])
    assert [(line.runs, line.free_s, line.complaints) for line in lines] == [
        (2, [0.02, 0.04], ["broke"])
    ]
    assert "| FAILED |" in markdown_of(lines)
    report = json_of(lines, [], 1.0)
    assert not report["ok"]
    assert json_of(lines_of([CellResult(one)]), [], 1.0)["ok"]
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0


def test_the_matrix_meets_every_phase_with_every_kind_of_fault() -> None:
    names = [cell.name for cell in cells()]
    assert len(names) == len(set(names))
    for phase in Phase:
        faults = {cell.fault for cell in cells() if cell.phase is phase}
        assert {
            *("client leaves: RST", "client leaves: FIN", "client leaves: WS close"),
            *("server SIGKILL", "prefill SIGKILL", "decode SIGKILL"),
            *("server SIGSTOP short", "prefill SIGSTOP short", "decode SIGSTOP short"),
            *("server SIGSTOP long", "prefill SIGSTOP long", "decode SIGSTOP long"),
            *("partition server-decode", "partition server-prefill"),
            *("every frame twice", "neighbours swapped", "every frame again, late"),
        } <= faults
        # Once KV has arrived they no longer communicate.
        is_kv_to_come = phase not in (Phase.DECODING, Phase.PAUSED, Phase.FINISHING)
        assert ("partition prefill-decode" in faults) == is_kv_to_come
    assert all(set(cell.surfaces) <= set(Surface) for cell in cells())

"""Tests of fault campaigns: they report answers that differ, faults without effect, and blocks that
are freed too late."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from loadtest.campaign.answers import (
    Answer,
    Ask,
    ChatBody,
    ChatLines,
    ResponseMessages,
    StreamFailedError,
    draw_asks,
)
from loadtest.campaign.client import Broken, Story
from loadtest.campaign.faults import Injected
from loadtest.harness.servers import FleetLog, attempts_of, state_of
from loadtest.kills import CALM, SERVER_KILL, Verdict, judge

if TYPE_CHECKING:
    from pathlib import Path

ANSWER = Answer("Once upon", (7, 8), (-0.1, -0.2), "stop", 5, 2)
USAGE = {"prompt_tokens": 5, "completion_tokens": 2}
KILLED = Injected("decode-kill", "decode-0", 11, at=10.0, epoch_s=1000.0, proof="pid 11 gone")


def chunk(text: str, ids: list[int], **more: object) -> dict[str, Any]:
    choice = {"delta": {"content": text}, "token_ids": ids, "finish_reason": None, **more}
    return {"choices": [choice], "usage": None}


def scored(*logprobs: float) -> dict[str, Any]:
    return {"content": [{"logprob": logprob} for logprob in logprobs]}


END = {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": None}
CHAT = [
    chunk("", []),
    chunk("Once", [7], logprobs=scored(-0.1)),
    chunk(" upon", [8], logprobs=scored(-0.2)),
    END,
    {"choices": [], "usage": USAGE},
]


def told(reader: ChatLines, chunks: list[dict[str, Any]]) -> list[bool]:
    lines = [f"data: {json.dumps(data)}".encode() for data in chunks]
    return [reader.take(line) for line in (*lines, b"", b": keep-alive", b"data: [DONE]")]


def test_the_same_seed_asks_the_same_and_every_surface_has_its_share() -> None:
    asks = draw_asks(200, seed=3)
    assert asks == draw_asks(200, seed=3)
    assert asks != draw_asks(200, seed=4)
    assert {ask.surface for ask in asks} == {"sse", "ws", "plain"}
    for word in ("stop", "logprobs", "include", "ignore_eos", "temperature", "presence_penalty"):
        assert any(word in ask.body for ask in asks), word
    assert len({ask.body["seed"] for ask in asks}) == 200


def test_a_chat_stream_is_read_with_its_ids_and_logprobs() -> None:
    reader = ChatLines()
    assert told(reader, CHAT) == [False, True, True, *[False] * 5]
    assert reader.answer == ANSWER


@pytest.mark.parametrize(
    "chunks",
    [
        [{"error": {"code": "no_worker", "message": "gone"}}],
        [*CHAT[:4], chunk("more", [9])],
        CHAT[:4],
        [*CHAT[1:2], *CHAT[3:]],
    ],
    ids=["an error", "text after the end", "no usage", "a token is missing"],
)
def test_a_chat_stream_that_breaks_a_rule_is_no_answer(chunks: list[dict[str, Any]]) -> None:
    with pytest.raises(StreamFailedError):
        told(ChatLines(), chunks)


def test_an_answer_in_one_piece_and_one_over_the_websocket_are_read_likewise() -> None:
    body = ChatBody()
    choice = {"message": {"content": "Once upon"}, "token_ids": [7, 8], "finish_reason": "stop"}
    body.take(
        json.dumps(
            {"choices": [choice | {"logprobs": scored(-0.1, -0.2)}], "usage": USAGE}
        ).encode()
    )
    assert body.answer == ANSWER
    messages = ResponseMessages()
    response = {"status": "completed", "usage": {"input_tokens": 5, "output_tokens": 2}}
    for event in (
        {"type": "response.output_text.delta", "delta": "Once upon", **logprobs_of(-0.1, -0.2)},
        {"type": "response.completed", "response": response},
    ):
        messages.take(json.dumps(event).encode())
    assert messages.answer == replace(ANSWER, token_ids=(), end="completed")


def logprobs_of(*logprobs: float) -> dict[str, Any]:
    return {"logprobs": scored(*logprobs)["content"]}


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": (7, 9)},
        {"text": "Once upon a"},
        {"end": "length"},
        {"completion_tokens": 3},
        {"logprobs": (-0.1,)},
    ],
)
def test_any_difference_between_answers_is_seen(change: dict[str, Any]) -> None:
    assert ANSWER.differs_from(ANSWER) is None
    assert next(iter(change)) in (replace(ANSWER, **change).differs_from(ANSWER) or "")


def story(number: int, answer: Answer | None = ANSWER, *, arrivals: tuple[float, ...]) -> Story:
    failure = None if answer else "ended"
    told = Story(Ask(number, f"ask-{number:05d}", "sse", {}), arrivals[0] - 0.5, list(arrivals))
    told.answer, told.failure = answer, failure
    return told


def ended(number: int, *attempts: int, at: float = 1001.0) -> list[dict[str, Any]]:
    request_id = f"{number:032x}"
    stamp = f"1970-01-01T00:{int(at // 60):02d}:{at % 60:09.6f}Z"
    request = {"event": "request_ended", "request_id": request_id, "timestamp": stamp}
    lines: list[dict[str, Any]] = [request | {"client_request_id": f"ask-{number:05d}"}]
    for attempt in attempts:
        key = f"{request_id}/{attempt}"
        line = {"event": "attempt_ended", "attempt": key, "timestamp": stamp}
        lines.append(line | {"reason": "lease_expired"})
    return lines


def judged(fault: str, stories: list[Story], entries: list[dict[str, Any]]) -> Verdict:
    verdict = Verdict("float32", fault, [KILLED], len(stories))
    judge(verdict, stories, {story.ask.number: ANSWER for story in stories}, entries)
    return verdict


def test_a_run_whose_streams_only_paused_passes() -> None:
    stories = [story(0, arrivals=(9.0, 9.1, 10.9)), story(1, arrivals=(9.0, 9.2))]
    verdict = judged("decode-kill", stories, [*ended(0, 0, 1), *ended(1, 0)])
    assert verdict.hit == 1
    assert verdict.pauses_s == [pytest.approx(1.8)]
    assert verdict.calm_pauses_s == [pytest.approx(0.5)]
    assert verdict.wrongs == []


def test_failed_and_inexact_answers_are_counted() -> None:
    stories = [
        story(0, arrivals=(9.0, 10.9)),
        story(1, replace(ANSWER, token_ids=(7, 9)), arrivals=(9.0, 9.2)),
        story(2, None, arrivals=(9.0,)),
    ]
    verdict = judged("decode-kill", stories, ended(0, 0, 1))
    assert len(verdict.inexact) == len(verdict.failed) == 1
    assert len(verdict.wrongs) == 2


def test_a_fault_that_hit_nothing_has_shown_nothing() -> None:
    entries = ended(0, 0)
    assert "hit no request" in judged("decode-kill", [story(0, arrivals=(9.0,))], entries).wrongs[0]
    assert judged(CALM, [story(0, arrivals=(9.0,))], entries).wrongs == []


@pytest.mark.parametrize(("held_s", "num_wrongs"), [(2.1, 0), (2.6, 1)])
def test_a_dead_servers_blocks_must_be_free_in_time(held_s: float, num_wrongs: int) -> None:
    broken = story(0, arrivals=(13.0, 13.1))
    broken.broken.append(Broken(10.01, had_begun=True, token_ids=(7,), text="Once"))
    of_the_dead = ended(7, 0, at=1000.0 + held_s)[1:]
    ready = {"event": "process_ready", "name": "server", "timestamp": "1970-01-01T00:16:41Z"}
    of_the_next = [line | {"reason": "stop"} for line in ended(0, 0, at=1009.0)]
    verdict = judged(SERVER_KILL, [broken], [ready, *of_the_dead, *of_the_next])
    assert verdict.freed_s == [pytest.approx(held_s)]
    assert verdict.noticed_s == [pytest.approx(0.01)]
    assert verdict.pauses_s == [pytest.approx(2.99)]
    assert len(verdict.wrongs) == num_wrongs


def test_what_came_before_the_break_must_be_the_answers_beginning() -> None:
    broken = story(0, arrivals=(13.0,))
    broken.broken.append(Broken(10.01, had_begun=True, token_ids=(9,), text="On"))
    verdict = judged(SERVER_KILL, [broken], ended(7, 0)[1:])
    assert ["before its connection broke" in wrong for wrong in verdict.wrongs] == [True]


def test_the_log_is_read_as_it_grows_and_torn_lines_are_left_out(tmp_path: Path) -> None:
    log = FleetLog(tmp_path / "log")
    started = {"event": "process_started", "name": "decode-0", "pid": 5}
    log.path.write_text(json.dumps(started) + "\nplain words\n" + '{"event": "half')
    assert log.pids() == {"decode-0": 5}
    with log.path.open("a") as file:
        file.write(json.dumps(started) + "\n" + json.dumps(started | {"pid": 6}) + "\n")
    assert log.pids() == {"decode-0": 6}
    assert log.names("decode") == ["decode-0"]
    assert log.of("process_started", pid=5) == [started]


def test_attempts_are_counted_by_the_clients_name_of_a_request() -> None:
    assert attempts_of([*ended(3, 0, 2), *ended(4, 0), *ended(9, 5)[1:]]) == {
        "ask-00003": 3,
        "ask-00004": 1,
    }


def test_a_process_that_never_was_has_no_state() -> None:
    assert state_of(2**22 + 1) is None

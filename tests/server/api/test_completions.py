"""Tests of plain completions: kinds of prompts, echo, logprobs, and streams of several prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from server.api.stream import WholeAnswer
from server.contract.generation import Delta, TokenLogprob
from tests.server.support.fakes import FakeFleet, saying
from tests.server.support.surface import asked_of, surface

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.api.stream import Answer
    from tests.server.support.fakes import FakeGeneration

PATH = "/v1/completions"


def repeat(generation: FakeGeneration) -> None:
    """Answer with the prompt in capitals."""
    generation.say(bytes(generation.request.prompt_ids).decode().upper())
    generation.finish()


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["AB"]),
        (["ab", "cd"], ["AB", "CD"]),
        ([97, 98], ["AB"]),
        ([[97], [98, 99]], ["A", "BC"]),
        (["a", [98]], ["A", "B"]),
    ],
)
async def test_prompts_may_be_text_or_ids_one_or_many(prompt: object, texts: list[str]) -> None:
    async with surface(FakeFleet(repeat)) as server:
        whole = await server.post(PATH, {"prompt": prompt})
        stream = await server.post(PATH, {"prompt": prompt, "stream": True})
    assert [choice["text"] for choice in whole.json["choices"]] == texts
    assert whole.json["object"] == "text_completion"
    assert joined(stream.events) == dict(enumerate(texts))


def joined(events: list[Any]) -> dict[int, str]:
    """Return the text of each choice of a stream, checked for one finish_reason each."""
    assert events[-1] == "[DONE]"
    texts: dict[int, str] = {}
    ends: list[int] = []
    for event in events[:-1]:
        for choice in event["choices"]:
            assert choice["index"] not in ends
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            if choice["finish_reason"]:
                ends.append(choice["index"])
    assert sorted(ends) == sorted(texts)
    return texts


async def test_sixteen_tokens_unless_told_otherwise() -> None:
    request = await asked_of(PATH, {"prompt": "a"})
    assert request.sampling.max_tokens == 16


async def test_choices_are_numbered_prompt_by_prompt_and_usage_counts_prompts_once() -> None:
    body = {
        "prompt": ["a", "bcd"],
        "n": 2,
        "seed": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with surface(FakeFleet(repeat)) as server:
        events = (await server.post(PATH, body)).events
        seeds = [g.request.sampling.seed for g in server.fleet.generations]
    assert joined(events) == {0: "A", 1: "A", 2: "BCD", 3: "BCD"}
    assert seeds == [5, 6, 5, 6]
    assert events[-2]["usage"]["prompt_tokens"] == 4
    assert events[-2]["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
async def test_echo_puts_the_prompt_first(prompt: object) -> None:
    async with surface(FakeFleet(repeat)) as server:
        whole = await server.post(PATH, {"prompt": prompt, "echo": True})
        stream = await server.post(PATH, {"prompt": prompt, "echo": True, "stream": True})
        both = await server.post(PATH, {"prompt": prompt, "echo": True, "logprobs": 1})
    assert whole.json["choices"][0]["text"] == "abAB"
    assert stream.events[0]["choices"][0]["text"] == "ab"
    assert joined(stream.events) == {0: "abAB"}
    assert (both.status, both.error["param"]) == (400, "logprobs")


async def test_logprobs_say_where_in_the_text_their_tokens_are() -> None:
    async with surface(FakeFleet(saying("ab", "c"))) as server:
        whole = await server.post(PATH, {"prompt": "x", "logprobs": 1})
        stream = await server.post(PATH, {"prompt": "x", "logprobs": 1, "stream": True})
    scored = whole.json["choices"][0]["logprobs"]
    assert scored == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"a": -0.5}, {"b": -0.5}, {"c": -0.5}],
        "text_offset": [0, 1, 2],
    }
    pieces = [e["choices"][0]["logprobs"] for e in stream.events[:-1]]
    assert [piece["text_offset"] for piece in pieces if piece] == [[0, 1], [2]]


async def test_token_ids_are_listed_where_asked_for() -> None:
    async with surface(FakeFleet(repeat)) as server:
        answer = await server.post(PATH, {"prompt": "a", "return_token_ids": True})
        plain = await server.post(PATH, {"prompt": "a"})
    assert answer.json["choices"][0]["token_ids"] == [65]
    assert "token_ids" not in plain.json["choices"][0]


async def test_a_refusal_halfway_frees_what_was_begun() -> None:
    fleet = FakeFleet(repeat)
    async with surface(fleet) as server:
        long = "x" * 5000
        answer = await server.post(PATH, {"prompt": ["a", long], "max_tokens": 5})
        assert answer.error["code"] == "context_length_exceeded"
        assert fleet.generations == []


def test_alternatives_are_written_as_their_tokens_come() -> None:
    """Serializing those of thousands of tokens at the end would block all streams."""
    scored: list[int] = []

    def score(token: TokenLogprob) -> dict[str, int]:
        scored.append(token.token_id)
        return {"id": token.token_id}

    def document(answers: Sequence[Answer]) -> bytes:
        assert not any(token.top for answer in answers for token in answer.logprobs)
        return msgspec.json.encode([answer.scored for answer in answers])

    whole = WholeAnswer(2, document, score)
    for index, token_id in ((0, 7), (1, 8), (0, 9)):
        token = TokenLogprob(token_id, "x", b"x", -0.5, ((1, "y", b"y", -1.5),))
        whole.event(index, Delta("x", (token_id,), (token,)))
    assert scored == [7, 8, 9]
    assert whole.end() == [b'[[{"id":7},{"id":9}],[{"id":8}]]']
    assert scored == [7, 8, 9]

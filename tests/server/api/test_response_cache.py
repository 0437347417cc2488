"""Tests of the response cache: a stored answer is returned only if the request determines the
answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import trio

from server.cache.front import CachingFleet
from server.contract.generation import Finished, FinishReason
from tests.server.support.fakes import FakeFleet, answer_hello, by_hand
from tests.server.support.surface import request_bytes, surface
from triolet.config import ResponseCacheConfig
from triolet.errors import RequestError
from triolet.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.support.fakes import FakeGeneration
    from tests.server.support.surface import Answer, Surface

CACHE = ResponseCacheConfig(max_bytes=MIB)
ALLOW = {"response_cache": "allow", "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"prompt": "Hi", "max_tokens": 20}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": CHAT["messages"], "max_tokens": 20},
}


async def ask(server: Surface, path: str = "/v1/completions", **more: object) -> Answer:
    answer = await server.post(path, BODIES[path] | ALLOW | more)
    assert answer.status == 200, answer.body
    return answer


def outcome(answer: Answer) -> str | None:
    return answer.headers.get("x-triolet-cache")


def said(answer: Answer) -> str:
    """Return an answer without the parts that are new each time."""
    fields = answer.json
    fresh = ("id", "created", "created_at", "completed_at", "output")
    return str({name: value for name, value in fields.items() if name not in fresh})


def shapes(answer: Answer) -> list[object]:
    """Return the content of each chunk of a stream, without ids."""
    data = [line for line in answer.body.decode().split("\n") if line.startswith("data: {")]
    return [line.count('"') for line in data]


@pytest.mark.parametrize("path", BODIES)
async def test_whole_answers_are_given_again(path: str) -> None:
    async with surface(response_cache=CACHE) as server:
        first, second = await ask(server, path), await ask(server, path)
    assert (outcome(first), outcome(second)) == ("miss", "hit")
    assert "age" not in first.headers
    assert 0 <= int(second.headers["age"]) < 60
    assert said(first) == said(second)
    assert len(server.fleet.generations) == 1


@pytest.mark.parametrize("path", BODIES)
async def test_streams_are_given_again_chunk_by_chunk(path: str) -> None:
    def slowly(generation: FakeGeneration) -> None:
        generation.say(*"abcdefghijklmnopqrstuvwxyz")
        generation.finish()

    async with surface(FakeFleet(slowly), response_cache=CACHE) as server:
        first, second = await ask(server, path, stream=True), await ask(server, path, stream=True)
        whole = await ask(server, path)
    assert [outcome(answer) for answer in (first, second, whole)] == ["miss", "hit", "hit"]
    assert len(shapes(first)) > 26
    assert shapes(first) == shapes(second)
    assert b"abcdefghijklmnopqrstuvwxyz" in whole.body


@pytest.mark.parametrize(
    "more",
    [
        {"seed": 7, "temperature": 1, "prompt": "Hi!"},
        {"stop": ["x"]},
        {"max_tokens": 19},
        {"cache_salt": "mine"},
        {"logprobs": 1},
        {"logit_bias": {"5": 1}},
        {"skip_special_tokens": False},
        {"include_stop_str_in_output": True},
        {"structured_outputs": {"regex": "a+"}},
        {"min_tokens": 2},
        {"prompt": "Ho"},
    ],
)
async def test_whatever_may_change_the_text_is_another_question(more: dict[str, Any]) -> None:
    async with surface(response_cache=CACHE) as server:
        await ask(server)
        assert outcome(await ask(server, **more)) == "miss"
        assert outcome(await ask(server, **more)) == "hit"


async def test_what_changes_no_token_is_the_same_question() -> None:
    async with surface(response_cache=CACHE) as server:
        await ask(server)
        assert outcome(await ask(server, seed=5, priority=3, stream=True)) == "hit"
        seeded = {"temperature": 1, "seed": 5}
        assert outcome(await ask(server, **seeded)) == "miss"
        assert outcome(await ask(server, **seeded)) == "hit"
        assert outcome(await ask(server, **seeded | {"seed": 6})) == "miss"


async def test_chance_is_never_replayed() -> None:
    async with surface(response_cache=CACHE) as server:
        for _ in range(2):
            assert outcome(await ask(server, temperature=1)) == "bypass"
    assert len(server.fleet.generations) == 2


async def test_who_does_not_ask_gets_and_leaves_nothing() -> None:
    async with surface(response_cache=CACHE) as server:
        assert outcome(await ask(server, response_cache=None)) is None
        assert outcome(await ask(server)) == "miss"
        assert outcome(await ask(server, response_cache=None)) is None
        assert outcome(await ask(server, response_cache="refresh")) == "miss"
        assert outcome(await ask(server)) == "hit"
    assert len(server.fleet.generations) == 4


async def test_without_the_operators_wish_nothing_is_kept() -> None:
    async with surface() as server:
        for _ in range(2):
            assert outcome(await ask(server)) is None
    assert len(server.fleet.generations) == 2


async def test_choices_are_given_again_together_or_not_at_all() -> None:
    seeded = {"temperature": 1, "seed": 5}
    async with surface(response_cache=CACHE) as server:
        await ask(server, **seeded, n=2)
        assert outcome(await ask(server, **seeded, n=2)) == "hit"
        assert outcome(await ask(server, **seeded | {"seed": 6})) == "hit"  # its second choice
        assert outcome(await ask(server, **seeded, n=3)) == "miss"


async def test_another_model_answers_anew_and_two_at_once_are_not_told_apart() -> None:
    async with surface(response_cache=CACHE) as server:
        await ask(server)
        workers = server.fleet.status().workers
        workers[0].fingerprint = "other"
        assert outcome(await ask(server)) == "bypass"
        workers[1].fingerprint = "other"
        assert outcome(await ask(server)) == "miss"
        # The fake's answers always come from the first model.
        assert outcome(await ask(server)) == "miss"


async def test_an_idle_server_forgets_what_is_too_old() -> None:
    async with surface(response_cache=CACHE) as server:
        await ask(server)
        cache = server.services.models.first.fleet
        assert isinstance(cache, CachingFleet)
        assert len(cache.store) == 1
        server.services.kept.sweep(trio.current_time() + CACHE.ttl_s)
        assert not len(cache.store)


async def test_only_what_may_be_kept_is_not_refused_early() -> None:
    async with surface(response_cache=CACHE) as server:
        await ask(server)
        await ask(server, response_cache="refresh")
        assert len(server.fleet.admission.keys) == 1
    async with surface() as server:
        await ask(server)
        assert len(server.fleet.admission.keys) == 1


async def test_a_worker_that_is_gone_has_no_say_in_what_is_served() -> None:
    async with surface(response_cache=CACHE) as server:
        await ask(server)
        dead = server.fleet.status().workers[0]
        dead.fingerprint, dead.state = "older", "dead"
        assert outcome(await ask(server)) == "hit"


def fails(generation: FakeGeneration) -> None:
    generation.say("Hel")
    generation.fail(RequestError("gone", status=503, code="no_worker"))


def is_cut(generation: FakeGeneration) -> None:
    generation.say("Hel")
    generation.finish(FinishReason.LENGTH)


def comes_from_another_model(generation: FakeGeneration) -> None:
    generation.push(Finished(FinishReason.STOP, generation.usage, fingerprint="other"))


@pytest.mark.parametrize("script", [fails, is_cut, comes_from_another_model])
async def test_what_is_not_the_whole_answer_is_not_kept(
    script: Callable[[FakeGeneration], None],
) -> None:
    async with surface(FakeFleet(script), response_cache=CACHE) as server:
        for _ in range(2):
            await server.post("/v1/completions", COMPLETION | ALLOW)
    assert len(server.fleet.generations) == 2


async def test_an_answer_that_fills_what_was_asked_for_is_whole() -> None:
    async with surface(FakeFleet(is_cut), response_cache=CACHE) as server:
        await ask(server, max_tokens=3)
        assert outcome(await ask(server, max_tokens=3)) == "hit"


async def test_a_client_that_leaves_takes_its_answer_along() -> None:
    async with surface(FakeFleet(by_hand), response_cache=CACHE) as server:
        client = await server.connect()
        body = COMPLETION | ALLOW | {"stream": True}
        raw = json.dumps(body).encode()
        await client.send(request_bytes("POST", "/v1/completions", body=raw))
        generation = await server.fleet.nth(0)
        generation.say("Hel")
        await client.until(b"Hel")
        await client.stream.aclose()
        await generation.was_cancelled.wait()
        server.fleet.script = answer_hello
        assert outcome(await ask(server)) == "miss"


async def test_prewarming_always_computes() -> None:
    body = {"messages": CHAT["messages"], "max_tokens": 0, **ALLOW}
    async with surface(response_cache=CACHE) as server:
        for _ in range(2):
            answer = await server.post("/v1/messages", body)
            assert (answer.status, outcome(answer)) == (200, None)
    assert len(server.fleet.generations) == 2


async def test_the_metrics_say_what_came_of_it() -> None:
    async with surface(response_cache=CACHE) as server:
        for _ in range(3):
            await ask(server)
        text = (await server.request("GET", "/metrics")).body.decode()
    assert 'triolet_response_cache_requests_total{outcome="hit"} 2.0' in text
    assert 'triolet_response_cache_requests_total{outcome="miss"} 1.0' in text
    assert "triolet_response_cache_answers 1.0" in text
    assert 'triolet_response_cache_gone_total{why="evicted"} 0.0' in text


async def test_an_answer_is_resumed_whether_it_was_computed_or_found() -> None:
    async with surface(response_cache=CACHE) as server:
        body = COMPLETION | ALLOW | {"stream": True}
        answers = [
            await server.post("/v1/completions", body, headers={"idempotency-key": key})
            for key in ("one", "two", "two")
        ]
    assert [outcome(answer) for answer in answers] == ["miss", "hit", None]
    assert answers[1].body == answers[2].body
    assert len(server.fleet.generations) == 1

"""The cascade of `model: auto`: what is held back, who answers, what is shown and charged."""

from __future__ import annotations

import gc
import json
import re
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio
from structlog.testing import capture_logs

from server.api.cascade import Cascade, Trial
from server.contract.generation import CancelReason
from server.tenants.tenancy import Tenancy
from tests.server.api.test_auto import CHAT, LADDER, ask, asleep, ladder, metrics
from tests.server.api.test_many_models import (
    CODE,
    CODE_CONFIG,
    COMPLETIONS,
    DIGEST,
    TURN,
    CodeText,
    TwoModels,
)
from tests.server.support.fakes import (
    FakeFleet,
    by_hand,
    fake_model,
)
from tests.server.support.surface import MODEL, request_bytes, surface, until
from tests.server.support.tenants import tenant, tenants_of
from tests.server.support.websocket import open_socket
from triolet.config import (
    AutoConfig,
    CascadeConfig,
    ResponseCacheConfig,
    ServerConfig,
    WakePolicy,
)
from triolet.errors import ConfigError, RequestError, overloaded, server_error
from triolet.units import MIB

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.server.support.surface import Answer, RawClient

TAKES_ALL, TAKES_NONE = -1000.0, 0.0
"""The tokens of the fakes have the log-probability -0.5."""
TOKENS = 4
HEADER = "x-triolet-cascade"


def cascade(threshold: float, **changes: Any) -> AutoConfig:  # noqa: ANN401
    config = CascadeConfig(threshold, **{"tokens": TOKENS} | changes)
    return replace(LADDER, cascade=config)


@asynccontextmanager
async def judged(threshold: float, **changes: Any) -> AsyncIterator[TwoModels]:  # noqa: ANN401
    config = changes.pop("cascade", {})
    async with ladder(cascade(threshold, **config), **changes) as models:
        yield models


def plain(body: bytes, model: str) -> bytes:
    """Return an answer without what differs from one answer to the next."""
    body = re.sub(rb'"model":"[a-z]+"', b'"model":"%b"' % model.encode(), body)
    body = re.sub(rb'"system_fingerprint":"\w+",?', b"", body)
    body = re.sub(rb"[0-9a-f]{16,}", b"", body)
    return re.sub(rb'"\w*(?:created|_at|duration)\w*":("[^"]+"|[0-9.]+|null)', b"", body)


def _post(body: dict[str, Any], headers: dict[str, str] | None = None) -> bytes:
    whole = {"model": "auto", "messages": [TURN]} | body
    return request_bytes("POST", CHAT, body=json.dumps(whole).encode(), headers=headers)


@asynccontextmanager
async def asking(models: TwoModels, **body: Any) -> AsyncIterator[RawClient]:  # noqa: ANN401
    """Send a chat and leave its answer to the test."""
    headers = body.pop("headers", None)
    client = await models.server.connect()
    async with client.stream:
        await client.send(_post(body, headers))
        yield client


@pytest.mark.parametrize(("path", "body"), COMPLETIONS)
async def test_the_answer_is_what_the_answering_model_says_without_a_cascade(
    path: str, body: dict[str, Any]
) -> None:
    for threshold, counts, name in ((TAKES_ALL, (1, 0), MODEL), (TAKES_NONE, (1, 1), CODE)):
        async with judged(threshold) as models:
            found = await models.server.post(path, body | {"model": "auto"})
            assert models.counts == counts
            named = await models.server.post(path, body | {"model": name})
        assert found.status == 200, found.body
        assert f'"model":"{name}"'.encode() in found.body
        version = found.headers.get("x-triolet-model-version")
        assert version == (DIGEST if name == CODE else None)
        shown = "passed_up; mean=-0.5000; discarded=11" if counts == (1, 1) else "accepted; mean="
        assert found.headers[HEADER].startswith(shown)
        assert plain(found.body, name) == plain(named.body, name)


async def test_log_probabilities_are_shown_to_clients_that_ask_for_them() -> None:
    async with judged(TAKES_ALL) as models:
        for stream in (False, True):
            asked = {"logprobs": True, "stream": stream}
            found, named = [
                (await ask(models, model=name, **asked)).body for name in ("auto", MODEL)
            ]
            assert plain(found, MODEL) == plain(named, MODEL)
            assert b'"logprob":-0.5' in found
        assert b'"logprob"' not in (await ask(models)).body
        one, two = (fleet.request.sampling for fleet in models.demo.generations[-2:])
        assert (two.logprobs, two.scored_tokens) == (None, TOKENS)
        assert one.scored_tokens == 0, "the model was named"


async def test_nothing_is_sent_before_the_verdict_but_signs_of_life() -> None:
    changes = {"fleet": FakeFleet(by_hand), "keep_alive_s": 0.02}
    async with judged(TAKES_ALL, **changes) as models, asking(models, stream=True) as client:
        generation = await models.demo.nth(0)
        generation.say("abc")
        head = await client.until(b": keep-alive\n\n")
        assert b"data:" not in head
        assert HEADER.encode() not in head.lower(), "what answers is not known yet"
        generation.say("de")
        before = await client.until(b'"content":"abc"')
        assert b'"role":"assistant"' in before
        generation.finish()
        rest = await client.until(b"[DONE]")
        assert b'"content":"de"' in rest


async def test_a_slow_verdict_may_still_be_for_the_larger_model() -> None:
    changes = {"fleet": FakeFleet(by_hand), "keep_alive_s": 0.02}
    async with judged(TAKES_NONE, **changes) as models, asking(models, stream=True) as client:
        head = await client.until(b": keep-alive\n\n")
        assert b"x-triolet-model-version" not in head.lower()
        (await models.demo.nth(0)).say("abcd")
        answer = await client.until(b"[DONE]")
        assert b'"model":"demo"' not in answer
        assert b'"model":"code"' in answer
        assert models.demo.generations[0].cancelled == [CancelReason.PASSED_UP]


async def test_an_answer_shorter_than_what_is_judged_is_judged_by_what_there_is() -> None:
    for threshold, shown in ((TAKES_ALL, MODEL), (TAKES_NONE, CODE)):
        async with judged(threshold, cascade={"tokens": 64}) as models:
            assert (await ask(models)).json["model"] == shown


async def test_a_client_that_leaves_ends_what_is_held() -> None:
    async with judged(TAKES_NONE, fleet=FakeFleet(by_hand)) as models:
        async with asking(models, stream=True):
            generation = await models.demo.nth(0)
            generation.say("ab")
        await generation.was_cancelled.wait()
        assert generation.cancelled[0] is CancelReason.CLIENT_GONE
        assert models.counts == (1, 0)


async def test_after_a_switch_a_client_that_leaves_ends_the_larger_models_sequence() -> None:
    async with judged(TAKES_NONE, code_fleet=FakeFleet(by_hand)) as models:
        async with asking(models, stream=True):
            generation = await models.code.nth(0)
        await generation.was_cancelled.wait()
        assert generation.cancelled[0] is CancelReason.CLIENT_GONE
        assert models.demo.generations[0].cancelled == [CancelReason.PASSED_UP]


async def kept(models: TwoModels) -> Answer:
    answer = await ask(models)
    assert answer.json["model"] == MODEL
    assert answer.json["choices"][0]["message"]["content"] == "Hello there"
    assert answer.headers[HEADER].startswith("kept; mean=-0.5000; discarded=0")
    return answer


async def test_where_the_next_model_cannot_take_it_the_small_answer_is_kept() -> None:
    async with judged(TAKES_NONE) as models:
        models.code.refuse_with = overloaded("full", 1.0)
        await kept(models)
        models.code.refuse_with = None
        models.code.status().max_model_len = 10
        await kept(models)
        models.code.status().max_model_len = 4096
        asleep(models.code)
        await kept(models)
        shown = await metrics(models, "triolet_auto_cascade_total")
        assert shown == {'triolet_auto_cascade_total{model="demo",verdict="kept"}': 3.0}


async def test_a_model_that_sleeps_is_woken_by_a_verdict_where_the_policy_says_so() -> None:
    auto = replace(cascade(TAKES_NONE), wake=WakePolicy.ALWAYS)
    async with ladder(auto) as models:
        asleep(models.code)
        assert (await ask(models)).json["model"] == CODE


async def test_a_larger_model_that_fails_before_its_first_token_gives_the_answer_back() -> None:
    failing = FakeFleet(lambda one: one.fail(server_error()))
    async with judged(TAKES_NONE, code_fleet=failing) as models:
        answer = await ask(models)
        assert answer.json["model"] == MODEL
        assert answer.json["choices"][0]["message"]["content"] == "Hello there"
        assert "x-triolet-model-version" not in answer.headers
        assert answer.headers[HEADER].startswith("kept; mean=-0.5000; discarded=11")
        first, second = (one.request for one in models.demo.generations)
        assert first.request_id != second.request_id
        assert first.sampling.seed == second.sampling.seed
        assert models.counts == (2, 1)
        both = FakeFleet(lambda one: one.fail(server_error()))
        models.demo.refuse_with = None
        models.demo.script = both.script
        assert (await ask(models)).status == 500, "as without a cascade"


async def test_the_head_of_an_answer_that_came_back_names_its_own_version() -> None:
    digest = "sha256:" + "9" * 64
    failing = FakeFleet(lambda one: one.fail(server_error()))
    auto = replace(cascade(TAKES_NONE), ladder=(CODE, MODEL))
    code = FakeFleet()
    other = fake_model(replace(CODE_CONFIG, model_digest=digest), code, text=CodeText())
    async with surface(failing, others=[other], auto=auto) as server:
        answer = await ask(TwoModels(server, failing, code))
    assert answer.json["model"] == CODE
    assert answer.headers["x-triolet-model-version"] == digest


async def test_a_model_that_says_nothing_until_the_deadline_ends_the_request_as_ever() -> None:
    async with judged(TAKES_NONE, fleet=FakeFleet(by_hand)) as models:
        for stream in (False, True):
            async with asking(models, stream=stream) as client:
                generation = await models.demo.nth(int(stream))
                generation.say("ab")
                error = RequestError("too late", status=504, code="deadline_exceeded")
                generation.fail(error)
                if stream:
                    assert b"deadline_exceeded" in await client.until(b"[DONE]")
                else:
                    assert (await client.answer()).status == 504
        assert models.counts == (2, 0)


async def test_deadlines_span_both_models() -> None:
    async with judged(TAKES_NONE, fleet=FakeFleet(by_hand)) as models:
        async with asking(models, stream=True) as client:
            generation = await models.demo.nth(0)
            await trio.sleep(0.05)
            generation.say("abcd")
            await client.until(b"[DONE]")
        (large,) = models.code.generations
        assert large.request.deadline_s < generation.request.deadline_s - 0.04
        assert large.request.request_id != generation.request.request_id


@pytest.mark.parametrize("fields", [{"n": 2}, {"model": MODEL}, {"max_tokens": 250}])
async def test_what_is_not_judged(fields: dict[str, Any]) -> None:
    """Several choices, a named model, and what only the last model takes."""
    async with judged(TAKES_NONE) as models:
        answer = await ask(models, **fields)
        assert answer.status == 200
        assert HEADER not in answer.headers
        running = models.demo.generations + models.code.generations
        assert {one.request.sampling.scored_tokens for one in running} == {0}
        assert 0 in models.counts


async def test_a_tenant_may_be_left_out() -> None:
    alice = replace(tenant("alice", "key-of-alice"), cascade=False)
    async with judged(TAKES_NONE, tenancy=Tenancy(tenants_of(alice))) as models:
        answer = await ask(models, headers={"authorization": "Bearer key-of-alice"})
        assert answer.json["model"] == MODEL
        assert HEADER not in answer.headers


async def test_three_models_are_asked_one_after_the_other() -> None:
    small, middle, large = FakeFleet(), FakeFleet(), FakeFleet()
    others = [
        fake_model(CODE_CONFIG, middle, text=CodeText()),
        fake_model(replace(CODE_CONFIG, model_name="max", model_aliases=()), large),
    ]
    auto = replace(cascade(TAKES_NONE), ladder=(MODEL, CODE, "max"))
    async with surface(small, others=others, auto=auto) as server:
        models = TwoModels(server, small, middle)
        with capture_logs() as lines:
            answer = await ask(models)
        assert answer.json["model"] == "max"
        assert answer.headers[HEADER] == "passed_up; mean=-0.5000; discarded=22"
        assert [len(one.generations) for one in (small, middle, large)] == [1, 1, 1]
        record = large.generations[0].request.auto
        assert record is not None
        assert record.cascade is not None
        assert record.reason == "cascade"
        assert record.cascade.tried == [MODEL, CODE]
        assert not [line for line in lines if line["log_level"] == "error"]
        shown = await metrics(models, "triolet_auto_discarded_tokens_total")
        assert set(shown.values()) == {11.0}


async def test_a_key_has_one_answer_by_the_model_that_answers() -> None:
    async with judged(TAKES_NONE, fleet=FakeFleet(by_hand)) as models:
        headers = {"idempotency-key": "one"}
        async with (
            asking(models, stream=True, headers=headers) as client,
            asking(models, stream=True, headers=headers) as other,
        ):
            (await models.demo.nth(0)).say("abcd")
            answers = [await one.until(b"[DONE]") for one in (client, other)]
        assert models.counts == (1, 1)
        for answer in answers:
            assert b"\r\nx-triolet-model-version: " + DIGEST.encode() in answer.lower()
            assert answer.count(b"Hello") == 1
        body = {"model": "auto", "messages": [TURN], "stream": True}
        rest = await models.server.post(CHAT, body, headers=headers | {"last-event-id": "1"})
        assert rest.headers["x-triolet-model-version"] == DIGEST
        assert b" there" in rest.body


async def test_a_client_that_leaves_with_a_key_finds_the_answer_that_went_on() -> None:
    async with judged(TAKES_NONE, fleet=FakeFleet(by_hand)) as models:
        headers = {"idempotency-key": "one"}
        async with asking(models, stream=True, headers=headers):
            generation = await models.demo.nth(0)
        await until(lambda: not models.server.edge.connections)
        generation.say("abcd")
        await until(lambda: models.counts == (1, 1))
        body = {"model": "auto", "messages": [TURN], "stream": True}
        found = await models.server.post(CHAT, body, headers=headers)
        assert found.headers["idempotency-replayed"] == "true"
        assert b'"model":"code"' in found.body


async def test_the_response_cache_keeps_accepted_answers_alone() -> None:
    kept = ResponseCacheConfig(max_bytes=MIB)
    fields = {"response_cache": "allow", "temperature": 0}
    async with judged(TAKES_ALL, response_cache=kept) as models:
        first, second = [await ask(models, **fields) for _ in range(2)]
        assert [one.headers["x-triolet-cache"] for one in (first, second)] == ["miss", "hit"]
        assert second.json["choices"] == first.json["choices"]
        assert models.counts == (1, 0)
    changes = {"response_cache": kept, "code_config": {"response_cache": kept}}
    async with judged(TAKES_NONE, **changes) as models:
        models.code.refuse_with = overloaded("full", 1.0)
        await ask(models, **fields)
        models.code.refuse_with = None
        first, second = [await ask(models, **fields) for _ in range(2)]
        assert [one.json["model"] for one in (first, second)] == [CODE, CODE]
        assert [one.headers["x-triolet-cache"] for one in (first, second)] == ["miss", "hit"]
        assert models.counts == (3, 1)


@pytest.mark.parametrize("resumable", [False, True])
async def test_a_socket_gets_the_answer_of_the_model_that_answers(*, resumable: bool) -> None:
    for threshold, shown in ((TAKES_ALL, MODEL), (TAKES_NONE, CODE)):
        async with judged(threshold) as models:
            socket = await open_socket(models.server)
            async with socket.client.stream:
                create = {"type": "response.create", "model": "auto", "input": "hi"}
                await socket.send(create | {"resumable": resumable})
                events = await socket.until("response.completed")
                assert {events[0]["type"], events[0]["response"]["model"]} == {
                    "response.created",
                    shown,
                }
                before = events[-1]["response"]
                assert before["output"][0]["content"][0]["text"] == "Hello there"
                more = {"previous_response_id": before["id"], "input": "more"}
                await socket.send(create | more)
                assert (await socket.until("response.completed"))[-1]["response"]["model"] == shown


async def test_a_cancel_on_a_socket_ends_what_is_held() -> None:
    async with judged(TAKES_NONE, fleet=FakeFleet(by_hand)) as models:
        socket = await open_socket(models.server)
        async with socket.client.stream:
            await socket.send({"type": "response.create", "model": "auto", "input": "hi"})
            generation = await models.demo.nth(0)
            generation.say("ab")
            await socket.send({"type": "response.cancel"})
            events = await socket.until("response.incomplete")
            assert events[-1]["response"]["model"] == MODEL
            assert generation.cancelled[0] is CancelReason.STOPPED
            assert models.counts == (1, 0)


@pytest.mark.parametrize("threshold", [TAKES_ALL, TAKES_NONE])
async def test_no_answer_waits_for_a_search_of_garbage(threshold: float) -> None:
    def left() -> list[object]:
        found = [one for one in gc.get_objects() if type(one) in (Cascade, Trial)]
        return [one for one in found if id(one) not in before]

    before: set[int] = set()
    async with judged(threshold) as models:
        gc.collect()
        of_others = left()  # in tracebacks of other tests
        before |= set(map(id, of_others))
        gc.disable()
        try:
            await ask(models)
            async with asking(models, stream=True) as client:
                await client.until(b"data: ")
            await until(lambda: not left())
        finally:
            gc.enable()


def test_what_is_no_cascade_is_refused_in_words() -> None:
    for changes, words in (
        ({"threshold": 0.5}, "threshold"),
        ({"threshold": -1.0, "tokens": 65}, "<= 64 - at `\\$.tokens`"),
        ({"threshold": -1.0, "plan_s": 0.0}, "plan_s"),
    ):
        with pytest.raises(msgspec.ValidationError, match=words):
            msgspec.convert(changes, CascadeConfig)
    with pytest.raises(ConfigError, match="ladder is missing beside cascade"):
        AutoConfig(cascade=CascadeConfig(-1.0))
    with pytest.raises(ConfigError, match="below stall_timeout_s"):
        ServerConfig("", auto=cascade(-1.0, plan_s=20.0))

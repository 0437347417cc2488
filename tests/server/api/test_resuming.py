"""Tests of idempotency keys: a retry joins the running answer, and a stream that was cut continues
where it stopped."""

from __future__ import annotations

import json
import os
import random
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.lowlevel
import trio.testing

from server.contract.generation import CancelReason
from tests.server.support.clock import pass_time
from tests.server.support.fakes import FakeFleet, by_hand
from tests.server.support.surface import PATIENCE_S, refused_at, request_bytes, surface
from tests.server.support.tenants import tenancy_of
from triolet.config import ResumeConfig
from triolet.errors import no_worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trio.testing import MockClock

    from tests.server.support.fakes import FakeGeneration
    from tests.server.support.surface import Answer, RawClient, Surface

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
WHOLE = ASK | {"stream": False}
WORDS = [f"word{number} " for number in range(60)]


def tell_a_story(generation: FakeGeneration) -> None:
    """Generate many chunks, which a reader may take one by one or all at once."""
    generation.say(*WORDS)
    generation.finish()


_opened: list[RawClient] = []


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    """Close everything that a test has opened."""
    yield
    while _opened:
        fd = _opened.pop().stream.socket.detach()
        if fd >= 0:
            os.close(fd)


async def ask(server: Surface, body: dict[str, Any], **headers: str) -> RawClient:
    """Send a request and leave its answer unread."""
    client = await server.connect()
    _opened.append(client)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    await client.send(request_bytes("POST", CHAT, body=json.dumps(body).encode(), headers=named))
    return client


async def begun(server: Surface) -> tuple[RawClient, FakeGeneration]:
    """Send a streaming request with a key, and wait until the fleet has started it."""
    client = await ask(server, ASK, idempotency_key="k")
    return client, await server.fleet.nth(0)


async def events(client: RawClient, count: int | None = None) -> list[bytes]:
    """Read all or some of a stream's events, each with its id."""
    status, headers = await client.head()
    assert status == 200, await client.chunk()
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    buffer = b""
    found: list[bytes] = []
    while count is None or len(found) < count:
        data = await client.chunk()
        if not data:
            break
        buffer += data
        *whole, buffer = buffer.split(b"\n\n")
        found += [event for event in whole if not event.startswith(b":")]
    assert count is not None or not buffer
    return found if count is None else found[:count]


def id_of(event: bytes) -> int:
    assert event.startswith(b"id: ")
    return int(event.split(b"\n")[0].removeprefix(b"id: "))


async def test_a_stream_cut_anywhere_and_resumed_has_the_same_bytes() -> None:
    rng = random.Random(5)
    async with surface(FakeFleet(by_hand)) as server:
        whole, generation = await begun(server)
        for word in WORDS:
            generation.say(word)
            await trio.testing.wait_all_tasks_blocked()
        generation.finish()
        uncut = await events(whole)
        assert [id_of(event) for event in uncut] == list(range(len(uncut)))
        assert len(uncut) == len(WORDS) + 3
        for cut in rng.sample(range(1, len(uncut)), 20):
            first = await ask(server, ASK, idempotency_key="k")
            before = await events(first, cut)
            await first.stream.aclose()
            again = await ask(
                server, ASK, idempotency_key="k", last_event_id=str(id_of(before[-1]))
            )
            assert before + await events(again) == uncut
        assert len(server.fleet.generations) == 1
        assert not generation.cancelled


async def test_two_clients_read_one_live_stream() -> None:
    async with surface(FakeFleet(by_hand)) as server:
        first, generation = await begun(server)
        generation.say("one ", "two ")
        second = await ask(server, ASK, idempotency_key="k")
        status, headers = await second.head()
        assert (status, headers["idempotency-replayed"]) == (200, "true")
        await second.until(b"two ")
        generation.say("three")
        await second.until(b"three")
        generation.finish()
        await second.until(b"[DONE]")
        assert b"".join(await events(first)).count(b"three") == 1
        assert len(server.fleet.generations) == 1


async def test_an_answer_goes_on_when_its_client_leaves_and_may_return() -> None:
    async with surface(FakeFleet(by_hand)) as server:
        first, generation = await begun(server)
        generation.say("one ")
        got = await events(first, 2)
        await first.stream.aclose()
        await server.all_connections_closed()
        assert not generation.cancelled
        generation.say("two ")
        generation.finish()
        again = await ask(server, ASK, idempotency_key="k", last_event_id=str(id_of(got[-1])))
        rest = await events(again)
        assert b"two " in rest[0]
        assert id_of(rest[0]) == 2
        assert b"[DONE]" in rest[-1]


async def test_without_a_key_a_client_that_leaves_ends_its_answer() -> None:
    async with surface(FakeFleet(by_hand)) as server:
        first = await ask(server, ASK)
        generation = await server.fleet.nth(0)
        generation.say("one ")
        await first.until(b"one ")
        await first.stream.aclose()
        assert await generation.cancellations() == [CancelReason.CLIENT_GONE]
        assert not len(server.services.kept)


async def test_nobody_is_waited_for_beyond_the_grace(mock_clock: MockClock) -> None:
    async with surface(FakeFleet(by_hand), resume=ResumeConfig(grace_s=30.0)) as server:
        first, generation = await begun(server)
        generation.say("one ")
        await first.until(b"one ")
        await first.stream.aclose()
        while server.edge.connections:
            await pass_time(mock_clock, 0.0)
        await pass_time(mock_clock, 20.0)
        await pass_time(mock_clock, 1.0)
        assert not generation.cancelled
        await pass_time(mock_clock, 20.0)
        await pass_time(mock_clock, 1.0)
        assert generation.cancelled == [CancelReason.CLIENT_GONE]


async def test_a_finished_answer_is_forgotten_after_its_time(mock_clock: MockClock) -> None:
    async with surface(resume=ResumeConfig(ttl_s=60.0)) as server:
        for wanted in (1, 1, 2):
            answer = await server.post(CHAT, WHOLE, headers={"idempotency-key": "k"})
            assert answer.status == 200
            assert len(server.fleet.generations) == wanted
            if len(server.services.kept):
                await pass_time(mock_clock, 59.0 if wanted == 1 and not answer.headers.get(
                    "idempotency-replayed") else 2.0)  # fmt: skip


async def test_a_retry_of_a_whole_answer_gets_that_answer() -> None:
    async with surface(FakeFleet(by_hand)) as server, trio.open_nursery() as nursery:
        answers: list[Any] = []

        async def retry() -> None:
            answers.append(await server.post(CHAT, WHOLE, headers={"idempotency-key": "k"}))

        nursery.start_soon(retry)
        generation = await server.fleet.nth(0)
        nursery.start_soon(retry)
        await trio.testing.wait_all_tasks_blocked()
        generation.say("Hello")
        generation.finish()
        with trio.fail_after(PATIENCE_S):
            while len(answers) < 2:
                await trio.lowlevel.checkpoint()
        await retry()
        assert len({answer.body for answer in answers}) == 1
        assert answers[0].json["choices"][0]["message"]["content"] == "Hello"
        assert len(server.fleet.generations) == 1
        assert answers[2].headers["idempotency-replayed"] == "true"
        assert len({answer.headers["x-request-id"] for answer in answers}) == 3


async def test_another_request_with_the_key_is_a_conflict_that_is_not_retried() -> None:
    async with surface() as server:
        headers = {"idempotency-key": "k"}
        await server.post(CHAT, WHOLE, headers=headers)
        for other in (WHOLE | {"seed": 1}, ASK, WHOLE | {"n": 2}):
            answer = await server.post(CHAT, other, headers=headers)
            assert answer.status == 409
            assert answer.error["code"] == "idempotency_conflict"
            assert answer.headers["x-should-retry"] == "false"
        others = {"authorization": "Bearer another"}
        assert (await server.post(CHAT, ASK, headers=headers | others)).status == 200


async def test_what_failed_is_tried_anew_and_what_was_refused_is_not_kept() -> None:
    async with surface(FakeFleet(by_hand)) as server, trio.open_nursery() as nursery:
        headers = {"idempotency-key": "k"}
        server.fleet.refuse_with = no_worker("nobody")
        assert (await server.post(CHAT, WHOLE, headers=headers)).status == 503
        assert not len(server.services.kept)
        server.fleet.refuse_with = None
        statuses: list[int] = []

        async def retry() -> None:
            statuses.append((await server.post(CHAT, WHOLE, headers=headers)).status)

        nursery.start_soon(retry)
        (await server.fleet.nth(0)).fail(no_worker("they left"))
        with trio.fail_after(PATIENCE_S):
            while not statuses:
                await trio.lowlevel.checkpoint()
        nursery.start_soon(retry)
        (await server.fleet.nth(1)).finish()
        with trio.fail_after(PATIENCE_S):
            while len(statuses) < 2:
                await trio.lowlevel.checkpoint()
        assert statuses == [503, 200]


async def test_a_stream_that_failed_ends_for_all_with_its_error() -> None:
    async with surface(FakeFleet(by_hand)) as server:
        first, generation = await begun(server)
        generation.say("one")
        generation.fail(no_worker("they left"))
        uncut = await events(first)
        assert b'"error"' in uncut[-2]
        again = await ask(server, ASK, idempotency_key="k", last_event_id="1")
        assert await events(again) == uncut[2:]


@pytest.mark.parametrize(
    ("headers", "body", "status", "param"),
    [
        ({"last-event-id": "3"}, ASK, 400, "last-event-id"),
        ({"last-event-id": "x", "idempotency-key": "k"}, ASK, 400, "last-event-id"),
        ({"last-event-id": "3", "idempotency-key": "k"}, WHOLE, 400, "last-event-id"),
        ({"last-event-id": "3", "idempotency-key": "k"}, ASK, 404, "last-event-id"),
        ({"idempotency-key": "a b"}, ASK, 400, "idempotency-key"),
        ({"idempotency-key": "k" * 256}, WHOLE, 400, "idempotency-key"),
    ],
)
async def test_what_cannot_be_continued_is_refused_by_name(
    headers: dict[str, str], body: dict[str, Any], status: int, param: str
) -> None:
    answer = await refused_at(CHAT, body, headers=headers)
    assert (answer.status, answer.error["param"]) == (status, param)


async def test_a_beginning_that_was_read_may_be_forgotten() -> None:
    config = ResumeConfig(buffer_bytes=2_000, ahead_bytes=1_000)
    async with surface(FakeFleet(by_hand), resume=config) as server:
        first, generation = await begun(server)
        for word in WORDS:
            generation.say(word)
            await first.until(word.encode())
        generation.finish()
        await first.until(b"[DONE]")
        early = await server.post(CHAT, ASK, headers={"idempotency-key": "k"})
        assert (early.status, early.error["code"]) == (410, "resume_expired")
        assert early.headers["x-should-retry"] == "false"
        late = await ask(server, ASK, idempotency_key="k", last_event_id=str(len(WORDS)))
        assert len(await events(late)) == 2


async def test_an_answer_runs_ahead_of_its_readers_by_a_bound_only() -> None:
    config = ResumeConfig(ahead_bytes=1_000)
    async with surface(FakeFleet(by_hand), resume=config) as server:
        first, generation = await begun(server)
        await events(first, 1)
        for _ in range(400):
            generation.say("x" * 8_000)
            await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert generation.num_unread > 0, "its tokens must wait like those of other clients"
        await first.stream.aclose()


async def test_no_tenant_takes_all_the_places_of_answers_under_way() -> None:
    config, tenancy = ResumeConfig(max_live=8), tenancy_of(alice="a", bob="b")
    async with surface(FakeFleet(by_hand), tenancy=tenancy, resume=config) as server:
        clients = [await ask(server, ASK, idempotency_key=k, x_api_key="a") for k in "kl"]
        await server.fleet.nth(1)
        refused = await server.post(CHAT, ASK, headers={"idempotency-key": "m", "x-api-key": "a"})
        assert (refused.status, refused.error["code"]) == (503, "overloaded")
        clients.append(await ask(server, ASK, idempotency_key="m", x_api_key="b"))
        await server.fleet.nth(2)
        for client, generation in zip(clients, server.fleet.generations, strict=True):
            generation.finish()
            await client.until(b"[DONE]")


async def test_at_most_so_many_are_under_way() -> None:
    config = ResumeConfig(max_live=2)
    async with surface(FakeFleet(by_hand), resume=config) as server:
        clients = [await ask(server, ASK, idempotency_key=key) for key in "ab"]
        await server.fleet.nth(1)
        refused = await server.post(CHAT, ASK, headers={"idempotency-key": "c"})
        assert (refused.status, refused.error["code"]) == (503, "overloaded")
        assert (await server.post(CHAT, WHOLE | {"max_tokens": 0})).status == 400
        for client, generation in zip(clients, server.fleet.generations, strict=True):
            generation.finish()
            await client.until(b"[DONE]")


@pytest.mark.parametrize(
    "config", [ResumeConfig(max_kept_bytes=4_000), ResumeConfig(max_kept=4)], ids=["bytes", "count"]
)
async def test_a_tenant_with_many_answers_pushes_out_its_own_only(config: ResumeConfig) -> None:
    tenancy = tenancy_of(alice="a", bob="b")
    async with surface(tenancy=tenancy, resume=config) as server:

        async def answer_of(tenant_key: str, key: str) -> Answer:
            headers = {"idempotency-key": key, "x-api-key": tenant_key}
            answer = await server.post(CHAT, WHOLE, headers=headers)
            assert answer.status == 200
            return answer

        first = await answer_of("a", "k")
        assert len(first.body) < config.max_kept_bytes / 2, "below an equal share"
        for number in range(40):
            await answer_of("b", f"k{number}")
        num_begun = len(server.fleet.generations)
        again = await answer_of("a", "k")
        assert again.headers["idempotency-replayed"] == "true"
        assert again.body == first.body
        assert len(server.fleet.generations) == num_begun
        assert len(server.services.kept) < 20
        newest = await answer_of("b", "k39")
        assert newest.headers["idempotency-replayed"] == "true", "only the oldest are evicted"

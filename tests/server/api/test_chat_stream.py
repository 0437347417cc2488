"""Tests of streamed chat completions: order and format of the chunks, keep-alives, and every way to
end."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from server.contract.generation import CancelReason, Delta, FinishReason
from tests.server.support.fakes import FakeFleet, FakeGeneration, by_hand, delta, saying
from tests.server.support.surface import MODEL, PATIENCE_S, posted, request_bytes, surface
from triolet.errors import no_worker

PATH = "/v1/chat/completions"


def chat(**more: object) -> dict[str, Any]:
    """Return a streamed request."""
    messages = [{"role": "user", "content": "hi"}]
    return {"model": MODEL, "messages": messages, "stream": True, **more}


def request_bytes_of(body: dict[str, Any]) -> bytes:
    """Return a request for raw sockets."""
    return request_bytes("POST", PATH, body=json.dumps(body).encode())


async def test_a_stream_is_role_text_finish_and_done() -> None:
    answer = await posted(PATH, chat())
    *chunks, done = answer.events
    assert answer.status == 200
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": " there"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert all("usage" not in chunk for chunk in chunks)
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert all(chunk["model"] == MODEL for chunk in chunks)


async def test_stream_headers_keep_proxies_from_holding_it_back() -> None:
    answer = await posted(PATH, chat(), headers={"X-Request-Id": "mine-1"})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"] == "mine-1"
    assert "content-encoding" not in answer.headers
    assert int(answer.headers["openai-processing-ms"]) >= 0


async def test_usage_comes_once_at_the_end_and_null_before() -> None:
    answer = await posted(PATH, chat(stream_options={"include_usage": True}))
    *chunks, last, done = answer.events
    prompt = len("user: hi\nassistant:")
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": len("Hello there"),
        "total_tokens": prompt + len("Hello there"),
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("with_total", [True, False])
async def test_usage_so_far_is_in_every_chunk_if_asked_for(with_total: bool) -> None:
    options = {"include_usage": with_total, "continuous_usage_stats": True}
    answer = await posted(PATH, chat(stream_options=options, n=2))
    chunks = [event for event in answer.events if event != "[DONE]"]
    usages = [chunk["usage"] for chunk in chunks]
    counts = [usage["completion_tokens"] for usage in usages]
    assert all(chunk["choices"] for chunk in chunks) is not with_total
    assert counts[0] == 0 < counts[-1]
    assert counts == sorted(counts)
    assert len({usage["prompt_tokens"] for usage in usages}) == 1
    assert all(u["prompt_tokens"] + u["completion_tokens"] == u["total_tokens"] for u in usages)


async def test_several_choices_share_a_stream_and_each_finishes_once() -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet) as server, trio.open_nursery() as nursery:

        async def speak() -> None:
            first, second = await fleet.nth(0), await fleet.nth(1)
            second.say("two")
            first.say("one")
            second.finish(FinishReason.LENGTH)
            first.finish()

        nursery.start_soon(speak)
        answer = await server.post(PATH, chat(n=2, seed=7))
    *chunks, done = answer.events
    texts = {0: "", 1: ""}
    reasons: dict[int, list[str]] = {0: [], 1: []}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        if choice["finish_reason"]:
            reasons[choice["index"]].append(choice["finish_reason"])
    assert done == "[DONE]"
    assert texts == {0: "one", 1: "two"}
    assert reasons == {0: ["stop"], 1: ["length"]}
    assert [g.request.sampling.seed for g in fleet.generations] == [7, 8]


async def test_text_that_cannot_be_shown_yet_makes_no_chunk() -> None:
    def script(generation: FakeGeneration) -> None:
        generation.push(delta(""), delta("é"))
        generation.finish()

    answer = await posted(PATH, chat(), fleet=FakeFleet(script))
    assert [c["choices"][0]["delta"] for c in answer.events[1:-2]] == [{"content": "é"}]


async def test_logprobs_and_token_ids_ride_with_the_text() -> None:
    asked = chat(logprobs=True, top_logprobs=1, return_token_ids=True)
    answer = await posted(PATH, asked, fleet=FakeFleet(saying("A")))
    choice = answer.events[1]["choices"][0]
    scored = {"token": "A", "logprob": -0.5, "bytes": [65]}
    assert choice["logprobs"] == {
        "content": [{**scored, "top_logprobs": [scored]}],
        "refusal": None,
    }
    assert choice["token_ids"] == [65]


async def test_a_failure_is_an_error_event_and_done() -> None:
    answer = await posted(
        PATH,
        chat(stream_options={"include_usage": True}),
        fleet=FakeFleet(saying("half", error=no_worker("the worker died"))),
    )
    *chunks, error, done = answer.events
    assert done == "[DONE]"
    assert error["error"]["code"] == "no_worker"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)


async def test_one_failed_choice_ends_the_stream_and_frees_the_others() -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet) as server, trio.open_nursery() as nursery:

        async def speak() -> None:
            first, second = await fleet.nth(0), await fleet.nth(1)
            second.say("going on")
            first.fail(no_worker("gone"))

        nursery.start_soon(speak)
        answer = await server.post(PATH, chat(n=2))
    assert answer.events[-2]["error"]["code"] == "no_worker"
    assert fleet.generations[1].cancelled == [CancelReason.CLIENT_GONE]


async def test_silence_is_filled_with_comments_from_queue_time_on() -> None:
    fleet = FakeFleet(by_hand)
    async with (
        surface(fleet, keep_alive_s=0.02) as server,
        await server.sent(request_bytes_of(chat())) as client,
    ):
        await client.head()
        opening = await client.chunk()
        assert opening.startswith(b"data: ")
        assert [await client.chunk() for _ in range(2)] == [b": keep-alive\n\n"] * 2
        (await fleet.nth(0)).say("late")
        while (chunk := await client.chunk()) == b": keep-alive\n\n":
            pass
        assert b"late" in chunk


async def test_tokens_that_show_nothing_are_silence() -> None:
    fleet = FakeFleet(by_hand)
    async with (
        surface(fleet, keep_alive_s=0.02) as server,
        await server.connect() as client,
        trio.open_nursery() as nursery,
    ):
        await client.send(request_bytes_of(chat()))
        await client.head()
        await client.chunk()
        generation = await fleet.nth(0)

        async def say_nothing() -> None:
            while True:
                generation.push(Delta("", (1,)))
                await trio.lowlevel.checkpoint()

        nursery.start_soon(say_nothing)
        with trio.fail_after(PATIENCE_S):
            assert await client.chunk() == b": keep-alive\n\n"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("phase", ["queued", "streaming"])
@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("is_half_close", [True, False])
async def test_a_client_that_leaves_cancels(
    phase: str, is_streamed: bool, is_half_close: bool
) -> None:
    fleet = FakeFleet(by_hand)
    async with (
        surface(fleet) as server,
        await server.sent(request_bytes_of(chat(stream=is_streamed))) as client,
    ):
        generation = await fleet.nth(0)
        if phase == "streaming":
            generation.say("some")
            if is_streamed:
                await client.until(b"some")
        if is_half_close:
            await client.stream.send_eof()
        else:
            await client.stream.aclose()
        await generation.cancellations()
    assert generation.cancelled == [CancelReason.CLIENT_GONE]


async def test_a_client_that_leaves_after_stray_bytes_cancels() -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet) as server:
        async with await server.sent(request_bytes_of(chat(stream=False)) + b"\r\nstray"):
            generation = await fleet.nth(0)
        await generation.cancellations()


async def test_what_is_there_together_is_written_together() -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet) as server, await server.sent(request_bytes_of(chat())) as client:
        generation = await fleet.nth(0)
        await client.head()
        await client.chunk()
        generation.say("a", "b")
        generation.finish()
        last = await client.chunk()
        assert last.count(b"data: ") == 4
        assert last.endswith(b"data: [DONE]\n\n")
        assert await client.chunk() == b""

"""Tests of OpenAI's official Python client against the server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import trio
import trio.testing

from server.contract.generation import CancelReason, FinishReason
from tests.lazily import lazily
from tests.server.support.fakes import FakeFleet, by_hand, saying
from tests.server.support.surface import MODEL, surface
from triolet.errors import deadline_exceeded, no_worker, overloaded

if TYPE_CHECKING:
    from collections.abc import Callable

    import openai
    from openai.lib import responses_websocket
    from openai.types.chat import ChatCompletionMessageParam

    from tests.server.support.surface import Surface
    from triolet.errors import RequestError
else:
    openai = lazily("openai")
    responses_websocket = lazily("openai.lib.responses_websocket")

T = TypeVar("T")
# The client opens its WebSocket in a way that the websockets library has deprecated.
over_websocket = pytest.mark.filterwarnings("ignore:connect.. must be used:DeprecationWarning")
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


async def with_client(server: Surface, use: Callable[[openai.OpenAI], T]) -> T:
    """Run the synchronous client in a thread."""

    def work() -> T:
        # No TLS context: loading its certificates takes longer than a test.
        with openai.OpenAI(
            api_key="none",
            base_url=f"{server.url}/v1",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(verify=False),
        ) as client:
            return use(client)

    return await trio.to_thread.run_sync(work)


async def test_it_gets_a_whole_answer() -> None:
    async with surface() as server:
        answer = await with_client(
            server, lambda client: client.chat.completions.create(model=MODEL, messages=HI)
        )
    assert answer.choices[0].message.content == "Hello there"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("Hello there")
    assert answer._request_id


async def test_it_streams() -> None:
    def use(client: openai.OpenAI) -> tuple[str, list[Any]]:
        with client.chat.completions.create(
            model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
        ) as stream:
            chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        return text, chunks

    async with surface() as server:
        text, chunks = await with_client(server, use)
    assert text == "Hello there"
    assert chunks[-1].usage.total_tokens > 0
    assert chunks[-2].choices[0].finish_reason == "stop"


async def test_its_stream_helper_puts_the_answer_together() -> None:
    def use(client: openai.OpenAI) -> str | None:
        with client.chat.completions.stream(model=MODEL, messages=HI) as stream:
            return stream.get_final_completion().choices[0].message.content

    async with surface() as server:
        assert await with_client(server, use) == "Hello there"


async def test_it_completes_prompts() -> None:
    async with surface() as server:
        answer = await with_client(
            server,
            lambda client: client.completions.create(
                model=MODEL, prompt=["one", "two"], n=2, echo=True, max_tokens=9
            ),
        )
    assert [choice.text for choice in answer.choices] == [
        "oneHello there",
        "oneHello there",
        "twoHello there",
        "twoHello there",
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 6


async def test_it_lists_models() -> None:
    async with surface() as server:
        models = await with_client(server, lambda client: list(client.models.list()))
        one = await with_client(server, lambda client: client.models.retrieve(MODEL))
        with pytest.raises(openai.NotFoundError) as caught:
            await with_client(server, lambda client: client.models.retrieve("other/model"))
    assert [model.id for model in models] == [MODEL]
    assert one.id == MODEL
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("arguments", "kind", "code", "param"),
    [
        ({"model": "nobody"}, "NotFoundError", "model_not_found", "model"),
        ({"temperature": 9}, "BadRequestError", "invalid_request_error", "temperature"),
        ({"messages": []}, "BadRequestError", "invalid_request_error", "messages"),
        ({"max_tokens": 5000}, "BadRequestError", "context_length_exceeded", "messages"),
        (
            {"modalities": ["audio"]},
            "BadRequestError",
            "unsupported_parameter",
            "modalities",
        ),
    ],
)
async def test_it_gets_typed_errors(
    arguments: dict[str, Any], kind: str, code: str, param: str
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HI, **arguments}
    async with surface() as server:
        with pytest.raises(getattr(openai, kind)) as caught:
            await with_client(server, lambda client: client.chat.completions.create(**asked))
    assert caught.value.code == code
    assert caught.value.param == param
    assert caught.value.request_id


@pytest.mark.parametrize(
    ("error", "status"), [(no_worker("none"), 503), (deadline_exceeded("late"), 504)]
)
async def test_a_failure_of_a_whole_answer_is_a_typed_error(
    error: RequestError, status: int
) -> None:
    async with surface(FakeFleet(saying("half", error=error))) as server:
        with pytest.raises(openai.InternalServerError) as caught:
            await with_client(
                server, lambda client: client.chat.completions.create(model=MODEL, messages=HI)
            )
    assert caught.value.status_code == status


async def test_a_failure_in_a_stream_raises() -> None:
    async with surface(FakeFleet(saying("half", error=no_worker("the worker died")))) as server:
        with pytest.raises(openai.APIError, match="the worker died"):
            await with_client(
                server,
                lambda client: list(
                    client.chat.completions.create(model=MODEL, messages=HI, stream=True)
                ),
            )


async def test_it_retries_what_is_refused_for_now() -> None:
    fleet = FakeFleet()
    fleet.refuse_with = overloaded("busy", 0.01)

    def use(client: openai.OpenAI) -> str | None:
        answer = client.with_options(max_retries=2).chat.completions.create(
            model=MODEL, messages=HI
        )
        return answer.choices[0].message.content

    async with surface(fleet) as server, trio.open_nursery() as nursery:

        async def recover() -> None:
            while fleet.refusals == 0:
                await trio.testing.wait_all_tasks_blocked()
            fleet.refuse_with = None

        nursery.start_soon(recover)
        assert await with_client(server, use) == "Hello there"


async def test_closing_its_stream_cancels() -> None:
    fleet = FakeFleet(by_hand)

    def use(client: openai.OpenAI) -> None:
        with client.chat.completions.create(model=MODEL, messages=HI, stream=True) as stream:
            next(stream)

    async with surface(fleet) as server:
        await with_client(server, use)
        await (await fleet.nth(0)).cancellations()
    assert fleet.generations[0].cancelled == [CancelReason.CLIENT_GONE]


@pytest.mark.slow
async def test_the_asynchronous_client_streams_side_by_side() -> None:
    async def ask(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def use(url: str) -> list[str]:
        async with openai.AsyncOpenAI(
            api_key="none",
            base_url=f"{url}/v1",
            http_client=openai.DefaultAsyncHttpxClient(verify=False),
        ) as client:
            return await asyncio.gather(*(ask(client) for _ in range(20)))

    async with surface() as server:
        texts = await trio.to_thread.run_sync(lambda: asyncio.run(use(server.url)))
    assert texts == ["Hello there"] * 20


@over_websocket
async def test_it_chats_over_a_websocket() -> None:
    def use(client: openai.OpenAI) -> tuple[list[str], list[str]]:
        with client.responses.connect() as connection:
            kinds: list[str] = []
            texts: list[str] = []
            for turn in ("one", "two"):
                connection.response.create(model=MODEL, input=turn)
                for event in connection:
                    kinds.append(event.type)
                    if event.type == "response.completed":
                        texts.append(event.response.output_text)
                        break
            return kinds, texts

    async with surface() as server:
        kinds, texts = await with_client(server, use)
    assert texts == ["Hello there", "Hello there"]
    turn = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert kinds == turn * 2


@over_websocket
async def test_its_websocket_errors_are_events() -> None:
    def use(client: openai.OpenAI) -> tuple[int | None, str | None]:
        with client.responses.connect() as connection:
            connection.response.create(model="nobody", input="hi")
            event = connection.recv()
            assert event.type == "error"
            return event.status, event.error.code

    async with surface() as server:
        assert await with_client(server, use) == (404, "model_not_found")


@over_websocket
async def test_its_sessions_put_lanes_together() -> None:
    fleet = FakeFleet(by_hand)

    def use(client: openai.OpenAI) -> tuple[str, str]:
        limits = responses_websocket.ResponsesWebSocketLimits(
            max_lanes=4,
            max_events_per_lane=64,
            max_events=128,
            max_bytes_per_lane=1 << 20,
            max_bytes=1 << 21,
        )
        with (
            client.responses.connect() as connection,
            responses_websocket.ResponsesWebSocketSession(connection, limits=limits) as session,
        ):
            lanes = [session.lane("a"), session.lane("b")]
            for lane in lanes:
                lane.send({"type": "response.create", "model": MODEL, "input": "hi"})
            first, second = (lane.get_final_response() for lane in lanes)
            return first.output_text, second.output_text

    async def speak() -> None:
        first, second = await fleet.nth(0), await fleet.nth(1)
        second.say("second")
        second.finish()
        first.say("first")
        first.finish(FinishReason.LENGTH)

    async with surface(fleet) as server, trio.open_nursery() as nursery:
        nursery.start_soon(speak)
        texts = await with_client(server, use)
    assert sorted(texts) == ["first", "second"]

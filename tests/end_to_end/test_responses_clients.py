"""Tests of the Responses API with OpenAI's official client and LangChain against a real fleet.

The client checks every object strictly against its types.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.lazily import lazily

from .test_anthropic_client import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import langchain_openai
    import openai
    from openai.types.responses import Response
    from openai.types.responses.responses_server_event import ResponsesServerEvent

    from .fleet_process import FleetProcess
else:
    openai = lazily("openai")
    langchain_openai = lazily("langchain_openai")

pytestmark = [
    pytest.mark.slow,
    # The client uses a deprecated call of websockets.
    pytest.mark.filterwarnings("ignore:connect\\(\\) must be used:DeprecationWarning"),
]

ASKED: dict[str, Any] = {
    "model": "demo",
    "input": "Hello!",
    "temperature": 0,
    "max_output_tokens": 30,
}


def strictly(fleet: FleetProcess) -> dict[str, Any]:
    return {
        "base_url": f"{fleet.url}/v1",
        "api_key": "none",
        "max_retries": 0,
        "_strict_response_validation": True,
    }


@pytest.fixture
def client(fleet: FleetProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(**strictly(fleet)) as opened:
        yield opened


def test_pieces_and_helper_and_whole_answer_are_the_same(client: openai.OpenAI) -> None:
    whole: Response = client.responses.create(**ASKED)
    events = list(client.responses.create(**ASKED, stream=True))
    with client.responses.stream(**ASKED) as stream:
        final = stream.get_final_response()
    pieces = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert whole.output_text
    assert pieces == final.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type in {"response.completed", "response.incomplete"}
    assert whole.usage is not None
    assert final.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.output_tokens_details.reasoning_tokens == 0


def test_parameters_are_applied_and_shown(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="demo",
        instructions="You tell stories.",
        input=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "Tell me a story."}]},
        ],
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.9,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        metadata={"trip": "to the moon"},
        store=False,
        extra_body={"seed": 7, "ignore_eos": True, "cache_salt": "parameters"},
    )
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.9, 5)
    assert response.metadata == {"trip": "to the moon"}
    assert response.usage is not None
    assert response.usage.output_tokens == 5
    (message,) = response.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert len(part.logprobs or ()) == 5
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs or ())


def test_warming_leaves_the_prompt_for_whoever_asks_next(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "input": "Tell me a story about a fox named Mia on the moon. " * 3,
        "max_output_tokens": 1,
        "extra_body": {"cache_salt": "warmed by this test"},
    }
    warmed = client.responses.create(**asked, prompt_cache_options={"prewarm": True})
    after = client.responses.create(**asked)
    assert warmed.output == []
    assert warmed.usage is not None
    assert warmed.usage.input_tokens_details.cached_tokens == 0
    assert after.usage is not None
    assert after.usage.input_tokens_details.cached_tokens > 0
    assert after.usage.input_tokens == warmed.usage.input_tokens


def test_text_follows_the_type_that_it_is_parsed_into(client: openai.OpenAI) -> None:
    asked = {**ASKED, "input": "Which colour?", "max_output_tokens": 60}
    response = client.responses.parse(**asked, text_format=Verdict)
    assert isinstance(response.output_parsed, Verdict)
    with client.responses.stream(**asked, text_format=Verdict) as stream:
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Verdict)


@pytest.mark.promise
def test_a_tool_is_called_and_its_result_is_taken(client: openai.OpenAI) -> None:
    tool: Any = {
        "type": "function",
        "name": "paint",
        "description": "Paint the wall.",
        "parameters": Verdict.model_json_schema(),
        "strict": True,
    }
    asked = {**ASKED, "max_output_tokens": 200, "tools": [tool], "tool_choice": "required"}
    first = client.responses.create(**asked, parallel_tool_calls=False)
    (called,) = first.output
    assert called.type == "function_call"
    assert Verdict.model_validate_json(called.arguments)
    with client.responses.stream(**asked, parallel_tool_calls=False) as stream:
        pieces = "".join(
            e.delta for e in stream if e.type == "response.function_call_arguments.delta"
        )
    assert pieces == called.arguments
    history: list[Any] = [{"role": "user", "content": "Hello!"}, called.model_dump()]
    history.append({"type": "function_call_output", "call_id": called.call_id, "output": "ok"})
    # The demo model's template has no tools, so tool calls need a grammar.
    answered = {**ASKED, "input": history, "tools": [tool], "tool_choice": "none"}
    second = client.responses.create(**answered)
    assert second.output


def test_what_is_counted_is_what_an_answer_is_made_from(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "input": "Hello!", "instructions": "Be kind."}
    counted = client.responses.input_tokens.count(**asked)
    answer = client.responses.create(**asked, max_output_tokens=1)
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_tokens.count(**asked, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


def test_a_websocket_takes_what_came_of_a_call(client: openai.OpenAI) -> None:
    tool: Any = {
        "type": "function",
        "name": "paint",
        "parameters": Verdict.model_json_schema(),
        "strict": True,
    }
    with client.responses.connect() as connection:

        def answer() -> Response:
            for event in connection:
                assert event.type not in {"error", "response.failed"}
                if event.type in {"response.completed", "response.incomplete"}:
                    return event.response
            raise AssertionError("the connection ended before the answer")

        asked = {**ASKED, "max_output_tokens": 200, "tools": [tool]}
        connection.response.create(**asked, tool_choice="required", parallel_tool_calls=False)
        first = answer()
        (called,) = first.output
        assert called.type == "function_call"
        assert Verdict.model_validate_json(called.arguments)
        result: Any = {
            "type": "function_call_output",
            "call_id": called.call_id,
            "output": "It is painted.",
        }
        asked["input"] = [result]
        connection.response.create(**asked, previous_response_id=first.id, tool_choice="none")
        second = answer()
    history: list[Any] = [{"role": "user", "content": "Hello!"}, called.model_dump(), result]
    whole = client.responses.create(**{**asked, "input": history}, tool_choice="none")
    assert second.output_text
    assert second.output_text == whole.output_text
    assert whole.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens == whole.usage.input_tokens


@pytest.mark.parametrize(
    ("change", "kind", "param"),
    [
        ({"model": "gpt-9"}, "NotFoundError", "model"),
        ({"temperature": 9}, "BadRequestError", "temperature"),
        ({"previous_response_id": "resp_1"}, "BadRequestError", "previous_response_id"),
        ({"store": True}, "BadRequestError", "store"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "NotFoundError", "input.0.id"),
        ({"input": "dragon " * 3000}, "BadRequestError", "input"),
    ],
)
def test_errors_arrive_as_their_types(
    client: openai.OpenAI, change: dict[str, Any], kind: str, param: str
) -> None:
    with pytest.raises(getattr(openai, kind)) as caught:
        client.responses.create(**{**ASKED, **change})
    assert caught.value.param == param
    assert caught.value.request_id


def test_stored_responses_are_shown_listed_continued_and_deleted(
    start_fleet: Callable[..., FleetProcess],
) -> None:
    fleet = start_fleet("--responses-ttl", "3600")
    question: Any = [{"role": "user", "content": "Tell me a story."}]
    more: Any = [{"role": "user", "content": "And then?"}]
    with openai.OpenAI(**strictly(fleet)) as client:
        first = client.responses.create(**{**ASKED, "input": question})
        shown = client.responses.retrieve(first.id)
        assert shown.to_json() == first.to_json()
        (item,) = client.responses.input_items.list(first.id).data
        assert (item.type, item.id[:5]) == ("message", "item_")
        asked = {**ASKED, "input": more}
        chained = client.responses.create(**asked, previous_response_id=first.id)
        with client.responses.stream(**asked, previous_response_id=first.id) as stream:
            streamed = stream.get_final_response()
        said: Any = first.output[0].model_dump()
        whole = client.responses.create(**{**ASKED, "input": [*question, said, *more]})
        reference: Any = {"type": "item_reference", "id": first.output[0].id}
        referred = client.responses.create(**{**ASKED, "input": [*question, reference, *more]})
        counted = client.responses.input_tokens.count(
            model="demo", input=more, previous_response_id=first.id
        )
        texts = {answer.output_text for answer in (chained, streamed, whole, referred)}
        assert len(texts) == 1
        assert whole.usage is not None
        assert counted.input_tokens == whole.usage.input_tokens
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**asked, previous_response_id=first.id)
        assert caught.value.code == "previous_response_not_found"
        assert client.responses.retrieve(streamed.id).output_text == streamed.output_text


def test_the_asynchronous_client_streams_side_by_side(fleet: FleetProcess) -> None:
    async def ask(client: openai.AsyncOpenAI) -> str:
        async with client.responses.stream(**ASKED) as stream:
            pieces = [e.delta async for e in stream if e.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert "".join(pieces) == final.output_text
        return final.output_text

    async def use() -> list[str]:
        async with openai.AsyncOpenAI(**strictly(fleet)) as client:
            return await asyncio.gather(*(ask(client) for _ in range(4)))

    assert len(set(asyncio.run(use()))) == 1


def test_a_websocket_warms_continues_and_names_errors(client: openai.OpenAI) -> None:
    with client.responses.connect() as connection:

        def until_the_end() -> list[ResponsesServerEvent]:
            events: list[ResponsesServerEvent] = []
            for event in connection:
                events.append(event)
                if event.type in {"response.completed", "response.incomplete", "error"}:
                    break
            return events

        connection.response.create(**ASKED, stream_id="a", generate=False)
        warmed = until_the_end()[-1]
        assert warmed.type == "response.completed"
        assert (warmed.stream_id, warmed.response.output) == ("a", [])
        connection.response.create(
            model="demo",
            input="And then?",
            previous_response_id=warmed.response.id,
            stream_id="b",
            temperature=0,
            max_output_tokens=20,
        )
        events = until_the_end()
        last = events[-1]
        assert last.type in {"response.completed", "response.incomplete"}
        assert {event.stream_id for event in events} == {"b"}
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert text == last.response.output_text
        connection.response.create(model="demo", input="x", previous_response_id="resp_unknown")
        (error,) = until_the_end()
        assert error.type == "error"
        assert (error.status, error.error.code) == (400, "previous_response_not_found")
        assert error.error.param == "previous_response_id"


def test_the_asynchronous_client_uses_a_websocket(fleet: FleetProcess) -> None:
    async def use() -> str:
        async with (
            openai.AsyncOpenAI(**strictly(fleet)) as client,
            client.responses.connect() as connection,
        ):
            await connection.response.create(**ASKED)
            async for event in connection:
                if event.type in {"response.completed", "response.incomplete"}:
                    return event.response.output_text
        raise AssertionError("the connection ended before the answer")

    assert asyncio.run(use())


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def langchain(
    fleet: FleetProcess, request: pytest.FixtureRequest
) -> Iterator[langchain_openai.ChatOpenAI]:
    # Pass a client, because its own connections would outlive the test.
    with openai.DefaultHttpxClient() as connections:
        yield langchain_openai.ChatOpenAI(
            base_url=f"{fleet.url}/v1",
            api_key="none",  # type: ignore[arg-type]
            model="demo",
            temperature=0,
            max_completion_tokens=60,
            max_retries=0,
            use_responses_api=request.param,
            http_client=connections,
        )


def test_langchain_asks_and_streams(langchain: langchain_openai.ChatOpenAI) -> None:
    whole = langchain.invoke("Hello!")
    chunks = list(langchain.stream("Hello!"))
    assert whole.text
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] > 0


def test_langchain_gets_objects(langchain: langchain_openai.ChatOpenAI) -> None:
    structured = langchain.with_structured_output(Verdict, method="json_schema")
    assert isinstance(structured.invoke("Which colour?"), Verdict)


def test_langchain_calls_tools(langchain: langchain_openai.ChatOpenAI) -> None:
    # Force the tool call, because the demo model was not trained on tools.
    bound = langchain.bind_tools([Verdict], tool_choice="Verdict", strict=True)
    whole = bound.invoke("Which colour?")
    (called,) = whole.tool_calls
    assert called["name"] == "Verdict"
    assert Verdict.model_validate(called["args"])
    gathered: Any = None
    for chunk in bound.stream("Which colour?"):
        gathered = chunk if gathered is None else gathered + chunk
    assert gathered is not None
    (streamed,) = gathered.tool_calls
    assert streamed["args"] == called["args"]

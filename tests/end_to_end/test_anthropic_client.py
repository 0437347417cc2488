"""Tests of Anthropic's official client against a real fleet, with strict type checks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from tests.lazily import lazily

if TYPE_CHECKING:
    from collections.abc import Iterator

    import anthropic

    from .fleet_process import FleetProcess
else:
    anthropic = lazily("anthropic")

pytestmark = pytest.mark.slow

ASKED: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 40,
    "messages": [{"role": "user", "content": "Hello!"}],
    # The newest client has no argument for it, because Anthropic's models ignore it.
    "extra_body": {"temperature": 0},
}


class Verdict(BaseModel):
    """A short answer."""

    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "green"]
    sure: bool


def strictly(fleet: FleetProcess) -> dict[str, Any]:
    return {
        "base_url": fleet.url,
        "api_key": "none",
        "max_retries": 0,
        "_strict_response_validation": True,
    }


@pytest.fixture
def client(fleet: FleetProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(**strictly(fleet)) as opened:
        yield opened


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_models_are_described_and_listed(client: anthropic.Anthropic) -> None:
    model = client.models.retrieve("demo")
    assert (model.id, model.type, model.display_name) == ("demo", "model", "demo")
    assert [listed.id for listed in client.models.list()] == ["demo"]
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("claude")


@pytest.mark.promise
def test_pieces_and_helper_and_whole_answer_are_the_same(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASKED)
    events = list(client.messages.create(**ASKED, stream=True))
    with client.messages.stream(**ASKED) as stream:
        pieces = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text_of(whole)
    assert pieces == text_of(final) == text_of(whole)
    assert (whole.stop_reason, final.stop_reason) == ("end_turn", "end_turn")
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert [event.type for event in events if event.type != "content_block_delta"] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert whole._request_id


def test_a_stop_sequence_ends_the_text_and_is_named(client: anthropic.Anthropic) -> None:
    whole = text_of(client.messages.create(**ASKED))
    word = whole.split()[1]
    cut = client.messages.create(**ASKED, stop_sequences=[word])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", word)
    assert text_of(cut) == whole[: whole.index(word)]


def test_parameters_are_applied(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "max_tokens": 12,
        "system": [{"type": "text", "text": "You tell stories."}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Tell one."}]}],
        "metadata": {"user_id": "ignored"},
        "extra_body": {
            "temperature": 1.0,
            "top_p": 0.9,
            "top_k": 20,
            "seed": 3,
            "ignore_eos": True,
        },
    }
    first, second = (client.messages.create(**asked) for _ in range(2))
    assert text_of(first) == text_of(second)
    assert first.stop_reason == "max_tokens"
    assert first.usage.output_tokens == 12


def test_what_is_counted_is_what_is_sent_and_warming_caches_it(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "system": "You tell stories.",
        "messages": [{"role": "user", "content": "A story about a fox named Mia. " * 4}],
    }
    counted = client.messages.count_tokens(**asked)
    salted = {**asked, "extra_body": {"cache_salt": "warmed by Anthropic's client"}}
    warmed = client.messages.create(**salted, max_tokens=0)
    after = client.messages.create(**salted, max_tokens=1)
    assert warmed.content == []
    assert warmed.usage.output_tokens == 0
    assert warmed.usage.input_tokens == counted.input_tokens
    assert after.usage.cache_read_input_tokens
    assert after.usage.input_tokens + after.usage.cache_read_input_tokens == counted.input_tokens


def test_output_follows_the_type_that_it_is_parsed_into(client: anthropic.Anthropic) -> None:
    parsed = client.messages.parse(**{**ASKED, "max_tokens": 60}, output_format=Verdict)
    assert isinstance(parsed.parsed_output, Verdict)


def test_a_tool_is_called_and_its_result_is_taken(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        **ASKED,
        "max_tokens": 80,
        "tools": [{"name": "paint", "input_schema": Verdict.model_json_schema()}],
    }
    forced = {**asked, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    first = client.messages.create(**forced)
    (used,) = first.content
    assert used.type == "tool_use"
    assert first.stop_reason == "tool_use"
    assert Verdict.model_validate(used.input)
    with client.messages.stream(**forced) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use"
    assert streamed.input == used.input
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "ok"}
    turns = [*ASKED["messages"], first.to_param(), {"role": "user", "content": [result]}]
    # The demo model's template has no tools, so tool calls need a grammar.
    answered = {**asked, "messages": turns, "tool_choice": {"type": "none"}}
    assert client.messages.create(**answered).usage.output_tokens


@pytest.mark.parametrize(
    ("change", "kind", "named"),
    [
        ({"model": "claude"}, "NotFoundError", "not_found_error"),
        ({"extra_body": {"temperature": 9}}, "BadRequestError", "invalid_request_error"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "BadRequestError",
            "invalid_request_error",
        ),
        (
            {"messages": [{"role": "user", "content": "dragon " * 3000}]},
            "BadRequestError",
            "invalid_request_error",
        ),
    ],
)
def test_errors_arrive_as_their_types(
    client: anthropic.Anthropic,
    change: dict[str, Any],
    kind: str,
    named: str,
) -> None:
    with pytest.raises(getattr(anthropic, kind)) as caught:
        client.messages.create(**{**ASKED, **change})
    assert caught.value.type == named
    assert caught.value.request_id


def test_the_asynchronous_client_streams_side_by_side(fleet: FleetProcess) -> None:
    async def ask(client: anthropic.AsyncAnthropic) -> str:
        async with client.messages.stream(**ASKED) as stream:
            pieces = [piece async for piece in stream.text_stream]
            assert "".join(pieces) == text_of(await stream.get_final_message())
        return "".join(pieces)

    async def use() -> list[str]:
        async with anthropic.AsyncAnthropic(**strictly(fleet)) as client:
            whole = await client.messages.create(**ASKED)
            return [text_of(whole), *await asyncio.gather(*(ask(client) for _ in range(4)))]

    assert len(set(asyncio.run(use()))) == 1

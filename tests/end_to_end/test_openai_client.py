"""Tests of OpenAI's official client against a real fleet, over HTTP and WebSocket."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import httpx2 as httpx
import pytest

from tests.lazily import lazily

from .fleet_process import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import openai
    from openai.types.chat import ChatCompletionMessageParam

    from .fleet_process import FleetProcess
else:
    openai = lazily("openai")

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello!"}]


@pytest.fixture
def client(fleet: FleetProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.mark.promise
def test_it_streams_and_the_pieces_are_the_answer(client: openai.OpenAI) -> None:
    options = {"model": "demo", "messages": HELLO, "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )  # type: ignore[call-overload]
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert usage is not None
    # The second time the prompt's KV is cached.
    assert usage.model_copy(update={"prompt_tokens_details": None}) == whole.usage.model_copy(
        update={"prompt_tokens_details": None}
    )


def test_the_next_turn_of_a_chat_is_not_computed_from_its_beginning(client: openai.OpenAI) -> None:
    turns: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": "Tell me a story about a fox named Mia on the moon. " * 3}
    ]
    cached = []
    for question in ("And what happened then?", "How did it end?", None):
        answer = client.chat.completions.create(
            model="demo",
            messages=turns,
            temperature=0,
            max_tokens=30,
            extra_body={"cache_salt": "a chat of this test"},
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        turns += [{"role": "assistant", "content": answer.choices[0].message.content}]
        turns += [{"role": "user", "content": question or ""}]
    assert cached[0] == 0
    assert 0 < cached[1] < cached[2]


def test_plain_completions_stream_too(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="demo", prompt="Once upon a time", max_tokens=10, stream=True, temperature=0
    )
    whole = client.completions.create(
        model="demo", prompt="Once upon a time", max_tokens=10, temperature=0
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_several_choices_differ_and_repeat_with_their_seed(client: openai.OpenAI) -> None:
    first, second = (
        client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Tell me a story."}],
            n=3,
            seed=5,
            max_tokens=30,
        )
        for _ in range(2)
    )
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) > 1
    assert texts == [choice.message.content for choice in second.choices]


def test_each_of_several_choices_is_what_its_seed_gives_alone(
    client: openai.OpenAI, fleet: FleetProcess
) -> None:
    question = "Tell me a story about a lighthouse and its keeper, please."
    options = {
        "model": "demo",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 24,
        "extra_body": {"cache_salt": "several choices"},
    }
    forks = fleet.metric("triolet_prompts_routed_total", role="decode", why="fork")
    together = client.chat.completions.create(**options, n=8, seed=77)  # type: ignore[call-overload]
    assert fleet.metric("triolet_prompts_routed_total", role="decode", why="fork") == forks + 7
    alone = [
        client.chat.completions.create(**options, seed=77 + index).choices[0]  # type: ignore[call-overload]
        for index in range(8)
    ]
    told = [(c.message.content, c.finish_reason) for c in together.choices]
    assert told == [(c.message.content, c.finish_reason) for c in alone]
    assert together.usage.prompt_tokens < together.usage.completion_tokens


def test_it_lists_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


def test_errors_arrive_as_their_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model") as missing:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="demo", messages=HELLO, temperature=9)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="demo", prompt="dragon " * 3000)
    assert too_long.value.code == "context_length_exceeded"
    assert too_long.value.request_id


@pytest.mark.promise
def test_closing_a_stream_frees_its_blocks(client: openai.OpenAI, fleet: FleetProcess) -> None:
    gone = fleet.metric("triolet_requests_total", outcome="client_gone")
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Tell me a story."}],
        max_tokens=900,
        stream=True,
        # With logprobs the answer exceeds the socket buffers, so it waits for its reader.
        logprobs=True,
        top_logprobs=20,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    wait_until(
        lambda: fleet.metric("triolet_requests_total", outcome="client_gone") == gone + 1,
        PATIENCE_S,
        "the server saw the client leave",
    )
    fleet.wait_all_blocks_free()


@pytest.mark.promise
# The client uses a deprecated call of websockets.
@pytest.mark.filterwarnings("ignore:connect\\(\\) must be used:DeprecationWarning")
def test_it_chats_over_the_websocket(client: openai.OpenAI) -> None:
    with client.responses.connect() as connection:
        for question in ("Hello!", "What is 2 + 3?"):
            connection.response.create(model="demo", input=question, max_output_tokens=40)
            text, last = "", None
            for event in connection:
                if event.type == "response.output_text.delta":
                    text += event.delta
                last = event
                if event.type in {"response.completed", "response.incomplete", "error"}:
                    break
            assert last is not None
            assert last.type in {"response.completed", "response.incomplete"}
            assert text
            assert last.response.output_text == text


@pytest.mark.promise
def test_a_stream_cut_at_twenty_places_and_resumed_has_the_same_bytes(
    fleet: FleetProcess,
) -> None:
    body = {"messages": HELLO, "max_tokens": 60, "ignore_eos": True, "stream": True, "n": 2}
    headers = {"idempotency-key": "cut-at-twenty-places"}
    rng = random.Random(8)
    pieces: list[bytes] = []
    with httpx.Client(base_url=fleet.url, timeout=PATIENCE_S) as http:
        for cut in [*(rng.randint(1, 400) for _ in range(20)), None]:
            last = {"last-event-id": str(len(pieces) - 1)} if pieces else {}
            with http.stream("POST", CHAT, json=body, headers=headers | last) as answer:
                assert answer.status_code == 200, answer.read()
                pieces += whole_events(answer, cut)
        uncut = http.post(CHAT, json=body, headers=headers)
    assert b"".join(pieces) == uncut.content
    assert uncut.content.endswith(b"data: [DONE]\n\n")
    assert uncut.headers["idempotency-replayed"] == "true"


def whole_events(answer: httpx.Response, num_bytes: int | None) -> list[bytes]:
    """Read a stream to its end or up to a number of bytes; return the complete events."""
    data = b""
    for part in answer.iter_raw():
        data += part
        if num_bytes is not None and len(data) >= num_bytes:
            data = data[:num_bytes]
            break
    *events, _ = data.split(b"\n\n")
    return [event + b"\n\n" for event in events if not event.startswith(b":")]


def test_the_end_of_a_message_is_where_it_goes_on(client: openai.OpenAI) -> None:
    turns: list[ChatCompletionMessageParam] = [
        *HELLO,
        {"role": "assistant", "content": "Once upon a time"},
    ]
    told = client.chat.completions.create(
        model="demo",
        messages=turns,
        temperature=0,
        max_tokens=12,
        extra_body={"continue_final_message": True},
    )
    alone = client.chat.completions.create(
        model="demo", messages=turns, temperature=0, max_tokens=12
    )
    assert told.usage is not None
    assert alone.usage is not None
    assert told.usage.prompt_tokens < alone.usage.prompt_tokens

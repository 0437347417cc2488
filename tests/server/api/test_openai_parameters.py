"""Tests of every parameter of chat and plain completions, sent with OpenAI's official client:
applied, ignored or refused."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
import trio

from server.api.schemas import IGNORED as ignored_names
from server.api.schemas import ChatRequest, CompletionRequest
from tests.lazily import lazily
from tests.server.support.fakes import FakeFleet
from tests.server.support.surface import MODEL, surface
from triolet.sampling import MAX_SEED, Grammar, GrammarKind
from triolet.service_class import Scheduling, ServiceClass

if TYPE_CHECKING:
    import openai
    from pydantic import BaseModel

    from server.contract.generation import GenerationRequest
else:
    openai = lazily("openai")

pytestmark = pytest.mark.slow

HI: Any = [{"role": "user", "content": "hi"}]
CONTINUED: Any = [*HI, {"role": "assistant", "content": "He"}]

SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
OF_SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA | {"additionalProperties": False}))
OF_REGEX = Grammar(GrammarKind.REGEX, "a+")
OF_LARK = Grammar(GrammarKind.LARK, 'start: "a"')
TOOLS: Any = [{"type": "function", "function": {"name": "weather"}}]
SHOWN_TOOLS = {"prompt_ids": tuple(b"tool weather\nuser: hi\nassistant:")}

SHARED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_tokens": 9}, {"max_tokens": 9}),
    ({"temperature": 0.5}, {"temperature": 0.5}),
    ({"top_p": 0.5}, {"top_p": 0.5}),
    ({"top_k": 5}, {"top_k": 5}),
    ({"min_p": 0.5}, {"min_p": 0.5}),
    ({"seed": -1}, {"seed": MAX_SEED}),
    ({"stop": "x"}, {"stop": ("x",)}),
    ({"stop": ["x", "yy"]}, {"stop": ("x", "yy")}),
    ({"stop_token_ids": [7]}, {"stop_token_ids": (7,)}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"min_tokens": 3}, {"min_tokens": 3}),
    ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
    ({"frequency_penalty": -1.5}, {"frequency_penalty": -1.5}),
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"logit_bias": {"65": -3}}, {"logit_bias": ((65, -3.0),)}),
    ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
    ({"include_stop_str_in_output": True}, {"include_stop": True}),
    ({"priority": -4}, {"priority": -4}),
    ({"service_tier": "flex"}, {"scheduling": Scheduling(service_class=ServiceClass.SHEDDABLE)}),
    ({"response_cache": "allow"}, {}),
    ({"n": 1}, {}),
    ({"return_token_ids": True}, {}),
    ({"cache_salt": "s"}, {}),
    ({"response_format": {"type": "text"}}, {"grammar": None}),
    ({"response_format": {"type": "json_object"}}, {"grammar": ANY_OBJECT}),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
     {"grammar": OF_SCHEMA}),
    ({"structured_outputs": {"json": SCHEMA}}, {"grammar": OF_SCHEMA}),
    ({"structured_outputs": {"regex": "a+"}}, {"grammar": OF_REGEX}),
    ({"structured_outputs": {"choice": ["a"]}}, {"grammar": OF_LARK}),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": OF_LARK}),
    ({"guided_json": SCHEMA}, {"grammar": OF_SCHEMA}),
    ({"guided_regex": "a+"}, {"grammar": OF_REGEX}),
    ({"guided_choice": ["a"]}, {"grammar": OF_LARK}),
    ({"guided_grammar": 'start: "a"'}, {"grammar": OF_LARK}),
]  # fmt: skip
"""Sent values and the resulting sampling parameters; parameters that show elsewhere have their own
tests."""
OF_CHAT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *SHARED,
    ({"max_completion_tokens": 9}, {"max_tokens": 9}),
    ({"logprobs": True}, {"logprobs": 0}),
    ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
    ({"add_generation_prompt": False}, {"prompt_ids": tuple(b"user: hi\n")}),
    (
        {"messages": CONTINUED, "continue_final_message": True},
        {"prompt_ids": tuple(b"user: hi\nassistant: He")},
    ),
    ({"reasoning_effort": "low"}, {"reasoning": None}),
    ({"thinking_token_budget": 9}, {"reasoning": None}),
    ({"tools": TOOLS}, SHOWN_TOOLS),
    ({"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False}, SHOWN_TOOLS),
    (
        {"chat_template_kwargs": {"thinking": True}},
        {"prompt_ids": tuple(b"user: hi\nassistant: thinking")},
    ),
]
OF_COMPLETIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *SHARED,
    ({"logprobs": 4}, {"logprobs": 4}),
    ({"prompt": "abc"}, {"prompt_ids": (97, 98, 99)}),
    ({"prompt": [9, 8]}, {"prompt_ids": (9, 8)}),
    ({"prompt": [[9, 8]]}, {"prompt_ids": (9, 8)}),
    ({"echo": True}, {"prompt_ids": (97, 98, 99)}),
]
WHOLE_AND_STREAMED = {"model", "stream", "stream_options"}
"""Parameters of all calls below, or of a separate call."""
IGNORED: dict[str, Any] = {
    "metadata": {"a": "b"},
    "user": "somebody",
    "safety_identifier": "x",
    "verbosity": "low",
    "store": False,
    "prompt_cache_key": "k",
    "prompt_cache_options": {},
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "low"},
}
REFUSED: dict[str, Any] = {
    "n": 9,
    "audio": {"voice": "alloy", "format": "wav"},
    "modalities": ["audio"],
    "prediction": {"type": "content", "content": "x"},
    "store": True,
    "chat_template": "{{ messages }}",
    "prompt_logprobs": 1,
    "use_beam_search": True,
    "best_of": 2,
    "seed": 2**200,
    "stop": ["x"] * 17,
    "temperature": 3,
    "top_p": 0,
    "logit_bias": {"999999": 1},
    "min_tokens": True,
    "cache_salt": "",
}


LOOSE = {"_strict_response_validation": False}


def options(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the client's arguments; parameters without one go into `extra_body`."""
    own = {"messages", "prompt", "stream", "stream_options"}
    return {
        "model": MODEL,
        **{name: value for name, value in fields.items() if name in own},
        "extra_body": {name: value for name, value in fields.items() if name not in own},
    }


def strict(url: str) -> openai.OpenAI:
    """Return a client with strict response types. For streamed plain completions they require a
    finish_reason in each chunk, which no server sends."""
    return openai.OpenAI(
        api_key="none",
        base_url=f"{url}/v1",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(verify=False),
        _strict_response_validation=True,
    )


def seen(request: GenerationRequest, names: dict[str, Any]) -> dict[str, Any]:
    return {
        name: getattr(request if hasattr(request, name) else request.sampling, name)
        for name in names
    }


@pytest.mark.parametrize(
    ("kind", "table"), [(ChatRequest, OF_CHAT), (CompletionRequest, OF_COMPLETIONS)]
)
def test_the_tables_have_every_parameter(
    kind: type[BaseModel], table: list[tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    sent = {name for fields, _ in table for name in fields}
    assert set(kind.model_fields) - sent - {"messages"} == WHOLE_AND_STREAMED
    assert ignored_names - set(ChatRequest.model_fields) <= IGNORED.keys()


@pytest.mark.parametrize("is_chat", [True, False])
async def test_every_parameter_is_applied_and_answered_in_its_form(is_chat: bool) -> None:
    table = OF_CHAT if is_chat else OF_COMPLETIONS
    usual = {"messages": HI} if is_chat else {"prompt": "abc"}

    def use(client: openai.OpenAI) -> None:
        create: Any = client.chat.completions.create if is_chat else client.completions.create
        for sent, _ in table:
            assert create(**options(usual | sent)).choices[0].finish_reason == "stop"
            loose: Any = client if is_chat else client.copy(_extra_kwargs=LOOSE)
            stream = (loose.chat.completions if is_chat else loose.completions).create(
                **options(usual | sent | {"stream": True})
            )
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "stop"

    async with surface(FakeFleet()) as server:
        with strict(server.url) as client:
            await trio.to_thread.run_sync(use, client)
        requests = [generation.request for generation in server.fleet.generations]
    assert len(requests) == 2 * len(table)
    for index, (_, wanted) in enumerate(table):
        for request in requests[2 * index : 2 * index + 2]:
            assert seen(request, wanted) == wanted


async def test_what_changes_nothing_is_ignored_and_what_is_not_served_refused_by_name() -> None:
    def use(client: openai.OpenAI) -> None:
        for name, value in IGNORED.items():
            client.chat.completions.create(**options({"messages": HI, name: value}))
        for name, value in REFUSED.items():
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(**options({"messages": HI, name: value}))
            assert (refused.value.param or "").split(".")[0] == name, refused.value
        with pytest.raises(openai.BadRequestError) as both:
            client.completions.create(model=MODEL, prompt="x", echo=True, logprobs=1)
        assert both.value.param == "logprobs"

    async with surface(FakeFleet()) as server:
        with strict(server.url) as client:
            await trio.to_thread.run_sync(use, client)
        assert len(server.fleet.generations) == len(IGNORED)


async def test_what_an_answer_tells_beside_its_text() -> None:
    def use(client: openai.OpenAI) -> None:
        chat = client.chat.completions.with_raw_response.create(
            **options({"messages": HI, "logprobs": True, "top_logprobs": 1, "n": 3,
                       "return_token_ids": True, "cache_salt": "s"}),
            extra_headers={"x-request-id": "my-own"},
        )  # fmt: skip
        assert chat.headers["x-request-id"] == "my-own"
        assert int(chat.headers["openai-processing-ms"]) >= 0
        answer = chat.parse()
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        first = answer.choices[0]
        assert "".join(token.token for token in first.logprobs.content) == "Hello there"
        assert bytes(first.token_ids) == b"Hello there"
        plain = client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1, n=2, seed=1)
        assert [choice.index for choice in plain.choices] == [0, 1, 2, 3]
        scores = plain.choices[0].logprobs
        assert scores is not None
        assert scores.text_offset == list(range(len("Hello there")))
        stream = client.chat.completions.create(
            model=MODEL, messages=CONTINUED, stream=True, n=2,
            stream_options={"include_usage": True},
            extra_body={"continue_final_message": True},
        )  # fmt: skip
        *chunks, last = list(stream)
        assert last.choices == []
        assert last.usage is not None
        assert {chunk.choices[0].index for chunk in chunks} == {0, 1}
        ends = [c.choices[0].index for c in chunks if c.choices[0].finish_reason]
        assert sorted(ends) == [0, 1]

    async with surface(FakeFleet()) as server:
        with strict(server.url) as client:
            await trio.to_thread.run_sync(use, client)
        seeds = [generation.request.sampling.seed for generation in server.fleet.generations]
    assert seeds[3:7] == [1, 2, 1, 2]
    assert len(set(seeds[:3])) == 3


async def test_the_asynchronous_client_sends_the_same() -> None:
    async def use(url: str) -> None:
        async with openai.AsyncOpenAI(
            api_key="none",
            base_url=f"{url}/v1",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=False),
            _strict_response_validation=True,
        ) as client:
            for sent, _ in OF_CHAT:
                answer = await client.chat.completions.create(**options({"messages": HI} | sent))
                assert answer.choices[0].finish_reason == "stop"
            loose = client.copy(_extra_kwargs=LOOSE)
            for sent, _ in OF_COMPLETIONS:
                stream = await loose.completions.create(
                    **options({"prompt": "abc", "stream": True} | sent)
                )
                assert [chunk async for chunk in stream]

    async with surface(FakeFleet()) as server:
        await trio.to_thread.run_sync(lambda: asyncio.run(use(server.url)))
        requests = [generation.request for generation in server.fleet.generations]
    for request, (_, wanted) in zip(requests, [*OF_CHAT, *OF_COMPLETIONS], strict=True):
        assert seen(request, wanted) == wanted

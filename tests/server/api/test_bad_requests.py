"""Tests of invalid requests: each gets a 4xx with a JSON error that names the parameter."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from server import app as app  # imports all request models
from server.api.fields import WORDS, StrictFields
from tests.server.support.fakes import MAX_MODEL_LEN, FakeFleet, by_hand
from tests.server.support.surface import MODEL, Surface, posted, surface

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


def user(content: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


WRONG_SAMPLING: list[tuple[str, Any]] = [
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", [1]),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", 1.5),
    ("top_k", -2),
    ("min_p", 2),
    ("presence_penalty", 3),
    ("frequency_penalty", "1"),
    ("repetition_penalty", 0.009),
    ("logit_bias", []),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": True}),
    ("logit_bias", {"256": 1}),
    ("logit_bias", {str(i): 1 for i in range(301)}),
    ("seed", 2**63),
    ("seed", 2**200),
    ("seed", 1.5),
    ("seed", True),
    ("stop", 5),
    ("stop", [""]),
    ("stop", ["a"] * 17),
    ("stop", "x" * 65),
    ("stop", ["a", 1]),
    ("stop_token_ids", "1"),
    ("stop_token_ids", [True]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [256]),
    ("stop_token_ids", [1] * 65),
    ("ignore_eos", "yes"),
    ("ignore_eos", 1),
    ("min_tokens", -1),
    ("n", 0),
    ("n", 9),
    ("n", 10**9),
    ("n", True),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", "9"),
    ("max_tokens", 2**40),
    ("stream", "true"),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),
    ("stream_options", 7),
    ("priority", 101),
    ("skip_special_tokens", 0),
    ("model", 7),
]
WRONG_CHAT: list[tuple[str, Any]] = [
    ("messages", []),
    ("messages", "hi"),
    ("messages.0", [HI]),
    ("messages.0.role", [{"role": "king", "content": "hi"}]),
    ("messages.0.role", [{"content": "hi"}]),
    ("messages.0.content", user(5)),
    ("messages.0.content", user(None)),
    ("messages.0.content", user([{"type": "text"}])),
    ("messages.0.content", user(["hi"])),
    ("messages.0.content", user([{"type": "image_url", "image_url": {"url": "x"}}])),
    ("messages.0.content", user([{"type": "input_audio", "input_audio": {}}])),
    ("messages.0.tool_calls.0.id", [{"role": "assistant", "content": "", "tool_calls": [{}]}]),
    ("messages.0.content", [{"role": "tool", "tool_call_id": "x"}]),
    ("messages.0.tool_calls", [{"role": "user", "content": "1", "tool_calls": CALLS}]),
    ("logprobs", 1),
    ("top_logprobs", 2),
    ("max_completion_tokens", 0),
    ("add_generation_prompt", "no"),
    ("chat_template_kwargs.x", {"x": 1}),
    ("chat_template_kwargs.enable_thinking", {"enable_thinking": "yes"}),
]
WRONG_COMPLETIONS: list[tuple[str, Any]] = [
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", [1, True]),
    ("prompt", [1, -1]),
    ("prompt", [1, 2.5]),
    ("prompt", [256]),
    ("prompt", [["a"]]),
    ("prompt", ["a", 1]),
    ("prompt", {"a": 1}),
    ("prompt", None),
    ("prompt", ["a"] * 33),
    ("prompt", "a\0b"),
    ("logprobs", 21),
    ("logprobs", True),
    ("echo", 1),
]
UNSUPPORTED: list[tuple[str, Any]] = [
    ("functions", [{}]),
    ("grammar", "root ::= x"),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("prediction", {}),
    ("web_search_options", {}),
    ("store", True),
    ("best_of", 2),
    ("best_of", True),
    ("use_beam_search", True),
    ("suffix", "end"),
    ("chat_template", "{{ messages }}"),
]
HARMLESS: dict[str, Any] = {
    "metadata": {"a": "b"},
    "user": "me",
    "service_tier": "auto",
    "safety_identifier": "x",
    "verbosity": "low",
    "reasoning_effort": "low",
    "parallel_tool_calls": True,
    "prompt_cache_key": "k",
    "tools": [],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "store": False,
    "best_of": 1,
    "suffix": None,
    "temperature": None,
    "top_p": None,
    "n": None,
    "stop": None,
    "logit_bias": None,
    "max_tokens": None,
    "stream": None,
    "stream_options": None,
    "logprobs": None,
    "seed": None,
    "top_k": -1,
}


async def refused(server: Surface, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await server.post(path, body)
    assert answer.status == 400, (body, answer)
    assert len(answer.body) < 1000
    return answer.error


async def test_wrong_sampling_parameters_are_named() -> None:
    async with surface(FakeFleet(by_hand)) as server:
        for param, value in WRONG_SAMPLING:
            for path, prompt in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "hi"})):
                error = await refused(server, path, {"model": MODEL, **prompt, param: value})
                assert error["param"].split(".")[0] == param, (value, error)
        assert server.fleet.generations == []


async def test_wrong_chat_parameters_are_named() -> None:
    async with surface() as server:
        for param, value in WRONG_CHAT:
            name = param.split(".")[0]
            body = {"model": MODEL, "messages": HI, name: value}
            assert (await refused(server, CHAT, body))["param"] == param, (param, value)
        assert server.fleet.generations == []


async def test_wrong_completion_parameters_are_named() -> None:
    async with surface() as server:
        for param, value in WRONG_COMPLETIONS:
            body = {"model": MODEL, "prompt": "hi", param: value}
            assert (await refused(server, COMPLETIONS, body))["param"] == param, (param, value)
        assert server.fleet.generations == []


NUMBER_TYPE = {"type": "function", "function": {"name": 5}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a b"}}
SAID: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"temperature": "hot"}, "temperature", "must be a number; it is 'hot'"),
    (CHAT, {"temperature": 2.5}, "temperature", "must be at most 2.0; it is 2.5"),
    (CHAT, {"top_p": 0}, "top_p", "must be greater than 0.0; it is 0"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "must be at least 1; it is 0"),
    (CHAT, {"max_tokens": "9"}, "max_tokens", "must be an integer; it is '9'"),
    (CHAT, {"stream": 1}, "stream", "must be true or false; it is 1"),
    (CHAT, {"model": 7}, "model", "must be a string; it is 7"),
    (CHAT, {"messages": "hi"}, "messages", "must be a list; it is 'hi'"),
    (CHAT, {"messages": []}, "messages", "must have 1 or more entries; it is []"),
    (CHAT, {"stop": 5}, "stop", "must be a string or a list of strings"),
    (CHAT, {"stream_options": 7}, "stream_options", "must be an object; it is 7"),
    (CHAT, {"cache_salt": ""}, "cache_salt", "must have 1 or more characters; it is ''"),
    (CHAT, {"guided_json": 5}, "guided_json", "must be an object or be a string; it is 5"),
    (
        CHAT,
        {"tools": [], "tool_choice": "some"},
        "tool_choice",
        "must be 'none', 'auto' or 'required' or be an object; it is 'some'",
    ),
    (CHAT, {"tool_choice": NUMBER_TYPE}, "tool_choice.function.name", "must be a string; it is 5"),
    (
        CHAT,
        {"response_format": FORMAT},
        "response_format.json_schema.name",
        "must match ^[a-zA-Z0-9_-]{1,64}$; it is 'a b'",
    ),
    (CHAT, {"chat_template_kwargs": 1}, "chat_template_kwargs", "must be an object; it is 1"),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": 5}], "max_tokens": 1},
        "messages.0.content",
        "must be a string or a list of blocks; it is 5",
    ),
    ("/v1/responses", {}, "input", "is required"),
    ("/v1/responses", {"input": 5}, "input", "must be a list; it is 5"),
    (
        "/v1/responses",
        {"input": "hi", "metadata": {"a": 5}},
        "metadata.a",
        "must be a string; it is 5",
    ),
    (
        "/v1/responses",
        {"input": "hi", "tool_choice": {"type": "function"}},
        "tool_choice.name",
        "is required",
    ),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), SAID, ids=lambda v: str(v)[:40])
async def test_what_a_value_must_be_is_said_in_plain_words(
    path: str, body: dict[str, Any], param: str, message: str
) -> None:
    prompt = {"messages": HI} if path == CHAT else {}
    answer = await posted(path, prompt | body)
    assert answer.status == 400
    # Messages has no field for the parameter's name.
    error = answer.json["error"]
    assert error.get("param", param) == param
    assert error["message"] == f"{param} {message}"


OF_NODES: dict[str, set[str]] = {
    "any": set(),
    "chain": set(),
    "bool": {"bool_type"},
    "dataclass": {"dataclass_exact_type"},  # created by a validator, not validated further
    "default": set(),
    "definition-ref": set(),
    "definitions": set(),
    "dict": {"dict_type", "too_short", "too_long"},
    "float": {"float_type", "finite_number"},
    "function-after": {"value_error"},
    "function-before": {"value_error"},
    "function-wrap": {"string_pattern_mismatch"},  # a pattern after our own validator
    "int": {"int_type"},
    "list": {"list_type", "too_short", "too_long"},
    "literal": {"literal_error"},
    "model": {"model_type"},
    "model-fields": {"missing", "extra_forbidden"},
    "model-field": set(),
    "none": {"none_required"},
    "nullable": set(),
    "str": {"string_type", "string_unicode"},
    "tuple": {"tuple_type", "too_short", "too_long"},
    "typed-dict": {"dict_type", "missing", "extra_forbidden"},
    "typed-dict-field": set(),
    "union": set(),
}
"""Possible errors at each kind of node of a request model's schema. A new kind needs an error
text."""
OF_BOUNDS = {
    "ge": "greater_than_equal",
    "gt": "greater_than",
    "le": "less_than_equal",
    "lt": "less_than",
    "pattern": "string_pattern_mismatch",
}
OF_LENGTHS = {"min_length": "string_too_short", "max_length": "string_too_long"}
SAID_ELSEWHERE = {"value_error", "missing", "extra_forbidden"}


def nodes_of(schema: object) -> Iterator[dict[str, Any]]:
    """Yield every node of a pydantic core schema."""
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str):
            yield schema
        if schema.get("type") == "dataclass":
            return
        for word, part in schema.items():
            if word not in ("metadata", "serialization", "config", "function"):
                yield from nodes_of(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from nodes_of(part)


def models() -> Iterator[type[StrictFields]]:
    """Yield every request model."""
    waiting = [StrictFields]
    while waiting:
        yield (model := waiting.pop())
        waiting += model.__subclasses__()


def test_there_are_words_for_whatever_can_be_wrong_with_a_request() -> None:
    wrong: set[str] = set()
    for model in models():
        for node in nodes_of(model.__pydantic_core_schema__):
            kind = node["type"]
            wrong |= OF_NODES[kind]
            wrong |= {OF_BOUNDS[word] for word in OF_BOUNDS if word in node}
            if kind == "str":
                wrong |= {OF_LENGTHS[word] for word in OF_LENGTHS if word in node}
    assert len(wrong) > 15
    assert wrong - SAID_ELSEWHERE <= WORDS.keys()


async def test_what_is_not_served_is_refused_by_name() -> None:
    async with surface() as server:
        for param, value in UNSUPPORTED:
            body = {"model": MODEL, "messages": HI, param: value}
            error = await refused(server, CHAT, body)
            assert (error["param"], error["code"]) == (param, "unsupported_parameter")


async def test_what_changes_nothing_is_accepted() -> None:
    answer = await posted(CHAT, {"messages": HI, **HARMLESS})
    assert answer.status == 200


async def test_a_misspelt_parameter_is_refused_with_the_one_that_is_meant() -> None:
    async with surface() as server:
        for name, meant in (("temprature", "temperature"), ("max_new_tokens", "max_tokens")):
            error = await refused(server, CHAT, {"messages": HI, name: 1})
            assert (error["param"], meant in error["message"]) == (name, True)


EXTENSIONS = {"cache_prompt": True, "nvext": {"a": [1]}, "a_name_of_another_server": None}


async def test_extensions_of_other_servers_are_ignored_and_named_in_the_answer() -> None:
    async with surface() as server:
        answer = await server.post(CHAT, {"messages": HI, **EXTENSIONS})
        await refused(server, CHAT, {"messages": HI, "a name\r\nwith: more": 1})
        metrics = (await server.request("GET", "/metrics")).body.decode()
    assert answer.status == 200
    assert answer.headers["x-triolet-ignored"] == ", ".join(EXTENSIONS)
    for name, count in (("cache_prompt", 1), ("nvext", 1), ("other", 1)):
        assert f'triolet_ignored_parameters_total{{parameter="{name}"}} {count}.0' in metrics


async def test_too_many_unknown_parameters_are_a_mistake() -> None:
    async with surface() as server:
        error = await refused(server, CHAT, {"messages": HI, **{f"x{i}": 1 for i in range(17)}})
    assert "17 parameters" in error["message"]


async def test_a_strict_server_refuses_every_unknown_parameter() -> None:
    async with surface(strict_requests=True) as server:
        for name, value in EXTENSIONS.items():
            error = await refused(server, CHAT, {"messages": HI, name: value})
            assert error["param"] == name


async def test_a_model_goes_by_every_name_that_it_was_given() -> None:
    async with surface(model_aliases=("gpt-4o-mini",)) as server:
        for name in (MODEL, "gpt-4o-mini"):
            answer = await server.post(CHAT, {"model": name, "messages": HI})
            assert (answer.status, answer.json["model"]) == (200, MODEL)
        listed = (await server.request("GET", "/v1/models")).json["data"]
        assert [card["id"] for card in listed] == [MODEL, "gpt-4o-mini"]
        assert (await server.post(CHAT, {"model": "gpt-4", "messages": HI})).status == 404
    async with surface(model_aliases=("*",)) as server:
        assert (await server.post(CHAT, {"model": "whatever", "messages": HI})).status == 200
        listed = (await server.request("GET", "/v1/models")).json["data"]
        assert [card["id"] for card in listed] == [MODEL]


@pytest.mark.parametrize("missing", [CHAT, COMPLETIONS])
async def test_a_missing_prompt_is_named(missing: str) -> None:
    async with surface() as server:
        error = await refused(server, missing, {"model": MODEL})
    assert error["param"] == ("messages" if missing == CHAT else "prompt")


async def test_a_prompt_beyond_the_context_says_so() -> None:
    async with surface() as server:
        long = await refused(server, COMPLETIONS, {"prompt": "x" * MAX_MODEL_LEN})
        greedy = await refused(server, COMPLETIONS, {"prompt": "x", "max_tokens": MAX_MODEL_LEN})
    assert long["code"] == greedy["code"] == "context_length_exceeded"
    assert str(MAX_MODEL_LEN) in long["message"]


async def test_fewer_tokens_than_the_least_is_refused() -> None:
    async with surface() as server:
        body = {"prompt": "hi", "max_tokens": 3, "min_tokens": 4}
        assert (await refused(server, COMPLETIONS, body))["param"] == "min_tokens"


async def test_an_unknown_model_is_404_and_adds_no_label() -> None:
    async with surface() as server:
        for index in range(20):
            answer = await server.post(CHAT, {"model": f"m{index}", "messages": HI})
            assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        exposition = (await server.request("GET", "/metrics")).body
    assert b'"m1' not in exposition


async def test_echoed_input_is_cut() -> None:
    async with surface() as server:
        error = await refused(server, CHAT, {"messages": HI, "temperature": "x" * 100_000})
    assert len(error["message"]) < 400


BODIES: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"{", 400),
    (b"[]", 400),
    (b"null", 400),
    (b"hello", 400),
    (b'{"messages": [}', 400),
    (b'{"temperature": NaN}', 400),
    (b'{"temperature": Infinity}', 400),
    (b'{"temperature": 1e999}', 400),
    (b'{"a": 1, "a": 2}', 400),
    (b'{"a": {"b": 1, "b": 2}}', 400),
    (b'{"prompt": "\\ud800"}', 400),
    (b'{"\\udfff": 1}', 400),
    (b"\xef\xbb\xbf{}", 400),
    ('{"a": 1}'.encode("utf-16"), 400),
    (b'{"a": "\xff"}', 400),
    (b'{"a": ' + b"9" * 5000 + b"}", 400),
    (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    (b'{"messages": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}", 400),
    (b'{"a": 1}\0', 400),
]


@pytest.mark.parametrize(("body", "status"), BODIES, ids=lambda v: str(v)[:30])
async def test_hostile_json_is_refused(body: bytes, status: int) -> None:
    async with surface() as server:
        for path in (CHAT, COMPLETIONS, "/tokenize"):
            answer = await server.request("POST", path, body=body)
            assert answer.status == status
            assert answer.error["code"] == "invalid_request_error"


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "multipart/form-data; boundary=b"},
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Type": "text/plain; charset=utf-16"},
        {"Content-Encoding": "gzip"},
    ],
)
async def test_other_media_types_are_415(headers: dict[str, str]) -> None:
    answer = await posted(CHAT, {"messages": HI}, headers=headers)
    assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")


async def test_a_request_timeout_becomes_the_deadline() -> None:
    async with surface() as server:
        await server.post(CHAT, {"messages": HI}, headers={"X-Request-Timeout-Ms": "1500"})
        await server.post(CHAT, {"messages": HI})
        for bad in ("0", "-1", "soon", "9" * 30, "1.5"):
            answer = await server.post(
                CHAT, {"messages": HI}, headers={"X-Request-Timeout-Ms": bad}
            )
            assert answer.error["param"] == "x-request-timeout-ms"
        first, second = server.fleet.generations
    assert first.request.deadline_s == 1.5
    assert second.request.deadline_s == server.services.config.default_deadline_s


async def test_a_body_beyond_the_bound_is_413_before_it_is_read() -> None:
    async with surface(max_body_bytes=1000) as server:
        small = await server.post(CHAT, {"messages": user("x" * 500)})
        declared = await server.request("POST", CHAT, body=b"", headers={"Content-Length": "1001"})
        chunked = await server.request(
            "POST",
            CHAT,
            body=b"400\r\n" + b"x" * 1024 + b"\r\n0\r\n\r\n",
            headers={"Content-Length": "", "Transfer-Encoding": "chunked"},
        )
    assert small.status == 200
    assert declared.status == chunked.status == 413
    assert json.loads(chunked.body)["error"]["code"] == "request_too_large"

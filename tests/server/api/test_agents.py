"""Tests of requests that coding agents send to the Messages and Responses APIs, including the
fields that only they use."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.support.fakes import MAX_MODEL_LEN
from tests.server.support.surface import MODEL, posted, refused_at, surface

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
RESPONSES = "/v1/responses"
TURNS = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "messages": TURNS}
KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
KEEP_ONE = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}
CLEAR = {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 10**9}}
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
SEARCH = {"type": "web_search", "external_web_access": True}
AGENTS = {"type": "namespace", "name": "multi_agent_v1", "tools": [{**WEATHER, "name": "wait"}]}
IGNORED = "x-triolet-ignored"


@pytest.mark.parametrize("edits", [[], [KEEP_ALL]])
async def test_context_management_that_changes_nothing_is_accepted(edits: list[Any]) -> None:
    managed = {"context_management": {"edits": edits}}
    counted = {name: ASKED[name] for name in ("model", "messages")}
    async with surface() as server:
        assert (await server.post(MESSAGES, ASKED | managed)).status == 200
        assert (await server.post(COUNT, counted | managed)).status == 200


@pytest.mark.parametrize("edits", [[KEEP_ONE], [CLEAR], [KEEP_ALL, CLEAR]])
async def test_an_edit_that_could_change_the_prompt_is_refused_with_what_to_do(
    edits: list[Any],
) -> None:
    refused = await refused_at(MESSAGES, ASKED | {"context_management": {"edits": edits}})
    assert refused.status == 400
    message = refused.json["error"]["message"]
    assert message.startswith("context_management: ")
    assert "send the messages as the model should see them" in message


async def test_values_of_anthropic_beta_that_mean_nothing_here_are_named_in_the_answer() -> None:
    values = "claude-code-20250219,made-up-2027-01-01, context-management-2025-06-27,x/y"
    many = ",".join(f"beta-{number}" for number in range(100))
    async with surface() as server:
        named = await server.post(MESSAGES, ASKED, headers={"anthropic-beta": values})
        bounded = await server.post(MESSAGES, ASKED, headers={"anthropic-beta": many})
        plain = await server.post(
            MESSAGES, ASKED, headers={"anthropic-beta": "interleaved-thinking-2025-05-14"}
        )
    assert {named.status, bounded.status, plain.status} == {200}
    assert named.headers[IGNORED] == (
        "anthropic-beta.made-up-2027-01-01, anthropic-beta.x, anthropic-beta.y"
    )
    assert bounded.headers[IGNORED].count("anthropic-beta.") == 16
    assert IGNORED not in plain.headers


async def test_a_message_gets_as_many_tokens_as_fit_and_the_header_says_how_many() -> None:
    async with surface() as server:
        cut = await server.post(MESSAGES, ASKED | {"max_tokens": 32_000})
        whole = await server.post(MESSAGES, ASKED)
        first, second = (one.request for one in server.fleet.generations)
    room = MAX_MODEL_LEN - len(first.prompt_ids)
    assert (cut.status, first.sampling.max_tokens) == (200, room)
    assert cut.headers["x-triolet-max-tokens"] == str(room)
    assert (whole.status, second.sampling.max_tokens) == (200, 100)
    assert "x-triolet-max-tokens" not in whole.headers


async def test_a_tool_that_a_search_found_is_named_to_the_model() -> None:
    tools = [
        {"name": name, "input_schema": {"type": "object"}, "defer_loading": True}
        for name in ("ToolSearch", "CronList")
    ]
    called = {"type": "tool_use", "id": "a", "name": "ToolSearch", "input": {}}
    found = [{"type": "tool_reference", "tool_name": "CronList"}]
    turns = [
        *TURNS,
        {"role": "assistant", "content": [called]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": found}],
        },
    ]
    async with surface() as server:
        answer = await server.post(MESSAGES, ASKED | {"messages": turns, "tools": tools})
        assert answer.status == 200
        prompt = bytes(server.fleet.generations[0].request.prompt_ids)
    assert b"Tool found: CronList" in prompt


async def test_hosted_tools_are_left_out_and_named_in_the_answer() -> None:
    tools = [SEARCH, WEATHER, AGENTS, SEARCH]
    async with surface() as server:
        answer = await server.post(RESPONSES, {"input": "hi", "tools": tools})
        only = await server.post(RESPONSES, {"input": "hi", "tools": [WEATHER]})
        first, second = (one.request for one in server.fleet.generations)
        none_left = await server.post(RESPONSES, {"input": "hi", "tools": [SEARCH]})
        counted = await server.post(
            f"{RESPONSES}/input_tokens", {"input": "hi", "tools": tools, "client_metadata": {}}
        )
    assert {answer.status, only.status, none_left.status} == {200}
    assert answer.headers[IGNORED] == "tools.namespace, tools.web_search"
    assert IGNORED not in only.headers
    assert first.prompt_ids == second.prompt_ids
    assert [tool["name"] for tool in answer.json["tools"]] == ["weather"]
    assert counted.json["input_tokens"] == len(first.prompt_ids)
    assert counted.headers[IGNORED] == "tools.namespace, tools.web_search, client_metadata"


@pytest.mark.parametrize("tools", [[SEARCH], [WEATHER, SEARCH]])
async def test_a_hosted_tool_that_is_demanded_is_refused_with_what_to_do(tools: list[Any]) -> None:
    demanded = {"input": "hi", "tools": tools, "tool_choice": {"type": "web_search"}}
    refused = await refused_at(RESPONSES, demanded)
    assert (refused.status, refused.error["param"]) == (400, "tool_choice.type")
    assert "offer a function instead, and run it in your program" in refused.error["message"]


async def test_a_strict_server_refuses_hosted_tools() -> None:
    refused = await posted(
        RESPONSES, {"input": "hi", "tools": [WEATHER, SEARCH]}, strict_requests=True
    )
    assert (refused.status, refused.error["param"]) == (400, "tools.1.type")


async def test_a_call_whose_name_the_model_made_up_goes_back_to_it() -> None:
    turns = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "a", "name": "mcp.desk/x", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "unsupported call"},
    ]
    assert (await posted(RESPONSES, {"input": turns})).status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": TURNS}),
        ("/v1/chat/completions", {"messages": TURNS, "max_tokens": 5}),
        (RESPONSES, {"input": TURNS}),
        (MESSAGES, {"messages": TURNS, "max_tokens": 5}),
        ("/api/chat", {"model": MODEL, "messages": TURNS}),
    ],
)
async def test_a_prompt_beyond_the_context_is_refused_with_both_numbers_and_what_to_do(
    path: str, body: dict[str, Any]
) -> None:
    text = "x" * (MAX_MODEL_LEN + 10)
    prompt_tokens = len(f"user: {text}\nassistant:")
    long = [{"role": "user", "content": text}]
    asked = {name: long if value is TURNS else value for name, value in body.items()}
    refused = await posted(path, asked)
    assert refused.status == 400
    error = refused.json["error"]
    message = error if isinstance(error, str) else error["message"]
    # Claude Code compacts its conversation if it sees this phrase of Anthropic's API.
    assert f"prompt is too long: {prompt_tokens} tokens > {MAX_MODEL_LEN - 1} maximum" in message
    assert "Shorten the prompt" in message

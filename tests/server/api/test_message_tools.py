"""Tests of tool calls over the Messages API."""

from __future__ import annotations

import json

from tests.server.api.test_messages import CALL, COUNT, PATH, WEATHER, ask
from tests.server.support.fakes import FakeFleet, saying
from tests.server.support.surface import surface

call = saying("Let me see. ", CALL[:30], CALL[30:45], CALL[45:])


async def test_calls_of_tools_are_blocks_whole_and_streamed() -> None:
    async with surface(FakeFleet(call)) as server:
        whole = (await server.post(PATH, ask(tools=[WEATHER]))).json
        events = (await server.post(PATH, ask(tools=[WEATHER], stream=True))).named_events
    text, used = whole["content"]
    assert text == {"type": "text", "text": "Let me see. "}
    assert used.pop("id").startswith("toolu_")
    assert used == {"type": "tool_use", "name": "weather", "input": {"city": "Rome"}}
    assert whole["stop_reason"] == "tool_use"
    blocks = [d["content_block"] for name, d in events if name == "content_block_start"]
    assert [(block["type"], block.get("input")) for block in blocks] == [
        ("text", None),
        ("tool_use", {}),
    ]
    parts = [
        data["delta"]["partial_json"]
        for name, data in events
        if name == "content_block_delta" and data["index"] == 1
    ]
    assert json.loads("".join(parts)) == {"city": "Rome"}
    assert [name for name, _ in events].count("content_block_stop") == 2
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"


async def test_a_conversation_with_calls_is_that_of_a_chat() -> None:
    turns = [
        {"role": "user", "content": "How is it in Rome?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Wait."},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "warm"},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    same = [
        turns[0],
        {
            "role": "assistant",
            "content": "Wait.",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "warm"},
        {"role": "user", "content": "So?"},
    ]
    function = {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": WEATHER["input_schema"],
    }
    tools = [{"type": "function", "function": function}]
    async with surface() as server:
        asked = ask(messages=turns, tools=[WEATHER], tool_choice={"type": "any"})
        assert (await server.post(PATH, asked)).status == 200
        chat = {"messages": same, "tools": tools, "tool_choice": "required"}
        assert (await server.post("/v1/chat/completions", chat)).status == 200
        counted = await server.post(COUNT, {"messages": turns, "tools": [WEATHER]})
    first, second = (generation.request for generation in server.fleet.generations)
    assert first.prompt_ids == second.prompt_ids
    assert first.sampling.grammar == second.sampling.grammar
    assert first.sampling.grammar is not None
    assert counted.json == {"input_tokens": len(first.prompt_ids)}


async def test_a_thread_is_refused_with_what_makes_the_official_client_send_everything() -> None:
    continued = {"type": "continue", "previous_message_id": "msg_1"}
    async with surface() as server:
        for thread in ({"type": "create"}, continued):
            refused = await server.post(PATH, ask(thread=thread, tools=[WEATHER]))
            error = refused.json["error"]
            assert (refused.status, error["type"]) == (400, "invalid_request_error")
            assert error["details"] == {"error_code": "thread_unsupported_request"}
            assert error["message"].startswith("thread: ")
        other = await server.post(PATH, ask(container="c"))
        assert (await server.post(PATH, ask(thread=None))).status == 200
    assert "details" not in other.json["error"]
    assert len(server.fleet.generations) == 1


async def test_thinking_in_the_history_is_taken_and_not_shown_to_the_model() -> None:
    said = {"type": "text", "text": "Wait."}
    called = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
    thought = {"type": "thinking", "thinking": "It is far.", "signature": "c2ln"}
    hidden = {"type": "redacted_thinking", "data": "c2VjcmV0"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "warm"}

    def turns(*content: dict[str, object]) -> list[dict[str, object]]:
        return [
            {"role": "user", "content": "How is it in Rome?"},
            {"role": "assistant", "content": list(content)},
            {"role": "user", "content": [result]},
        ]

    async with surface() as server:
        for content in ((thought, hidden, said, called), (said, called)):
            asked = ask(messages=turns(*content), tools=[WEATHER])
            assert (await server.post(PATH, asked)).status == 200
    first, second = (generation.request for generation in server.fleet.generations)
    assert first.prompt_ids == second.prompt_ids

"""Tests of POST /api/chat and /api/generate (Ollama's API): streamed and whole answers, options,
tools, errors and cancels."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from server.contract.generation import FinishReason
from server.tenants.opening import quotas_in_memory
from server.tenants.tenancy import Tenancy
from tests.server.support.clock import pass_time
from tests.server.support.fakes import ChargingFleet, FakeFleet, FakeGeneration, by_hand, saying
from tests.server.support.surface import MODEL, posted, refused_at, request_bytes, surface
from tests.server.support.tenants import tenant, tenants_of
from tests.server.tiny_text import tiny_text
from triolet.tenants.plans import Plan

if TYPE_CHECKING:
    from trio.testing import MockClock

    from tests.server.support.surface import Answer

TURNS = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": TURNS}
TEXT: dict[str, Any] = {"model": f"{MODEL}:latest", "prompt": "hi"}
WHOLE = {"stream": False}
KEY = {"authorization": "Bearer key-of-alice"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def lines(answer: Answer) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.body.endswith(b"\n")
    return [json.loads(line) for line in answer.body.splitlines()]


async def test_a_chat_is_streamed_in_lines_unless_it_says_otherwise() -> None:
    async with surface() as server:
        parts = lines(await server.post("/api/chat", CHAT))
        whole = (await server.post("/api/chat", CHAT | WHOLE)).json
        generation = server.fleet.generations[0]
    assert bytes(generation.request.prompt_ids) == b"user: hi\nassistant:"
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert "".join(part["message"]["content"] for part in parts) == "Hello there"
    assert (parts[-1]["done_reason"], parts[-1]["eval_count"]) == ("stop", 11)
    assert parts[-1]["prompt_eval_count"] == len(generation.request.prompt_ids)
    assert all(parts[-1][name] >= 0 for name in DURATIONS)
    assert whole["message"] == {"role": "assistant", "content": "Hello there"}
    assert (whole["model"], whole["done"], whole["done_reason"]) == (MODEL, True, "stop")


async def test_a_prompt_goes_through_the_template_unless_it_is_raw() -> None:
    async with surface() as server:
        for more in ({}, {"system": "be brief"}, {"raw": True}):
            parts = lines(await server.post("/api/generate", TEXT | more))
            assert "".join(part["response"] for part in parts) == "Hello there"
        prompts = [bytes(one.request.prompt_ids) for one in server.fleet.generations]
    assert prompts == [
        b"user: hi\nassistant:",
        b"system: be brief\nuser: hi\nassistant:",
        b"hi",
    ]


async def test_options_are_applied_and_those_without_effect_are_named() -> None:
    options = {
        "temperature": 0,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.1,
        "repeat_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "seed": 7,
        "stop": ["x"],
        "num_predict": 3,
        "num_ctx": 2048,
        "num_gpu": 1,
        "surprise": 1,
    }
    async with surface() as server:
        answer = await server.post("/api/chat", CHAT | WHOLE | {"options": options})
        await server.post("/api/chat", CHAT | WHOLE | {"options": {"num_predict": -1}})
        first, second = (one.request for one in server.fleet.generations)
    assert answer.status == 200
    ignored = answer.headers["x-triolet-ignored"].split(", ")
    assert set(ignored) == {"options.num_ctx", "options.num_gpu", "options.surprise"}
    params = first.sampling
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0, 5, 0.5, 0.1)
    assert (params.repetition_penalty, params.seed, params.max_tokens) == (1.5, 7, 3)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.25)
    assert first.stop == ("x",)
    assert second.sampling.max_tokens == server.fleet.max_model_len - len(second.prompt_ids)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat", CHAT | WHOLE),
        ("generate", TEXT | WHOLE),
        ("embed", {"model": MODEL, "input": "hi"}),
        ("embeddings", {"model": MODEL, "prompt": "hi"}),
    ],
)
async def test_a_context_beyond_the_models_is_cut_to_it_and_named(
    path: str, body: dict[str, Any]
) -> None:
    answer = await posted(f"/api/{path}", body | {"options": {"num_ctx": 1 << 20}})
    assert (answer.status, answer.headers["x-triolet-ignored"]) == (200, "options.num_ctx")


@pytest.mark.parametrize(
    ("path", "more", "said"),
    [
        ("chat", {"options": {"mirostat": 2}}, "options.mirostat"),
        ("chat", {"options": {"temprature": 2}}, "options.temprature"),
        ("chat", {"options": {"temperature": 3}}, "options.temperature"),
        ("chat", {"messages": [{"role": "user", "content": "", "images": ["a"]}]}, "images"),
        ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ("generate", {"images": ["a"]}, "images"),
        ("generate", {"suffix": "x"}, "suffix"),
        ("generate", {"context": [1]}, "context"),
        ("generate", {"template": "x"}, "template"),
        ("generate", {"raw": True, "system": "x"}, "system"),
        ("generate", {"format": "yaml"}, "format"),
        ("generate", {"prompt": 5}, "prompt"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(
    path: str, more: dict[str, Any], said: str
) -> None:
    answer = await refused_at(f"/api/{path}", (CHAT if path == "chat" else TEXT) | more)
    assert answer.status == 400
    assert list(answer.json) == ["error"]
    assert said in answer.json["error"]


async def test_another_model_is_not_found_and_a_tag_is_no_other() -> None:
    async with surface() as server:
        answer = await server.post("/api/chat", CHAT | {"model": "another"})
        assert (answer.status, list(answer.json)) == (404, ["error"])
        answer = await server.post("/api/chat", CHAT | {"model": f"{MODEL}:7b"})
        assert answer.status == 404
        answer = await server.post("/api/chat", {"messages": TURNS})
        assert (answer.status, answer.json) == (400, {"error": "model is required"})


async def test_a_request_without_a_prompt_finds_the_model_loaded() -> None:
    async with surface() as server:
        (part,) = lines(await server.post("/api/chat", CHAT | {"messages": []}))
        whole = await server.post("/api/generate", {"model": MODEL, "keep_alive": "5m"} | WHOLE)
        missing = await server.post("/api/generate", {"model": "another"})
        assert not server.fleet.generations
    assert missing.status == 404
    assert (part["done"], part["done_reason"]) == (True, "load")
    assert (whole.json["response"], whole.json["done_reason"]) == ("", "load")


CLOSED = {"type": "object", "properties": {"a": {}}, "additionalProperties": False}


@pytest.mark.parametrize("wanted", ["json", CLOSED])
async def test_a_format_is_a_grammar(wanted: Any) -> None:  # noqa: ANN401
    async with surface() as server:
        assert (await server.post("/api/chat", CHAT | {"format": wanted})).status == 200
        assert (await server.post("/api/generate", TEXT | {"raw": True, "format": wanted})).status
        (first, second) = server.grammars.checked
        assert first == second == server.fleet.generations[0].request.sampling.grammar
        server.grammars.refused.add(first.text)
        answer = await server.post("/api/chat", CHAT | {"format": wanted})
    assert (answer.status, answer.json["error"]) == (400, "format: cannot be used")
    wants = {"type": "object"} if wanted == "json" else wanted
    assert json.loads(first.text) == wants


async def test_a_call_whose_arguments_are_broken_is_none_to_run() -> None:
    body = CHAT | {"tools": [TOOL]}
    async with surface(
        FakeFleet(saying('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>'))
    ) as server:
        parts = lines(await server.post("/api/chat", body))
        whole = (await server.post("/api/chat", body | WHOLE)).json
    assert not any("tool_calls" in part["message"] for part in [*parts, whole])


def calls(generation: FakeGeneration) -> None:
    generation.say("Let me see. ", CALL[:20], CALL[20:50], CALL[50:], CALL)
    generation.finish()


async def test_calls_of_tools_are_whole_and_their_results_go_back() -> None:
    body = CHAT | {"tools": [TOOL]}
    said = {"a": 1, "b": [2]}
    async with surface(FakeFleet(calls)) as server:
        parts = lines(await server.post("/api/chat", body))
        whole = (await server.post("/api/chat", body | WHOLE)).json
        called = [{"function": {"name": "add", "arguments": said}}]
        turns = [
            *TURNS,
            {"role": "assistant", "content": "", "tool_calls": called},
            {"role": "tool", "content": "3", "tool_name": "add"},
        ]
        answer = await server.post("/api/chat", body | {"messages": [{**turns[1], "role": "tool"}]})
        assert answer.status == 400
        assert answer.json["error"].startswith("messages.0.tool_calls is allowed only with")
        await server.post("/api/chat", body | {"messages": turns})
        prompt = bytes(server.fleet.generations[-1].request.prompt_ids).decode()
    found = [one for part in parts for one in part["message"].get("tool_calls", ())]
    assert found == whole["message"]["tool_calls"]
    assert [one["function"]["arguments"] for one in found] == [said, said]
    assert "".join(part["message"]["content"] for part in parts).strip() == "Let me see."
    assert parts[-1]["done_reason"] == "stop"
    assert prompt.startswith(
        "tool add\nuser: hi\nassistant:  call_0=add({'a': 1, 'b': [2]})\ntool: 3\n"
    )


@pytest.mark.parametrize("think", [True, False, "high"])
async def test_think_switches_the_template(think: object) -> None:
    async with surface() as server:
        await server.post("/api/chat", CHAT | {"think": think})
        prompt = bytes(server.fleet.generations[0].request.prompt_ids)
        raw = await server.post("/api/generate", TEXT | {"raw": True, "think": think})
    assert prompt.endswith(b"assistant: enable_thinking")
    assert raw.headers["x-triolet-ignored"] == "think"


async def test_the_name_of_a_tool_reaches_the_template_with_its_result() -> None:
    template = "{% for m in messages %}{{ m.role }}/{{ m.name }}/{{ m.content }};{% endfor %}"
    text = tiny_text(template="{{ tools or '' }}" + template)
    turn = {"role": "tool", "content": "3"}
    user = TURNS[0] | {"name": "ann"}
    chat = {"messages": [user, turn | {"name": "add", "tool_call_id": "c"}]}
    async with surface(text=text) as server:
        asked = {"messages": [user, turn | {"tool_name": "add"}]}
        assert (await server.post("/api/chat", CHAT | asked)).status == 200
        assert (await server.post("/v1/chat/completions", chat)).status == 200
        prompts = [await text.decode(one.request.prompt_ids) for one in server.fleet.generations]
    assert prompts == ["user//hi;tool/add/3;"] * 2


async def test_a_silence_is_filled_with_a_line_without_text(mock_clock: MockClock) -> None:
    async with (
        surface(FakeFleet(by_hand)) as server,
        await server.sent(
            request_bytes("POST", "/api/chat", body=json.dumps(CHAT).encode())
        ) as client,
    ):
        generation = await server.fleet.nth(0)
        await client.head()
        await pass_time(mock_clock, server.services.config.keep_alive_s)
        part = json.loads(await client.chunk())
        assert (part["message"]["content"], part["done"]) == ("", False)
        generation.say("Hi")
        generation.finish(FinishReason.LENGTH)
        said = [json.loads(line) for line in (await client.chunk()).splitlines()]
    assert (said[0]["message"]["content"], said[-1]["done_reason"]) == ("Hi", "length")


async def test_a_tenant_s_limits_and_accounts_hold_here_too() -> None:
    quotas = quotas_in_memory()
    fleet = ChargingFleet(quotas)
    plan = Plan("p", requests_per_minute=3.0, tokens_per_minute=400.0)
    tenancy = Tenancy(tenants_of(tenant("alice", "key-of-alice", plan=plan)))
    async with surface(fleet, tenancy=tenancy, quotas=quotas) as server:
        assert (await server.post("/api/chat", CHAT)).status == 401
        answer = await server.post("/api/chat", CHAT, headers=KEY)
        assert answer.status == 200
        assert answer.headers["x-ratelimit-remaining-requests"] == "2"
        assert (await server.post("/api/generate", TEXT, headers=KEY)).status == 200
        embedded = await server.post("/api/embed", {"model": MODEL, "input": "a"}, headers=KEY)
        assert embedded.status == 200
        limited = await server.post("/api/chat", CHAT, headers=KEY)
        assert limited.status == 429
        assert "3 requests a minute" in limited.json["error"]
        used = (await server.request("GET", "/v1/usage", headers=KEY)).json["this_month"]["tokens"]
    assert used == fleet.used > 0


async def test_curl_s_own_media_type_will_do() -> None:
    async with surface() as server:
        body = json.dumps(CHAT | WHOLE).encode()
        usual = {"Content-Type": "application/x-www-form-urlencoded"}
        answer = await server.request("POST", "/api/chat", body=body, headers=usual)
        assert answer.status == 200
        foreign = usual | {"Origin": "https://evil.example"}
        answer = await server.request("POST", "/api/chat", body=body, headers=foreign)
        assert answer.status == 415
        as_json = {"Content-Type": "application/json", "Origin": "https://evil.example"}
        answer = await server.request("POST", "/api/chat", body=body, headers=as_json)
        assert answer.status == 403

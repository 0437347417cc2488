"""Tests of reasoning over each API: it is separated from the answer, counted, limited and
resumed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, get_args

import pytest

from server.contract.generation import Finished, Usage
from server.scheduling.output import Relay
from tests.lazily import lazily
from tests.server.support.fakes import FakeFleet
from tests.server.support.surface import MODEL, posted, surface
from tests.server.support.websocket import open_socket
from tests.server.tiny_text import EOS_ID, TEMPLATE, tiny_text
from transport.frames import TokenRow

if TYPE_CHECKING:
    from collections.abc import Callable

    from anthropic import types
    from openai.types import responses, shared

    from server.text.tokenizer import TextModel
    from tests.server.support.fakes import FakeGeneration
    from tests.server.support.surface import Surface
else:
    types = lazily("anthropic.types")
    responses = lazily("openai.types.responses")
    shared = lazily("openai.types.shared")

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
OPEN_ID, CLOSE_ID = 259, 260
QWEN = (
    "{% for tool in tools or () %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is defined and not "
    "enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
R1 = TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}"
THOUGHT = "Is it, or not?"
CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
CLOCK = {"type": "function", "function": {"name": "clock"}}


def model(template: str = QWEN) -> TextModel:
    return tiny_text(template=template, markers=("<think>", "</think>"))


HARMONY = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
GPT_OSS = QWEN.split("{% if add")[0] + "<|start|>assistant{# <|channel|> #}"


async def gpt_oss(completion: str) -> tuple[TextModel, list[int]]:
    """Return a model with the harmony format, and a completion's tokens."""
    text = tiny_text(template=GPT_OSS, specials=HARMONY)
    text.eos_token_ids = await text.encode("<|return|><|call|>")
    return text, list(await text.encode(completion))


def writing(text: TextModel, ids: list[int]) -> Callable[[FakeGeneration], None]:
    """Return a script that generates these tokens as the fleet does."""

    def script(generation: FakeGeneration) -> None:
        request = generation.request
        relay = Relay(request, text)
        for position, token_id in enumerate(ids):
            row = TokenRow(request.request_id, 0, position, token_id)
            end = relay.push(row, now=0.0)
            generation.push(*relay.mailbox.take(now=0.0))
            if end is not None:
                reasoning = request.sampling.reasoning
                counted = reasoning and reasoning.num_reasoning(relay.token_ids)
                usage = Usage(len(request.prompt_ids), position + 1, reasoning_tokens=counted)
                generation.push(Finished(end.reason, usage, end.stop_string))
                return

    return script


THINKS = [OPEN_ID, *b"\n", *THOUGHT.encode(), *b"\n", CLOSE_ID, *b"\n\nIt is.", EOS_ID]
CALLS = [OPEN_ID, *THOUGHT.encode(), CLOSE_ID, *CALL.encode(), EOS_ID]
CUT = [OPEN_ID, *THOUGHT.encode()]


def thinking(ids: list[int] = THINKS, template: str = QWEN) -> tuple[FakeFleet, TextModel]:
    text = model(template)
    return FakeFleet(writing(text, ids)), text


async def answered(
    path: str, body: dict[str, Any], ids: list[int] = THINKS, template: str = QWEN
) -> Any:  # noqa: ANN401
    fleet, text = thinking(ids, template)
    async with surface(fleet, text=text) as server:
        answer = await server.post(path, body)
        assert answer.status == 200, answer
        return answer.json


async def streamed(
    path: str, body: dict[str, Any], ids: list[int] = THINKS
) -> list[tuple[str, Any]]:
    fleet, text = thinking(ids)
    async with surface(fleet, text=text) as server:
        return (await server.post(path, body | {"stream": True})).named_events


async def asked(path: str, body: dict[str, Any], template: str = QWEN) -> tuple[str, Any]:
    """Return the end of the prompt and the reasoning settings sent to a worker."""
    fleet, text = thinking(template=template)
    async with surface(fleet, text=text) as server:
        answer = await server.post(path, body)
        assert answer.status == 200, answer
        request = fleet.generations[0].request
        prompt = await text.decode(request.prompt_ids, skip_special_tokens=False)
        return prompt, request.sampling.reasoning


async def test_ollamas_clients_get_thinking_and_may_send_it_back() -> None:
    turns = [*HI, {"role": "assistant", "content": "It is.", "thinking": THOUGHT}, *HI]
    for path, body in (("/api/chat", {"messages": turns}), ("/api/generate", {"prompt": "hi"})):
        whole = await answered(path, {"model": MODEL, "stream": False, **body})
        said = whole.get("message", whole)
        assert said["thinking"].strip() == THOUGHT
        assert (said.get("content") or said["response"]).strip() == "It is."
    fleet, text = thinking()
    async with surface(fleet, text=text) as server:
        lines = (await server.post("/api/chat", {"model": MODEL, "messages": turns})).body
        request = fleet.generations[0].request
        prompt = await text.decode(request.prompt_ids, skip_special_tokens=False)
    parts = [json.loads(line)["message"] for line in lines.splitlines()]
    assert "".join(part.get("thinking", "") for part in parts).strip() == THOUGHT
    assert "".join(part["content"] for part in parts).strip() == "It is."
    assert f"<think>{THOUGHT}</think>It is." in prompt
    prompt, reasoning = await asked("/api/chat", {"model": MODEL, "messages": HI, "think": False})
    assert prompt.endswith("<think>\n\n</think>\n\n")
    assert reasoning is None


async def test_a_chat_has_its_reasoning_beside_its_content() -> None:
    answer = await answered(CHAT, {"messages": HI})
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "It is.",
        "refusal": None,
        "reasoning_content": THOUGHT,
    }
    usage = answer["usage"]
    assert usage["completion_tokens"] == len(THINKS)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(THOUGHT) + 2}


async def test_a_streamed_chat_says_the_same_piece_by_piece() -> None:
    fleet, text = thinking()
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = (await posted(CHAT, body, fleet=fleet, text=text)).events
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    kinds = [next(iter(delta), "") for delta in deltas[1:]]
    count = kinds.count("reasoning_content")
    assert count > 1
    assert kinds == ["reasoning_content"] * count + ["content"] * (len(kinds) - count - 1) + [""]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THOUGHT
    assert "".join(delta.get("content", "") for delta in deltas) == "It is."
    assert usage["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(THOUGHT) + 2}


async def test_calls_of_tools_begin_behind_the_reasoning() -> None:
    body = {"messages": HI, "tools": [CLOCK]}
    (choice,) = (await answered(CHAT, body, CALLS))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == THOUGHT
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "clock"
    quoted = [OPEN_ID, *CALL.encode(), CLOSE_ID, *b"No.", EOS_ID]
    (choice,) = (await answered(CHAT, body, quoted))["choices"]
    assert choice["message"]["reasoning_content"] == CALL
    assert "tool_calls" not in choice["message"]


async def test_reasoning_that_is_cut_leaves_no_content() -> None:
    (choice,) = (await answered(CHAT, {"messages": HI, "max_tokens": len(CUT)}, CUT))["choices"]
    assert choice["finish_reason"] == "length"
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("", THOUGHT)


async def test_each_choice_is_read_by_itself() -> None:
    answer = await answered(CHAT, {"messages": HI, "n": 2})
    assert [choice["message"]["reasoning_content"] for choice in answer["choices"]] == [THOUGHT] * 2


async def test_a_template_that_opens_reasoning_leaves_the_completion_within_it() -> None:
    ids = THINKS[2:]
    (choice,) = (await answered(CHAT, {"messages": HI}, ids, R1))["choices"]
    assert choice["message"]["reasoning_content"] == THOUGHT
    assert choice["message"]["content"] == "It is."


async def test_a_plain_completion_is_all_text() -> None:
    (choice,) = (await answered("/v1/completions", {"prompt": "hi", "max_tokens": 99}))["choices"]
    assert choice["text"] == f"<think>\n{THOUGHT}\n</think>\n\nIt is."


OFF: list[dict[str, Any]] = [
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"reasoning_effort": "none"},
    {"thinking_token_budget": 0},
]


@pytest.mark.parametrize("off", OFF)
async def test_reasoning_is_turned_off_by_the_template(off: dict[str, Any]) -> None:
    prompt, reasoning = await asked(CHAT, {"messages": HI} | off)
    assert prompt.endswith("[assistant]<think>\n\n</think>\n\n")
    assert reasoning is None


@pytest.mark.parametrize("off", OFF)
async def test_reasoning_that_a_template_always_opens_is_closed_at_once(
    off: dict[str, Any],
) -> None:
    prompt, reasoning = await asked(CHAT, {"messages": HI} | off, R1)
    assert prompt.endswith("[assistant]<think>\n")
    assert (reasoning.budget, reasoning.forced_next(())) == (0, CLOSE_ID)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI, "thinking_token_budget": 5}),
        (RESPONSES, {"input": "hi", "thinking_token_budget": 5}),
        (
            MESSAGES,
            {"messages": HI, "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 5}},
        ),
    ],
)
async def test_a_budget_reaches_the_worker(path: str, body: dict[str, Any]) -> None:
    prompt, reasoning = await asked(path, body)
    assert prompt.endswith("[assistant]")
    assert (reasoning.budget, reasoning.opening, reasoning.forced) == (5, OPEN_ID, (CLOSE_ID,))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {"input": "hi", "reasoning": {"effort": "none"}}),
        (MESSAGES, {"messages": HI, "max_tokens": 9, "thinking": {"type": "disabled"}}),
    ],
)
async def test_other_apis_turn_it_off_in_their_own_words(path: str, body: dict[str, Any]) -> None:
    prompt, reasoning = await asked(path, body)
    assert prompt.endswith("</think>\n\n")
    assert reasoning is None


async def test_an_effort_is_told_to_a_template_that_reads_it() -> None:
    template = QWEN + "{{ reasoning_effort }}"
    nearest = {"minimal": "low", "medium": "medium", "xhigh": "high", "max": "high"}
    for effort, told in nearest.items():
        of_ollama = {"model": MODEL, "messages": HI, "think": effort, "stream": False}
        for path, body in (
            (CHAT, {"messages": HI, "reasoning_effort": effort}),
            (RESPONSES, {"input": "hi", "reasoning": {"effort": effort}}),
            *([("/api/chat", of_ollama)] if effort in ("medium", "max") else []),
        ):
            prompt, _ = await asked(path, body, template)
            assert prompt.endswith(f"[assistant]{told}"), path


async def test_each_level_of_the_official_clients_is_taken() -> None:
    levels = get_args(get_args(shared.ReasoningEffort)[0])
    assert {"none", "max"} < set(levels)
    fleet, text = thinking()
    async with surface(fleet, text=text) as server:
        for effort in levels:
            for path, body in (
                (CHAT, {"messages": HI, "reasoning_effort": effort}),
                (RESPONSES, {"input": "hi", "reasoning": {"effort": effort}}),
                (MESSAGES, {"messages": HI, "max_tokens": 9, "output_config": {"effort": effort}}),
            ):
                answer = await server.post(path, body)
                assert answer.status == 200, (path, effort, answer.body)


async def test_a_grammar_is_the_answers() -> None:
    body = {"messages": HI, "response_format": {"type": "json_object"}}
    fleet, text = thinking()
    async with surface(fleet, text=text) as server:
        await server.post(CHAT, body)
        sampling = fleet.generations[0].request.sampling
    assert sampling.grammar is not None
    assert sampling.reasoning is not None
    assert sampling.reasoning.closings == ((CLOSE_ID,),)


TURN = {"role": "assistant", "content": "It is."}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [*HI, TURN | {"reasoning_content": THOUGHT}, *HI]}),
        (CHAT, {"messages": [*HI, TURN | {"reasoning": THOUGHT}, *HI]}),
        (
            RESPONSES,
            {
                "input": [
                    *HI,
                    {
                        "type": "reasoning",
                        "id": "rs_1",
                        "summary": [],
                        "content": [{"type": "reasoning_text", "text": THOUGHT}],
                    },
                    TURN,
                    *HI,
                ]
            },
        ),
        (
            MESSAGES,
            {
                "max_tokens": 9,
                "messages": [
                    *HI,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "redacted_thinking", "data": "x"},
                            {"type": "thinking", "thinking": THOUGHT, "signature": "x"},
                            {"type": "text", "text": "It is."},
                        ],
                    },
                    *HI,
                ],
            },
        ),
    ],
)
async def test_earlier_reasoning_is_given_to_the_template(path: str, body: dict[str, Any]) -> None:
    prompt, _ = await asked(path, body)
    shown = f"[user]hi<|end|>[assistant]<think>{THOUGHT}</think>It is.<|end|>"
    assert prompt == f"{shown}[user]hi<|end|>[assistant]"
    prompt, _ = await asked(path, body, TEMPLATE)
    assert THOUGHT not in prompt, "the template shows no reasoning"


async def test_a_response_has_an_item_of_reasoning() -> None:
    answer = await answered(RESPONSES, {"input": "hi"})
    reasoning, message = answer["output"]
    item = responses.ResponseReasoningItem.model_validate(reasoning)
    assert item.content is not None
    assert [part.text for part in item.content] == [THOUGHT]
    assert (item.summary, item.status) == ([], "completed")
    assert message["content"][0]["text"] == "It is."
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": len(THOUGHT) + 2}
    assert answer["usage"]["output_tokens"] == len(THINKS)


async def test_a_streamed_response_opens_and_closes_its_reasoning() -> None:
    events = await streamed(RESPONSES, {"input": "hi"})
    kinds = [name.removeprefix("response.") for name, _ in events]
    order = list(dict.fromkeys(kinds))
    assert order[:7] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
    ]
    assert order[7:] == ["output_item.done", "output_text.delta", "output_text.done", "completed"]
    deltas = [e["delta"] for name, e in events if name == "response.reasoning_text.delta"]
    assert "".join(deltas) == THOUGHT
    done = next(e for name, e in events if name == "response.reasoning_text.done")
    assert (done["text"], done["output_index"], done["content_index"]) == (THOUGHT, 0, 0)
    at = [e["output_index"] for _, e in events if "output_index" in e]
    assert at == sorted(at), "items must not interleave"
    assert [e["sequence_number"] for _, e in events] == list(range(len(events)))
    whole = await answered(RESPONSES, {"input": "hi"})
    last = events[-1][1]["response"]["output"]
    assert [item["type"] for item in last] == [item["type"] for item in whole["output"]]


async def test_a_response_that_is_cut_within_reasoning_has_only_that() -> None:
    body = {"input": "hi", "max_output_tokens": len(CUT)}
    answer = await answered(RESPONSES, body, CUT)
    (item,) = answer["output"]
    assert (item["type"], item["status"]) == ("reasoning", "incomplete")
    assert answer["status"] == "incomplete"


async def test_a_message_has_a_block_of_thinking() -> None:
    body = {"messages": HI, "max_tokens": 99}
    thought, text = (await answered(MESSAGES, body))["content"]
    block = types.ThinkingBlock.model_validate(thought)
    assert block.thinking == THOUGHT
    assert block.signature
    assert text == {"type": "text", "text": "It is."}
    events = await streamed(MESSAGES, body)
    starts = [e["content_block"] for name, e in events if name == "content_block_start"]
    assert [block["type"] for block in starts] == ["thinking", "text"]
    deltas = [e["delta"] for name, e in events if name == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == THOUGHT
    signatures = [delta for delta in deltas if delta["type"] == "signature_delta"]
    assert signatures == [{"type": "signature_delta", "signature": block.signature}]
    order = list(dict.fromkeys(delta["type"] for delta in deltas))
    assert order == ["thinking_delta", "signature_delta", "text_delta"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": HI, "thinking_token_budget": -1}, "thinking_token_budget"),
        (CHAT, {"messages": HI, "reasoning_effort": "huge"}, "reasoning_effort"),
        (RESPONSES, {"input": "hi", "reasoning": {"effort": "huge"}}, "reasoning.effort"),
        (
            RESPONSES,
            {"input": [{"type": "reasoning", "content": [{"type": "x"}]}]},
            "input.0.content",
        ),
    ],
)
async def test_what_is_wrong_is_named(path: str, body: dict[str, Any], param: str) -> None:
    fleet, text = thinking()
    answer = await posted(path, body, fleet=fleet, text=text)
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
    ],
)
async def test_a_budget_of_a_message_has_to_leave_room(fields: dict[str, Any], word: str) -> None:
    fleet, text = thinking()
    answer = await posted(
        MESSAGES, {"messages": HI, "max_tokens": 9} | fields, fleet=fleet, text=text
    )
    assert answer.status == 400
    assert answer.json["error"]["message"].startswith(word)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI}),
        (RESPONSES, {"input": "hi"}),
        (MESSAGES, {"messages": HI, "max_tokens": 99}),
    ],
)
async def test_a_stream_cut_within_reasoning_is_resumed_with_the_same_bytes(
    path: str, body: dict[str, Any]
) -> None:
    fleet, text = thinking()
    payload = json.dumps(body | {"stream": True}).encode()

    async def read(server: Surface, **headers: str) -> list[bytes]:
        named = {"idempotency-key": "k"} | {k.replace("_", "-"): v for k, v in headers.items()}
        answer = await server.request("POST", path, body=payload, headers=named)
        assert answer.status == 200
        return [event for event in answer.body.split(b"\n\n") if event]

    async with surface(fleet, text=text) as server:
        whole = await read(server)
        assert await read(server) == whole, "a replay"
        for cut in range(1, len(whole) - 1):
            last = whole[cut - 1].split(b"\n")[0].removeprefix(b"id: ").decode()
            assert await read(server, last_event_id=last) == whole[cut:]
    assert len(fleet.generations) == 1


async def test_a_socket_resumes_reasoning_and_remembers_it() -> None:
    fleet, text = thinking()
    create = {"type": "response.create", "model": MODEL, "input": "hi", "resumable": True}
    async with surface(fleet, text=text) as server:
        async with await open_socket(server) as socket:
            uncut = await socket.answer(create)
            last = uncut[-1]["response"]
            assert [item["type"] for item in last["output"]] == ["reasoning", "message"]
            await socket.answer(create | {"previous_response_id": last["id"]})
        for cut in (2, 5, 9):
            async with await open_socket(server) as socket:
                resume = {"type": "response.resume", "response_id": last["id"]}
                await socket.send(resume | {"sequence_number": cut})
                assert await socket.until("response.completed") == uncut[cut + 1 :]
        second = fleet.generations[1].request
        prompt = await text.decode(second.prompt_ids, skip_special_tokens=False)
        assert f"[assistant]<think>{THOUGHT}</think>It is.<|end|>[user]hi" in prompt


ANALYSIS = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>It is.<|return|>"
CALLING = "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}<|call|>"


@pytest.mark.parametrize("answer", [FINAL, CALLING])
async def test_harmony_is_read_by_the_reader_of_its_calls(answer: str) -> None:
    text, ids = await gpt_oss(ANALYSIS + answer)
    fleet = FakeFleet(writing(text, ids))
    is_call = answer is CALLING
    tools = {"tools": [CLOCK]} if is_call else {}
    async with surface(fleet, text=text) as server:
        body = {"messages": HI, "max_tokens": 999, **tools}
        whole = (await server.post(CHAT, body)).json
        chunks = (await server.post(CHAT, body | {"stream": True})).events[:-1]
        response = (await server.post(RESPONSES, {"input": "hi", "max_output_tokens": 999})).json
        message = (await server.post(MESSAGES, {"messages": HI, "max_tokens": 999})).json
    said = whole["choices"][0]["message"]
    assert said["reasoning_content"] == THOUGHT
    assert said["content"] == (None if is_call else "It is.")
    assert ("tool_calls" in said) == is_call
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THOUGHT
    kinds = ("function_call", "tool_use") if is_call else ("message", "text")
    assert [item["type"] for item in response["output"]] == ["reasoning", kinds[0]]
    assert [block["type"] for block in message["content"]] == ["thinking", kinds[1]]
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] >= len(THOUGHT)


async def test_a_budget_ends_harmonys_analysis_but_not_a_demanded_call() -> None:
    text, ids = await gpt_oss(ANALYSIS + FINAL)
    fleet = FakeFleet(writing(text, ids))
    bounded = {"messages": HI, "thinking_token_budget": 40}
    demanded = {"tools": [CLOCK], "tool_choice": "required"}
    async with surface(fleet, text=text) as server:
        await server.post(CHAT, bounded)
        await server.post(CHAT, bounded | demanded)
        await server.post(CHAT, bounded | {"response_format": {"type": "json_object"}})
        free, called, formed = (g.request.sampling.reasoning for g in fleet.generations)
    assert free is not None
    assert called is not None
    assert (free.budget, free.is_in_grammar) == (40, False)
    forced = await text.decode(free.forced, skip_special_tokens=False)
    assert forced == "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert (called.budget, called.is_in_grammar) == (None, True)
    assert formed is not None
    assert formed.closings == free.closings[:1], "a call cannot follow the answer's format"


async def test_calls_that_reasoning_repeats_end_nothing() -> None:
    repeated = [OPEN_ID, *CALL.encode(), *CALL.encode(), CLOSE_ID, *CALL.encode(), EOS_ID]
    body = {"messages": HI, "tools": [CLOCK], "tool_choice": "required", "max_tokens": 999}
    (choice,) = (await answered(CHAT, body, repeated))["choices"]
    assert choice["message"]["reasoning_content"] == CALL + CALL
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}),
        (CHAT, {"chat_template_kwargs": {"thinking": True}}),
        (MESSAGES, {"max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 5}}),
    ],
)
async def test_reasoning_is_turned_on_by_whatever_the_template_calls_its_switch(
    path: str, body: dict[str, Any]
) -> None:
    for switch in ("thinking", "enable_thinking"):
        template = TEMPLATE + f"{{% if {switch} %}}(on){{% endif %}}"
        assert (await asked(path, {"messages": HI, **body}, template))[0].endswith("(on)")
        assert not (await asked(CHAT, {"messages": HI}, template))[0].endswith("(on)")

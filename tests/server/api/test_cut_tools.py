"""Tests of tool calls that are truncated, repeated or written with special tokens, in the answers
of each API."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from server.contract.generation import Delta, Finished, FinishReason
from server.scheduling.output import Relay, RelayEnd
from server.text.tool_forms.tool_calls import MISTRAL
from tests.server.support.fakes import FakeFleet, saying
from tests.server.support.surface import MODEL, asked_of, posted, surface
from tests.server.text.tool_cases import hermes, joined
from tests.server.tiny_text import tiny_text
from transport.frames import TokenRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from server.contract.generation import GenerationRequest
    from tests.server.support.fakes import FakeGeneration
    from tests.server.support.surface import Answer

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
OLLAMA = "/api/chat"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
HI = [{"role": "user", "content": "hi"}]
ASKS: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": HI,
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
    },
    MESSAGES: {
        "model": MODEL,
        "max_tokens": 400,
        "messages": HI,
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
    },
    RESPONSES: {
        "input": "hi",
        "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}],
    },
}
ASKS[OLLAMA] = {"model": MODEL, **ASKS[CHAT]}
FIRST, SECOND = ({"name": "weather", "arguments": {"city": city}} for city in ("Bonn", "Rome"))
TOLD = [json.dumps(call["arguments"]) for call in (FIRST, SECOND)]
BOTH = "Hm. " + hermes(FIRST, SECOND)
CUTS = [BOTH.index("\n{"), BOTH.index("ther"), BOTH.index("nn"), BOTH.rindex("tool_call>\n{")]
CUTS += [BOTH.rindex("Ro"), BOTH.rindex("</tool") + 4]


def in_pieces(
    text: str, reason: FinishReason = FinishReason.LENGTH, stride: int = 3
) -> Callable[[FakeGeneration], None]:
    """Return a script that generates this text in small pieces, with this end."""
    return saying(*(text[i : i + stride] for i in range(0, len(text), stride)), reason=reason)


def of_chat(answer: Answer) -> tuple[str, list[str], str]:
    """Return text, arguments of calls and the reason of the end."""
    (choice,) = answer.json["choices"]
    calls = choice["message"].get("tool_calls", ())
    told = [call["function"]["arguments"] for call in calls]
    return choice["message"]["content"] or "", told, choice["finish_reason"]


def of_chat_stream(answer: Answer) -> tuple[str, list[str], str]:
    text, told, reason = "", [], ""
    for event in answer.events[:-1]:
        (choice,) = event["choices"]
        text += choice["delta"].get("content") or ""
        reason = choice["finish_reason"] or reason
        for call in choice["delta"].get("tool_calls", ()):
            told += [""] * (call["index"] + 1 - len(told))
            told[call["index"]] += call["function"]["arguments"]
    return text, told, reason


def of_message(answer: Answer) -> tuple[str, list[str], str]:
    blocks = answer.json["content"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    told = [json.dumps(block["input"]) for block in blocks if block["type"] == "tool_use"]
    return text, told, answer.json["stop_reason"]


def of_message_stream(answer: Answer) -> tuple[str, list[str], str]:
    text, told, reason = "", {}, ""
    for name, data in answer.named_events:
        if name == "content_block_start" and data["content_block"]["type"] == "tool_use":
            told[data["index"]] = ""
        if name == "content_block_delta":
            text += data["delta"].get("text", "")
            if data["index"] in told:
                told[data["index"]] += data["delta"]["partial_json"]
        if name == "message_delta":
            reason = data["delta"]["stop_reason"]
    return text, list(told.values()), reason


def of_response(answer: Answer) -> tuple[str, list[str], str]:
    return of_document(answer.json)


def of_response_stream(answer: Answer) -> tuple[str, list[str], str]:
    events = answer.named_events
    deltas = [data["delta"] for name, data in events if name == "response.output_text.delta"]
    name, last = events[-1]
    text, told, status = of_document(last["response"])
    assert name == f"response.{status}"
    assert text == "".join(deltas)
    return text, told, status


def of_document(response: dict[str, Any]) -> tuple[str, list[str], str]:
    items = response["output"]
    text = "".join(i["content"][0]["text"] for i in items if i["type"] == "message")
    told = [item["arguments"] for item in items if item["type"] == "function_call"]
    return text, told, response["status"]


def of_ollama(answer: Answer) -> tuple[str, list[str], str]:
    """Return the same for Ollama's lines, or for the one line of a whole answer."""
    lines = [json.loads(line) for line in answer.body.splitlines()]
    text = "".join(line["message"]["content"] for line in lines)
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    return text, [json.dumps(c["function"]["arguments"]) for c in calls], lines[-1]["done_reason"]


READERS = [
    pytest.param(CHAT, False, of_chat, "length", id="chat"),
    pytest.param(CHAT, True, of_chat_stream, "length", id="chat, streamed"),
    pytest.param(MESSAGES, False, of_message, "max_tokens", id="messages"),
    pytest.param(MESSAGES, True, of_message_stream, "max_tokens", id="messages, streamed"),
    pytest.param(RESPONSES, False, of_response, "incomplete", id="responses"),
    pytest.param(RESPONSES, True, of_response_stream, "incomplete", id="responses, streamed"),
    pytest.param(OLLAMA, False, of_ollama, "length", id="ollama"),
    pytest.param(OLLAMA, True, of_ollama, "length", id="ollama, streamed"),
]


@pytest.mark.parametrize(("path", "is_streamed", "read", "reason"), READERS)
async def test_a_call_that_is_cut_by_max_tokens_is_never_text(
    path: str,
    is_streamed: bool,
    read: Callable[[Answer], tuple[str, list[str], str]],
    reason: str,
) -> None:
    async with surface() as server:
        for cut in CUTS:
            server.fleet.script = in_pieces(BOTH[:cut])
            asked = {**ASKS[path], "stream": is_streamed}
            if path == MESSAGES:
                asked["max_tokens"] = cut
            text, told, end = read(await server.post(path, asked))
            assert text.strip() == "Hm."
            *whole, last = told or [""]
            assert whole == TOLD[: len(whole)]
            # Of a truncated call, what was generated is returned. It is not a valid object for
            # Messages, and Ollama's clients would run it, so they get no such call.
            assert TOLD[len(whole)].startswith(last) or (path == MESSAGES and last == "{}")
            assert path != OLLAMA or told == [one for one in TOLD if one in BOTH[:cut]]
            assert end == reason


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_stop_string_within_a_call_leaves_no_half_of_it_as_text(is_streamed: bool) -> None:
    answer = await posted(
        CHAT,
        {**ASKS[CHAT], "stream": is_streamed},
        fleet=FakeFleet(saying("Hm. <tool_call>", '\n{"', stop="name")),
    )
    text, told, reason = (of_chat_stream if is_streamed else of_chat)(answer)
    assert (text, told, reason) == ("Hm. ", [], "stop")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_call_that_a_stop_string_cut_is_not_told_as_one_to_run(is_streamed: bool) -> None:
    async with surface(
        FakeFleet(saying('<tool_call>{"name": "weather", "arguments": {"city": "B', stop="END"))
    ) as server:
        answer = await server.post(CHAT, {**ASKS[CHAT], "stream": is_streamed})
        message = (await server.post(MESSAGES, ASKS[MESSAGES])).json
    text, told, reason = (of_chat_stream if is_streamed else of_chat)(answer)
    assert (text, told, reason) == ("", ['{"city": "B'], "stop")
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")


async def test_a_call_that_a_stop_token_cut_is_not_told_as_one_to_run() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "B#'

    def script(generation: FakeGeneration) -> None:
        relay, end = Relay(generation.request, PLAIN), None
        for position, token_id in enumerate(text.encode()):
            end = relay.push(TokenRow(b"r" * 16, 0, position, token_id), now=1.0)
        assert end is not None
        generation.push(*relay.mailbox.take(now=1.0))
        generation.push(Finished(end.reason, generation.usage, end.stop_string, "", *end[2:]))

    async with surface(FakeFleet(script)) as server:
        asked = {**ASKS[CHAT], "stop_token_ids": [ord("#")]}
        whole = of_chat(await server.post(CHAT, asked))
        streamed = of_chat_stream(await server.post(CHAT, asked | {"stream": True}))
        asked = {**ASKS[RESPONSES], "stop_token_ids": [ord("#")]}
        document = (await server.post(RESPONSES, asked)).json
        events = (await server.post(RESPONSES, asked | {"stream": True})).named_events
    assert whole == streamed == ("", ['{"city": "B'], "stop")
    (done,) = [data["item"] for name, data in events if name == "response.output_item.done"]
    for response in (document, events[-1][1]["response"]):
        (call,) = response["output"]
        assert response["status"] == "completed"
        assert call["status"] == done["status"] == "incomplete"
        assert call["arguments"] == '{"city": "B'


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("stop", ["END", None])
async def test_text_that_begins_a_marker_is_told_where_it_was_cut(
    stop: str | None, is_streamed: bool
) -> None:
    def script(generation: FakeGeneration) -> None:
        generation.say("Hm. ", "if a ", "<tool")
        reason = FinishReason.LENGTH if stop is None else FinishReason.STOP
        generation.push(Finished(reason, generation.usage, stop_string=stop))

    async with surface(FakeFleet(script)) as server:
        for path, _, read, _ in [case.values for case in READERS if case.values[1] is is_streamed]:
            answer = await server.post(path, {**ASKS[path], "stream": is_streamed})
            assert read(answer)[0] == "Hm. if a <tool"


async def test_half_of_a_surrogate_pair_in_a_call_fails_no_answer() -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "B\\ud83d"}}</tool_call>'
    async with surface(FakeFleet(in_pieces(call, FinishReason.STOP))) as server:
        message = (await server.post(MESSAGES, ASKS[MESSAGES])).json
        asked = {"model": MODEL, "messages": HI, "tools": ASKS[CHAT]["tools"], "stream": False}
        ollama = (await server.post("/api/chat", asked)).json
    (block,) = message["content"]
    (called,) = ollama["message"]["tool_calls"]
    assert block["input"] == called["function"]["arguments"] == {"city": "B\ufffd"}


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_calls_that_have_to_be_made_are_made_once(is_streamed: bool) -> None:
    text = "\n".join([hermes(FIRST, SECOND)] * 3)
    fleet = FakeFleet(in_pieces(text, FinishReason.STOP))
    async with surface(fleet) as server:
        asked = {**ASKS[CHAT], "stream": is_streamed}
        forced = await server.post(CHAT, asked | {"tool_choice": "required"})
        free = await server.post(CHAT, asked)
        requests = [generation.request for generation in fleet.generations]
    read = of_chat_stream if is_streamed else of_chat
    assert read(forced) == ("", TOLD, "tool_calls")
    # Repeats are not dropped if the model calls voluntarily.
    assert read(free) == ("", TOLD * 3, "tool_calls")
    assert [request.watch is None for request in requests] == [False, True]


def relayed(request: GenerationRequest, token_ids: Sequence[int]) -> tuple[str, RelayEnd | None]:
    """Return the text that a request's tokens become, and how they end."""
    relay, end = Relay(request, TEXT), None
    for position, token_id in enumerate(token_ids):
        end = relay.push(TokenRow(b"r" * 16, 0, position, token_id), now=1.0)
        if end is not None:
            break
    return "".join(e.text for e in relay.mailbox.take(now=1.0) if isinstance(e, Delta)), end


TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}"
TEXT = tiny_text(template=TEMPLATE, specials=("[TOOL_CALLS]",))
PLAIN = tiny_text()
CALLS = f'[TOOL_CALLS][{{"name": "weather", "arguments": {TOLD[0]}}}]'
NUM_BYTES = 256


async def request_of(**fields: object) -> GenerationRequest:
    """Return the generation request of a chat with a model of Mistral's format."""
    return await asked_of(CHAT, {**ASKS[CHAT], **fields}, text=TEXT)


async def test_markers_that_are_special_tokens_reach_the_reader_of_calls() -> None:
    assert TEXT.tool_form is MISTRAL
    request = await request_of()
    ids = await TEXT.encode(CALLS)
    assert ids[0] > NUM_BYTES
    text, _ = relayed(request, ids)
    assert joined(MISTRAL.reader().push(text)).calls == [("weather", TOLD[0])]
    # Without tools nothing is parsed, so the token is hidden like every special token.
    text, _ = relayed(await request_of(tools=None), ids)
    assert text == CALLS.removeprefix("[TOOL_CALLS]")


async def test_a_completion_ends_behind_the_first_call_that_is_repeated() -> None:
    request = await request_of(tool_choice="required")
    call = CALLS.removeprefix("[TOOL_CALLS][").removesuffix("]")
    ids = await TEXT.encode(f"[TOOL_CALLS][{call}, {call}, {call}]")
    text, end = relayed(request, ids)
    assert end == RelayEnd(FinishReason.STOP)
    assert text == f"[TOOL_CALLS][{call}, {call}".removesuffix("}")
    _, end = relayed(await request_of(tool_choice="required", parallel_tool_calls=False), ids)
    assert end is None


async def test_what_has_to_be_written_begins_with_the_special_token() -> None:
    request = await request_of(tool_choice="required")
    assert request.sampling.grammar is not None
    (marker, *_) = await TEXT.encode(CALLS)
    assert f"call: <[{marker}]>" in request.sampling.grammar.text


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_tools_that_nothing_tells_the_model_of_are_refused(path: str) -> None:
    async with surface(text=tiny_text(generic_tools=False)) as server:
        (card,) = (await server.request("GET", "/v1/models")).json["data"]
        assert card["tools"] == "none"
        refused = await server.post(path, ASKS[path])
        assert refused.status == 400
        error = refused.json["error"]
        assert "chat template" in error["message"]
        assert "without --no-generic-tools" in error["message"]
        assert path == MESSAGES or error["param"] == "tools"
        choice = {"type": "any"} if path == MESSAGES else "required"
        none = {"type": "none"} if path == MESSAGES else "none"
        for demanded in (choice, none):
            answer = await server.post(path, {**ASKS[path], "tool_choice": demanded})
            assert answer.status == 200

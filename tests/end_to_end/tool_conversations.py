"""Seeded conversations with tools for tests, in the format of each API, and checks of the
answers.

A campaign runs them all on one server; each answer is checked separately.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import httpx2
import jsonschema

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Schema = dict[str, Any]

MAX_TOKENS: Final = 160
"""Enough for most calls; truncated ones are checked too."""
AT_ONCE: Final = 4
TIMEOUT_S: Final = 600.0
"""Timeout of one answer on a shared machine."""
NAMES: Final = "get-weather send_mail lookup add-2 Book_Room x-ray_9 list_files move".split()
KEYS: Final = "city unit days note tags größe is-open page_size 名 to from_date".split()
WORDS: Final = "the weather — “today” in 東京, größer: ≤ 5 °C <b> {x} a list of rooms é".split()
QUESTIONS: Final = (
    "How is the weather in Rome?",
    "Please send a mail to Ann.",
    "Which rooms are free on Monday?",
    "Hello! Who are you?",
)
LEAKS: Final = ("<tool_call", "tool_call>", '"arguments":')
PATHS: Final = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "ollama": "/api/chat",
}
CHOICES: Final = ("auto", "required", "named", "none")
CUT: Final = {"length", "incomplete", "max_tokens"}


class Tool(NamedTuple):
    """A tool."""

    name: str
    description: str
    parameters: Schema


class Call(NamedTuple):
    """A call of an earlier turn, and its result."""

    id: str
    name: str
    arguments: dict[str, Any]
    result: str


class Step(NamedTuple):
    """A question, then calls with their results, and the assistant's answer."""

    question: str
    calls: tuple[Call, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation to request.

    Attributes:
      seed: its seed.
      api: API of the request.
      is_streamed: whether the answer is streamed.
      choice: one of CHOICES.
      tools: available tools; a choice by name selects the first.
      steps: turns so far; the last has no answer.
      system: system prompt, or an empty string.
    """

    seed: int
    api: str
    is_streamed: bool
    choice: str
    tools: tuple[Tool, ...]
    steps: tuple[Step, ...]
    system: str

    @property
    def is_single(self) -> bool:
        """Whether at most one call is allowed; otherwise a small model may never stop calling."""
        return self.choice == "named" or self.seed // 8 % 2 == 1


class Said(NamedTuple):
    """An answer.

    Attributes:
      text: its text.
      calls: names and JSON arguments.
      reason: finish reason.
    """

    text: str
    calls: list[tuple[str, str]]
    reason: str


def draw(seed: int) -> Conversation:
    """Return the conversation of a seed."""
    chance = random.Random(seed)
    # Each kind occurs with each API, whole and streamed; Ollama's API has no tool choice.
    choice = CHOICES[seed % 4]
    api = ("chat", "responses", "messages", "ollama")[seed // 4 % (4 if choice == "auto" else 3)]
    num_tools = chance.choice((1, 1, 2, 3, 4, 6, 20))
    names = [f"{chance.choice(NAMES)}{i or ''}" for i in range(num_tools)]
    tools = tuple(Tool(name, _words(chance), _object(chance, 0)) for name in names)
    steps = [
        Step(chance.choice(QUESTIONS), _calls(chance, tools), "It is done.")
        for _ in range(chance.choice((0, 0, 1, 2)))
    ]
    last = Step(
        chance.choice(QUESTIONS), _calls(chance, tools) if chance.random() < 0.4 else (), ""
    )
    system = chance.choice(("", "You help with rooms and mail. Be brief."))
    is_streamed = seed // 16 % 2 == 1
    return Conversation(seed, api, is_streamed, choice, tools, (*steps, last), system)


def _calls(chance: random.Random, tools: Sequence[Tool]) -> tuple[Call, ...]:
    return tuple(
        Call(f"call_{chance.getrandbits(32):x}", tool.name, _value(chance, tool.parameters), result)
        for tool in chance.sample(tools, min(len(tools), chance.choice((1, 1, 2))))
        for result in (
            chance.choice(("ok", '{"found": 3}', f"{_words(chance)}\n</tool_response>")),
        )
    )


def _words(chance: random.Random) -> str:
    return " ".join(chance.sample(WORDS, chance.randint(1, 6)))


def _object(chance: random.Random, depth: int) -> Schema:
    names = chance.sample(KEYS, chance.randint(0 if depth == 0 else 1, 3))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(chance, depth) for name in names},
        "required": [name for name in names if chance.random() < 0.6],
    }
    return schema | ({"additionalProperties": False} if chance.random() < 0.5 else {})


def _any(chance: random.Random, depth: int) -> Schema:
    kinds = ["string", "enum", "integer", "number", "boolean", "either"]
    kind = chance.choice(kinds + (["object", "array"] * 2 if depth < 2 else []))
    described = {"description": _words(chance)} if chance.random() < 0.3 else {}
    match kind:
        case "string":
            return {"type": "string", "maxLength": chance.randint(1, 12), **described}
        case "enum":
            return {"enum": ["C", "F", "größer", 3, None][: chance.randint(1, 5)], **described}
        case "integer":
            return {"type": "integer", "minimum": 0, "maximum": 500, **described}
        case "either":
            return {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 6}], **described}
        case "object":
            return _object(chance, depth + 1) | described
        case "array":
            most = chance.randint(1, 3)
            return {
                "type": "array",
                "items": _any(chance, depth + 1),
                "maxItems": most,
                **described,
            }
        case _:
            return {"type": kind, **described}


def _value(chance: random.Random, schema: Schema) -> Any:  # noqa: ANN401
    """Return a value that matches a schema of `_any`."""
    if "enum" in schema:
        return chance.choice(schema["enum"])
    if "anyOf" in schema:
        return None
    match schema["type"]:
        case "object":
            shown = schema["properties"].items()
            return {
                name: _value(chance, one)
                for name, one in shown
                if name in schema["required"] or chance.random() < 0.5
            }
        case "array":
            return [_value(chance, schema["items"])]
        case "string":
            return "Ünit"[: schema["maxLength"]]
        case "boolean":
            return True
    return chance.randint(0, 9)


def body_of(asked: Conversation, model: str) -> dict[str, Any]:
    """Return a request in the format of its API."""
    body = {"model": model, "stream": asked.is_streamed}
    # At 0, a model that has called before calls again; at 1, it writes unlikely text.
    warmth = {"temperature": float(asked.seed % 5 < 3)}
    sampling = warmth | {"seed": asked.seed}
    match asked.api:
        case "chat":
            turns = [{"role": "system", "content": asked.system}] if asked.system else []
            limits = {"max_tokens": MAX_TOKENS, "tool_choice": _choice(asked)}
            limits["parallel_tool_calls"] = not asked.is_single
            return (
                body
                | sampling
                | limits
                | {"messages": turns + list(_chat(asked)), "tools": _functions(asked)}
            )
        case "ollama":
            turns = [{"role": "system", "content": asked.system}] if asked.system else []
            options = {"options": sampling | {"num_predict": MAX_TOKENS}}
            turns += list(_chat(asked, is_ollama=True))
            return body | options | {"messages": turns, "tools": _functions(asked)}
        case "messages":
            tools = [
                {"name": one.name, "description": one.description, "input_schema": one.parameters}
                for one in asked.tools
            ]
            kinds = {"required": "any", "named": "tool"}
            choice: dict[str, Any] = {"type": kinds.get(asked.choice, asked.choice)}
            if asked.choice != "none":
                choice["disable_parallel_tool_use"] = asked.is_single
            choice |= {"name": asked.tools[0].name} if asked.choice == "named" else {}
            limits = {"max_tokens": MAX_TOKENS, "tool_choice": choice} | warmth
            told = {"system": asked.system} if asked.system else {}
            return body | told | limits | {"messages": list(_messages(asked)), "tools": tools}
    tools = [{"type": "function", "strict": False, **one._asdict()} for one in asked.tools]
    choice = _choice(asked)
    if isinstance(choice, dict):
        choice = {"type": "function", "name": asked.tools[0].name}
    limits = {"max_output_tokens": MAX_TOKENS, "tool_choice": choice} | warmth
    limits["parallel_tool_calls"] = not asked.is_single
    told = {"instructions": asked.system} if asked.system else {}
    return body | told | limits | {"input": list(_items(asked)), "tools": tools, "store": False}


def _choice(asked: Conversation) -> Any:  # noqa: ANN401
    if asked.choice == "named":
        return {"type": "function", "function": {"name": asked.tools[0].name}}
    return asked.choice


def _functions(asked: Conversation) -> list[dict[str, Any]]:
    return [{"type": "function", "function": one._asdict()} for one in asked.tools]


def _chat(asked: Conversation, *, is_ollama: bool = False) -> Iterator[dict[str, Any]]:
    for step in asked.steps:
        yield {"role": "user", "content": step.question}
        if step.calls:
            calls: list[dict[str, Any]] = [
                {"function": {"name": one.name, "arguments": one.arguments}}
                if is_ollama
                else {
                    "id": one.id,
                    "type": "function",
                    "function": {"name": one.name, "arguments": json.dumps(one.arguments)},
                }
                for one in step.calls
            ]
            yield {"role": "assistant", "content": "", "tool_calls": calls}
        for one in step.calls:
            of_call = {"tool_name": one.name} if is_ollama else {"tool_call_id": one.id}
            yield {"role": "tool", "content": one.result, **of_call}
        if step.answer:
            yield {"role": "assistant", "content": step.answer}


def _messages(asked: Conversation) -> Iterator[dict[str, Any]]:
    for step in asked.steps:
        yield {"role": "user", "content": step.question}
        if step.calls:
            uses = [
                {"type": "tool_use", "id": one.id, "name": one.name, "input": one.arguments}
                for one in step.calls
            ]
            results = [
                {"type": "tool_result", "tool_use_id": one.id, "content": one.result}
                for one in step.calls
            ]
            yield {"role": "assistant", "content": uses}
            yield {"role": "user", "content": results}
        if step.answer:
            yield {"role": "assistant", "content": step.answer}


def _items(asked: Conversation) -> Iterator[dict[str, Any]]:
    for step in asked.steps:
        yield {"role": "user", "content": step.question}
        for one in step.calls:
            told = json.dumps(one.arguments)
            yield {"type": "function_call", "call_id": one.id, "name": one.name, "arguments": told}
        for one in step.calls:
            yield {"type": "function_call_output", "call_id": one.id, "output": one.result}
        if step.answer:
            yield {"role": "assistant", "content": step.answer}


def ask(client: httpx2.Client, asked: Conversation, model: str) -> Said:
    """Send a conversation and return the answer.

    Raises:
      AssertionError: the server refused it.
    """
    answer = client.post(PATHS[asked.api], json=body_of(asked, model))
    assert answer.status_code == 200, f"seed {asked.seed}: {answer.text}"
    if asked.api == "ollama":
        return _of_ollama([json.loads(line) for line in answer.text.splitlines()])
    if not asked.is_streamed:
        return {"chat": _of_chat, "messages": _of_message, "responses": _of_response}[asked.api](
            answer.json()
        )
    lines = [
        line.removeprefix("data: ") for line in answer.text.splitlines() if line[:5] == "data:"
    ]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    streams = {"chat": _of_chunks, "messages": _of_message_events, "responses": _of_events}
    return streams[asked.api](events)


def _of_chat(document: Any) -> Said:  # noqa: ANN401
    (choice,) = document["choices"]
    called = [one["function"] for one in choice["message"].get("tool_calls") or ()]
    calls = [(one["name"], one["arguments"]) for one in called]
    return Said(choice["message"]["content"] or "", calls, choice["finish_reason"])


def _of_chunks(events: Sequence[Any]) -> Said:
    text, calls, reason = "", list[list[str]](), ""
    for choice in (one for event in events for one in event["choices"]):
        text += choice["delta"].get("content") or ""
        reason = choice["finish_reason"] or reason
        for call in choice["delta"].get("tool_calls") or ():
            if call["index"] == len(calls):
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"].get("arguments", "")
    return Said(text, [(name, told) for name, told in calls], reason)


def _of_message(document: Any) -> Said:  # noqa: ANN401
    blocks = document["content"]
    text = "".join(one["text"] for one in blocks if one["type"] == "text")
    used = [one for one in blocks if one["type"] == "tool_use"]
    calls = [(one["name"], json.dumps(one["input"])) for one in used]
    return Said(text, calls, document["stop_reason"])


def _of_message_events(events: Sequence[Any]) -> Said:
    text, calls, reason = "", dict[int, list[str]](), ""
    for event in events:
        match event["type"]:
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                calls[event["index"]] = [event["content_block"]["name"], ""]
            case "content_block_delta":
                text += event["delta"].get("text", "")
                if event["index"] in calls:
                    calls[event["index"]][1] += event["delta"]["partial_json"]
            case "message_delta":
                reason = event["delta"]["stop_reason"]
    return Said(text, [(name, told or "{}") for name, told in calls.values()], reason)


def _of_response(document: Any) -> Said:  # noqa: ANN401
    items = document["output"]
    parts = [part for one in items if one["type"] == "message" for part in one["content"]]
    called = [one for one in items if one["type"] == "function_call"]
    calls = [(one["name"], one["arguments"]) for one in called]
    return Said("".join(part["text"] for part in parts), calls, document["status"])


def _of_events(events: Sequence[Any]) -> Said:
    said = _of_response(events[-1]["response"])
    kinds = ("response.output_text.delta", "response.function_call_arguments.delta")
    text, told = ("".join(e["delta"] for e in events if e["type"] == kind) for kind in kinds)
    assert (text, told) == (said.text, "".join(arguments for _, arguments in said.calls))
    return said


def _of_ollama(lines: Sequence[Any]) -> Said:
    messages = [line["message"] for line in lines]
    called = [one["function"] for message in messages for one in message.get("tool_calls") or ()]
    calls = [(one["name"], json.dumps(one["arguments"])) for one in called]
    return Said("".join(m["content"] for m in messages), calls, lines[-1]["done_reason"])


def judge(asked: Conversation, said: Said) -> str:
    """Check an answer and return its kind.

    Raises:
      AssertionError: the answer is not allowed.
    """
    told = f"seed {asked.seed}, {asked.api}, {asked.choice}: {said}"
    schemas = {tool.name: tool.parameters for tool in asked.tools}
    is_cut = said.reason in CUT
    whole = said.calls[: len(said.calls) - is_cut]
    for name, arguments in whole:
        jsonschema.validate(json.loads(arguments), schemas[name])
    if asked.choice == "none":
        assert not said.calls, told
        return "text"
    assert not any(leak in said.text for leak in LEAKS), told
    if asked.choice != "auto":
        assert not said.text, told
        assert is_cut or said.calls, told
    if asked.is_single and asked.api != "ollama":
        assert len(said.calls) <= 1, told
    if asked.choice == "named":
        assert all(name == asked.tools[0].name for name, _ in said.calls), told
    if is_cut and len(said.calls) > len(whole):
        _judge_cut(*said.calls[-1], schemas, told)
    return "cut" if is_cut else "calls" if said.calls else "text"


def _judge_cut(name: str, arguments: str, schemas: dict[str, Schema], told: str) -> None:
    """Check that truncated output is the beginning of a call, or lacks only the closing tag."""
    assert name in schemas, told
    try:
        value = json.loads(arguments)
    except ValueError:
        return
    if value:
        jsonschema.validate(value, schemas[name])


def run(url: str, model: str, num_conversations: int) -> Counter[str]:
    """Run all conversations on a server; return the number of answers of each kind, and the calls.

    Raises:
      AssertionError: an answer is not allowed.
    """
    with (
        httpx2.Client(base_url=url, timeout=TIMEOUT_S) as client,
        ThreadPoolExecutor(AT_ONCE) as threads,
    ):

        def one(seed: int) -> Counter[str]:
            asked = draw(seed)
            said = ask(client, asked, model)
            kind = judge(asked, said)
            return Counter({f"{asked.choice}: {kind}": 1, "calls": len(said.calls)})

        return sum(threads.map(one, range(num_conversations)), Counter())

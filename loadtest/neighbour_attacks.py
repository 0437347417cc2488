"""Attacks by a tenant that stays within all limits, each in a separate process.

Bodies are built once and sent as bytes, to save CPU on the shared machine; a fixed-width number
makes each request unique. A process reads a line of JSON with the duration, and writes the counts
of its answers: see `harness.lines`.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import trio

from .campaign.misbehaving import ws_handshake, ws_text_frame
from .harness.lines import say
from .harness.tenants import key_of
from .schemas import costly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ATTACKER, SPENT = "attacker", "spent"
"""Attacking tenants: one with high limits, and one with few requests per minute."""
NUMBER: Final = b"@000000000"
"""Placeholder for the request's number in a body."""
MARK: Final = NUMBER.decode()
ANSWER_DEADLINE_S: Final = 60.0
RECEIVE_BYTES: Final = 1 << 16
STATUS_BYTES: Final = slice(9, 12)
LEFT: Final = "left"
BROKEN: Final = "broken"
CHAT: Final = "/v1/chat/completions"
MIB: Final = 1 << 20
CHOSEN: Final = {"type": "function", "function": {"name": "f0"}}
"""The demo model's template does not support tools: it needs a tool choice."""
GRAMMARS: Final = {"grammar_rules": "nullable optional", "grammar_nested": "deep schema"}
"""The most expensive grammars that are still served (`schemas.costly`)."""
GRAMMAR_TOKENS: Final = 300
SOME_WORDS: Final = "the quick brown fox jumps over the lazy dog and runs on into the wood "


@dataclass(frozen=True, slots=True)
class Attack:
    """A kind of request, repeated after each answer.

    Attributes:
      path: URL path.
      body: returns the body; None for a GET.
      connections: number of concurrent connections.
      tenant: tenant of its API key.
      leaves_after_s: time until the client disconnects; None to wait for the answer.
      is_chunked: whether the body is sent in chunks of one byte.
      is_websocket: whether each request is a message on one WebSocket.
      field: additional header field with its line end; empty for none.
      meets_schemas: whether the victim's chats have schemas, which wait for the same process.
    """

    path: str
    body: Callable[[], bytes] | None
    connections: int = 4
    tenant: str = ATTACKER
    leaves_after_s: float | None = None
    is_chunked: bool = False
    is_websocket: bool = False
    field: str = ""
    meets_schemas: bool = False


def _json(**fields: Any) -> bytes:  # noqa: ANN401
    return json.dumps(fields, ensure_ascii=False).encode()


def _chat(content: Any = MARK, **more: Any) -> bytes:  # noqa: ANN401
    return _json(**{"messages": [{"role": "user", "content": content}], "max_tokens": 4} | more)


def _messages(number: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": MARK}] + [{"role": "user", "content": "a"}] * (number - 1)


def _form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}


def _tool(number: int, num_chars: int) -> dict[str, Any]:
    text = (SOME_WORDS * (num_chars // len(SOME_WORDS) + 1))[:num_chars]
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": text}}}
    return {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}


def tools_together() -> bytes:
    """Return a chat with the maximum number of tools, 100 kB in total."""
    return _chat(tools=[_tool(number, 700) for number in range(128)], tool_choice=CHOSEN)


def tools_each() -> bytes:
    """Return a chat with the maximum number of tools, 100 kB each."""
    others = [_tool(number, 100_000) for number in range(1, 128)]
    return _chat(tools=[_tool(0, 10), *others], tool_choice=CHOSEN)


def calls() -> bytes:
    """Return a chat with megabytes of tool-call arguments in its history."""
    call = {"name": "f", "arguments": json.dumps({"a": SOME_WORDS * 200})}
    asked = [{"id": "c", "type": "function", "function": call}]
    turn = {"role": "assistant", "content": None, "tool_calls": asked * 64}
    return _json(messages=[*_messages(1), *[turn] * 4], max_tokens=4)


def enum() -> bytes:
    """Return a chat with an enum of the maximum schema size."""
    words = [f"{MARK}{number:05d}" for number in range(861)]
    return _chat(response_format=_form({"enum": words}))


def blocks() -> bytes:
    """Return a request in Anthropic's format with many content blocks."""
    parts = [{"type": "text", "text": MARK}] + [{"type": "text", "text": "a"}] * 60_000
    return _json(model="demo", messages=[{"role": "user", "content": parts}])


def keys() -> bytes:
    """Return a chat with a repeated key in its body."""
    return b'{"messages": [{"role": "user", "content": "a"}]' + b', "user": "a"' * 1_000_000 + b"}"


def grammar(name: str) -> bytes:
    """Return a chat with a grammar that costs more with every token."""
    return _chat(max_tokens=GRAMMAR_TOKENS, min_tokens=GRAMMAR_TOKENS, **costly()[name])


ATTACKS: Final = {
    "detokenize": Attack("/detokenize", lambda: _json(tokens=[65] * 999_999), 2),
    "tools_together": Attack(CHAT, tools_together),
    "tools_each": Attack(CHAT, tools_each),
    "items_counted": Attack(
        "/v1/responses/input_tokens", lambda: _json(input=_messages(2500), model="demo")
    ),
    "prompts_left": Attack(
        "/v1/completions",
        lambda: _json(prompt=[f"{n} {MARK} {SOME_WORDS * 14}" for n in range(32)], max_tokens=64),
        leaves_after_s=1.0,
    ),
    "enum": Attack(CHAT, enum, meets_schemas=True),
    "parts": Attack(
        CHAT,
        lambda: _chat([{"type": "text", "text": ""}] * 60_000),
    ),
    "embeddings": Attack(
        "/v1/embeddings",
        lambda: _json(input=[f"{n} {MARK}" + " a" * 985 for n in range(290)], model="demo"),
    ),
    "chunks": Attack(CHAT, lambda: _chat("a" * 20_000), 8, is_chunked=True),
    "blocks": Attack("/v1/messages/count_tokens", blocks),
    "ollama": Attack("/api/chat", lambda: _json(model="demo", messages=_messages(4096))),
    "bounds": Attack(
        CHAT,
        lambda: _chat(
            stop=["x" * 63 + chr(65 + n) for n in range(16)],
            logit_bias={str(token): -1 for token in range(300)},
            logprobs=True,
            top_logprobs=20,
            max_tokens=64,
            n=8,
            ignore_eos=True,
        ),
        16,
    ),
    "choices": Attack(CHAT, lambda: _chat(n=8, max_tokens=400, ignore_eos=True), 16),
    "deep": Attack(CHAT, lambda: b"[" * (16 * MIB - 1)),
    "calls": Attack(CHAT, calls),
    "frames": Attack(
        "/v1/responses",
        lambda: _json(type="response.create", input=_messages(1900), max_output_tokens=4),
        8,
        is_websocket=True,
    ),
    "idempotent": Attack(
        CHAT, lambda: _chat(max_tokens=1), 16, field=f"idempotency-key: {MARK}\r\n"
    ),
    "models": Attack("/v1/models", None, 32),
    "repeated": Attack(CHAT, keys),
    **{name: Attack(CHAT, partial(grammar, of)) for name, of in GRAMMARS.items()},
    "messages": Attack(CHAT, lambda: _json(messages=_messages(4096)), 40),
    "schemas": Attack(
        CHAT,
        lambda: _chat(response_format=_form({"$ref": "#", "title": MARK})),
        60,
        meets_schemas=True,
    ),
    "messages_spent": Attack(CHAT, lambda: _json(messages=_messages(4096)), 40, SPENT),
    "schemas_spent": Attack(
        CHAT,
        lambda: _chat(response_format=_form({"$ref": "#", "title": MARK})),
        90,
        SPENT,
        meets_schemas=True,
    ),
}


def requests_of(attack: Attack) -> Iterator[bytes]:
    """Yield requests endlessly, each with a new number."""
    if attack.is_websocket:
        body = ws_text_frame(attack.body()) if attack.body else b""
    else:
        body = _request(attack)
    for number in count(1):
        yield body.replace(NUMBER, b"%010d" % number)


def _request(attack: Attack) -> bytes:
    method = "GET" if attack.body is None else "POST"
    body = b"" if attack.body is None else attack.body()
    length = f"content-length: {len(body)}"
    if attack.is_chunked:
        body = b"".join(b"1\r\n%c\r\n" % one for one in body) + b"0\r\n\r\n"
        length = "transfer-encoding: chunked"
    head = (
        f"{method} {attack.path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        f"authorization: Bearer {key_of(attack.tenant)}\r\n{attack.field}"
        f"content-type: application/json\r\n{length}\r\n\r\n"
    )
    return head.encode() + body


async def ask(address: tuple[str, int], request: bytes, leaves_after_s: float | None) -> str:
    """Send a request on a new connection and read its answer to the end.

    Args:
      address: address of the server.
      request: head and body.
      leaves_after_s: time until the client closes; None to wait for the answer.

    Returns:
      The status; `left` if the client closed first, `broken` if the connection broke.
    """
    answer = b""
    stream = await trio.open_tcp_stream(*address)
    async with stream:
        with trio.move_on_after(leaves_after_s or ANSWER_DEADLINE_S) as scope:
            try:
                await stream.send_all(request)
                while part := await stream.receive_some(RECEIVE_BYTES):
                    answer = answer or part
            except trio.BrokenResourceError:
                return answer[STATUS_BYTES].decode() or BROKEN
    return LEFT if scope.cancelled_caught else answer[STATUS_BYTES].decode() or BROKEN


async def send_messages(
    address: tuple[str, int], requests: Iterator[bytes], seen: Counter[str]
) -> None:
    """Open a WebSocket and send messages, each after a reply to the previous one."""
    key = f"\r\nauthorization: Bearer {key_of(ATTACKER)}\r\n\r\n".encode()
    handshake = ws_handshake("hostile", "127.0.0.1").replace(b"\r\n\r\n", key)
    stream = await trio.open_tcp_stream(*address)
    async with stream:
        try:
            await stream.send_all(handshake)
            seen[(await stream.receive_some(RECEIVE_BYTES))[STATUS_BYTES].decode()] += 1
            for request in requests:
                await stream.send_all(request)
                if not await stream.receive_some(RECEIVE_BYTES):
                    return
                seen["messages"] += 1
        except trio.BrokenResourceError:
            seen[BROKEN] += 1


async def keep_asking(
    attack: Attack, address: tuple[str, int], requests: Iterator[bytes], seconds: float
) -> Counter[str]:
    """Attack for some seconds. Return the number of answers by status."""
    seen = Counter[str]()

    async def connect() -> None:
        while True:
            if attack.is_websocket:
                await send_messages(address, requests, seen)
            else:
                seen[await ask(address, next(requests), attack.leaves_after_s)] += 1

    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for _ in range(attack.connections):
                nursery.start_soon(connect)
    return seen


def main(url: str, name: str) -> None:
    """Run an attack per command, until stdin ends."""
    where = urlsplit(url)
    assert where.hostname is not None
    assert where.port is not None
    # With autogrouping, Linux divides CPU time between sessions before nice values count.
    os.setsid()
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")
    attack = ATTACKS[name]
    requests = requests_of(attack)
    for line in sys.stdin:
        seconds = json.loads(line)["seconds"]
        say(trio.run(keep_asking, attack, (where.hostname, where.port), requests, seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The hostile clients of `loadtest.hostile`, and a client that measures the server's liveness.

Every field that might reach a log, a metric or an audit contains `CANARY`.
"""

from __future__ import annotations

import json
import sys
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import trio

from .campaign.misbehaving import chat_request, stall, ws_handshake, ws_text_frame
from .harness.http import connect
from .schemas import costly, hostile

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

CANARY: Final = "xyzzy-4711-plugh"
"""Must never appear in a log, a metric or an audit."""
ANSWER_DEADLINE_S: Final = 60.0
CANARY_PAUSE_S: Final = 0.02
AFTERWARDS: Final = 3
HEAD: Final = "POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\n"
JSON_HEAD: Final = HEAD + "content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
MESSAGES: Final = [{"role": "user", "content": CANARY}]
STALLED_TOKENS: Final = 200
STALL_S: Final = 5.0
"""Longer than the timeouts with which the attacked servers end stalled requests."""
NUM_STALLED: Final = 200
NUM_NAMES: Final = 10_000
NAMES_AT_ONCE: Final = 50
LARGE_AT_ONCE: Final = 4
CROWD: Final = 40
"""Connections that send requests without a pause."""
CROWD_S: Final = 4.0
NUM_PIPELINED: Final = 200
NUM_MESSAGES: Final = 4096
GRAMMAR_TOKENS: Final = 100
"""Some grammars are harmless for their first 64 tokens."""


@dataclass(slots=True)
class Watch:
    """Results of the liveness client.

    Attributes:
      delays_s: times from connecting to the whole answer.
      failures: other answers than 200.
    """

    delays_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


async def watch_health(url: str, seen: Watch) -> None:
    """Send requests until cancelled."""
    where = urlsplit(url)
    request = f"GET /health/live HTTP/1.1\r\nhost: {where.netloc}\r\nconnection: close\r\n\r\n"
    while True:
        began_at = trio.current_time()
        try:
            answer = await exchange(url, request.encode())
        except OSError as error:
            seen.failures.append(repr(error))
        else:
            seen.delays_s.append(trio.current_time() - began_at)
            if not answer.startswith(b"HTTP/1.1 200"):
                seen.failures.append(repr(answer[:100]))
        await trio.sleep(CANARY_PAUSE_S)


async def exchange(url: str, data: bytes) -> bytes:
    """Send bytes and read until the server closes, which may be before it has read them all."""
    stream = await connect(url)
    answer = bytearray()
    async with stream:
        with trio.move_on_after(ANSWER_DEADLINE_S):
            try:
                await stream.send_all(data)
                while part := await stream.receive_some(65536):
                    answer += part
            except trio.BrokenResourceError:
                return bytes(answer)
    return bytes(answer)


async def _many(count: int, act: Callable[[int], Awaitable[object]]) -> None:
    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(act, number)


async def _hold(url: str, data: bytes, count: int, seconds: float) -> None:
    """Open connections, send a partial request, and close after a while."""

    async def begin(_: int) -> None:
        stream = await connect(url)
        async with stream:
            await stream.send_all(data)
            await trio.sleep(seconds)

    await _many(count, begin)


def post(url: str, body: bytes, *, close: bool = True) -> bytes:
    """Return a request for a chat completion."""
    return chat_request("hostile", urlsplit(url).netloc, body, close=close)


def _chat(**more: Any) -> bytes:  # noqa: ANN401
    return json.dumps({"messages": MESSAGES, "max_tokens": 4} | more).encode()


async def slow_heads(url: str) -> None:
    """A8: send heads that never end."""
    await _hold(url, b"GET / HTTP/1.1\r\nhost: ", 60, 1.0)


async def slow_bodies(url: str) -> None:
    """A8: send bodies that never end."""
    head = JSON_HEAD.format(host=urlsplit(url).netloc, length=4000)
    await _hold(url, head.encode() + b'{"messages"', 60, 1.0)


async def stalled_readers(url: str, share: float = 1.0) -> None:
    """A9: request answers and do not read them."""

    async def starve(number: int) -> None:
        client = await stall(url, number, STALLED_TOKENS)
        async with client.stream:
            await trio.sleep(STALL_S)

    await _many(int(NUM_STALLED * share), starve)


async def header_bombs(url: str) -> None:
    """A10: send heads beyond all limits."""
    large = f"GET / HTTP/1.1\r\nx: {CANARY}{'y' * 20_000}\r\n\r\n".encode()
    many = b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 2000 + b"\r\n"
    await _many(100, lambda number: exchange(url, large if number % 2 else many))


async def rapid_reset(url: str) -> None:
    """A11: send requests and disconnect before an answer is possible."""

    async def ask_and_leave(_: int) -> None:
        stream = await connect(url)
        await stream.send_all(post(url, _chat(stream=True)))
        await trio.aclose_forcefully(stream)

    await _many(150, ask_and_leave)


async def smuggling(url: str) -> None:
    """A12: send heads that two parsers interpret differently."""
    host = urlsplit(url).netloc
    rest = b"0\r\n\r\nGET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"
    heads = (
        "transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n",
        "content-length: 4\r\ncontent-length: 5\r\n\r\n",
        "transfer-encoding: identity, chunked\r\n\r\n",
        "x: y\r\n folded\r\n\r\n",
        "x: y\n\n",
    )
    for head in heads:
        await exchange(url, (HEAD.format(host=host) + head).encode() + rest)


async def json_bombs(url: str) -> None:
    """A14: inputs that crash parsers."""
    bodies = (
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"temperature": 1e999}',
        b'{"seed": ' + b"9" * 100_000 + b"}",
        b'{"a": 1, "a": 2}',
        b'{"prompt": "\\ud800"}',
        b"\xff\xfe{\0}\0",
    )
    await _many(35, lambda number: exchange(url, post(url, bodies[number % len(bodies)])))


async def parameter_bombs(url: str) -> None:
    """A15: send small requests with large parameters."""
    bombs: tuple[dict[str, Any], ...] = (
        {"n": 10**9},
        {"seed": 2**200},
        {"top_logprobs": 10**9, "logprobs": True},
        {"logit_bias": {str(token): 1 for token in range(5000)}},
        {"stop": ["x" * 64] * 5000},
        {"max_tokens": 10**18},
    )
    await _many(36, lambda number: exchange(url, post(url, _chat(**bombs[number % len(bombs)]))))


async def prompt_bombs(url: str) -> None:
    """A16: send prompts of many megabytes, with letters that tokenizers are slow at."""
    for text in ("a" * 8_000_000, " " * 4_000_000, "\u0301" * 1_000_000):
        body = _chat(messages=[{"role": "user", "content": text}])
        await exchange(url, post(url, body))


async def grammars(url: str) -> None:
    """A18, A31: send grammars and schemas that take forever to compile or at every token."""
    more = {"max_tokens": GRAMMAR_TOKENS}
    bodies = [_chat(**fields, **more) for fields in (hostile() | costly()).values()]
    await _many(len(bodies), lambda number: exchange(url, post(url, bodies[number])))


async def websocket_floods(url: str) -> None:
    """A24: send bombs and floods on WebSockets without reading the answers."""
    host = urlsplit(url).netloc
    text = ws_text_frame(b"{}")
    floods = (
        text * 2000,
        b"\x89\x80\0\0\0\0" * 2000,
        b"\x01\x80\0\0\0\0" + b"\x00\x80\0\0\0\0" * 2000,
        b"\xc1" + ws_text_frame(zlib.compress(b"a" * 50))[1:],
        b"\x81\x05hello",
    )

    async def flood(number: int) -> None:
        stream = await connect(url)
        async with stream:
            await stream.send_all(ws_handshake("hostile", host))
            with trio.move_on_after(ANSWER_DEADLINE_S):
                try:
                    await stream.receive_some(4096)
                    await stream.send_all(floods[number % len(floods)])
                    while await stream.receive_some(65536):
                        pass
                except trio.BrokenResourceError:
                    return  # cut off, as expected

    await _many(24, flood)


async def large_bodies(url: str, share: float = 1.0) -> None:
    """A14: send JSON of the maximum size that is most expensive to parse and check.

    Args:
      url: address of the server.
      share: if below 1, each body is sent only once, still several concurrently.
    """
    bodies = (
        b'{"messages": [' + b"[1]," * 4_000_000 + b"1]}",
        b'{"messages": [' + b"{}," * 5_000_000 + b"1]}",
        b'{"prompt": [' + b"1," * 1_000_000 + b"1]}",
        b'{"prompt": "' + b"\\\\" * 8_000_000 + b'"}',
        _chat(messages=MESSAGES * 100_000),
    )

    async def ask(number: int) -> None:
        all_of_them = bodies[number:] + bodies[:number]
        for body in all_of_them if share >= 1 else bodies[number::LARGE_AT_ONCE]:
            await exchange(url, post(url, body))

    await _many(LARGE_AT_ONCE, ask)


async def foreign_names(url: str, share: float = 1.0) -> None:
    """A27, A28: send made-up models, paths, methods and ids, which may reach logs and labels."""
    host = urlsplit(url).netloc
    each = int(NUM_NAMES * share) // NAMES_AT_ONCE

    def asked(number: int, *, is_last: bool) -> bytes:
        body = _chat(model=f"model-{number}\r\n\x1b[31m{CANARY}\u202e", cache_salt=CANARY)
        # Three of four are chats; the fourth has an unknown path and method.
        what = HEAD if number % 4 else f"VERB{number} /path-{number} HTTP/1.1\r\nhost: {{host}}\r\n"
        secret = f"authorization: Bearer {CANARY}\r\nx-request-id: \x1b[31m{number}\r\n"
        head = what.format(host=host) + secret + ("connection: close\r\n" if is_last else "")
        more = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        return (head + more).encode() + body

    async def ask(client: int) -> None:
        stream = await connect(url)
        async with stream:
            for number in range(each):
                is_last = number == each - 1
                await stream.send_all(asked(client * each + number, is_last=is_last))
                await stream.receive_some(65536)

    await _many(NAMES_AT_ONCE, ask)


async def _crowd(
    url: str, share: float, requests: bytes, num_answers: int = 1, *, is_new: bool = False
) -> None:
    """Send the same bytes repeatedly over many connections.

    Args:
      url: address of the server.
      share: fraction of the duration of a whole attack.
      requests: bytes of one or more requests.
      num_answers: expected answers.
      is_new: whether each time uses a new connection.
    """

    async def ask(_: int) -> None:
        while True:
            if is_new:
                await exchange(url, requests)
                continue
            stream = await connect(url)
            async with stream:
                await _ask_on(stream, requests, num_answers)

    with trio.move_on_after(CROWD_S * share):
        await _many(CROWD, ask)


async def _ask_on(stream: trio.SocketStream, requests: bytes, num_answers: int) -> None:
    """Send requests on one connection until it is closed. Does not parse answers: a head counts as
    a whole answer."""
    while True:
        missing = num_answers
        try:
            await stream.send_all(requests)
            while missing > 0:
                part = await stream.receive_some(1 << 18)
                if not part:
                    return
                missing -= part.count(b"HTTP/1.1 ")
        except trio.BrokenResourceError:
            return


async def crowd_refused(url: str, share: float = 1.0) -> None:
    """A38: send small requests that are refused immediately."""
    await _crowd(url, share, post(url, _chat(model="none"), close=False))


async def crowd_pipelined(url: str, share: float = 1.0) -> None:
    """A38: send many pipelined requests in one segment."""
    get = f"GET /version HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\n\r\n".encode()
    await _crowd(url, share, get * NUM_PIPELINED, NUM_PIPELINED)


async def crowd_connecting(url: str, share: float = 1.0) -> None:
    """A38: open a connection for each small request."""
    await _crowd(url, share, post(url, _chat(model="none")), is_new=True)


async def crowd_messages(url: str, share: float = 1.0) -> None:
    """A38: send chats of very many messages, which are parsed in a thread and then refused."""
    messages = [{"role": "user", "content": "a"}] * NUM_MESSAGES
    await _crowd(url, share, post(url, _chat(messages=messages, model="none"), close=False))


async def crowd_inline(url: str, share: float = 1.0) -> None:
    """A38: send chats with the most messages that are parsed in the event loop."""
    messages = [{"role": "user", "content": "a"}] * (NUM_MESSAGES // 3)
    await _crowd(url, share, post(url, _chat(messages=messages, model="none"), close=False))


async def crowd_fields(url: str, share: float = 1.0) -> None:
    """A38: send as many header fields as are allowed."""
    fields = "".join(f"x-{number}: y\r\n" for number in range(60))
    head = f"GET /version HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\n{fields}\r\n"
    await _crowd(url, share, head.encode())


async def crowd_scrapes(url: str, share: float = 1.0) -> None:
    """A38: read the metrics repeatedly."""
    get = f"GET /metrics HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\n\r\n"
    await _crowd(url, share, get.encode())


CROWDS: Final = (
    crowd_refused,
    crowd_pipelined,
    crowd_connecting,
    crowd_messages,
    crowd_inline,
    crowd_fields,
    crowd_scrapes,
)
ATTACKS: Final[tuple[Callable[..., Awaitable[None]], ...]] = (
    slow_heads,
    slow_bodies,
    stalled_readers,
    header_bombs,
    rapid_reset,
    smuggling,
    json_bombs,
    parameter_bombs,
    prompt_bombs,
    large_bodies,
    grammars,
    websocket_floods,
    foreign_names,
    *CROWDS,
)
SCALED: Final = frozenset({stalled_readers, large_bodies, foreign_names, *CROWDS})
"""Attacks that can be run at a reduced share."""


async def besiege(url: str, attack: Callable[[str], Awaitable[None]]) -> Watch:
    """Run one attack, and print the server's liveness during it."""
    seen = Watch()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_health, url, seen)
        await attack(url)
        # An attack may end before the liveness client had an answer.
        before = len(seen.delays_s) + len(seen.failures)
        while len(seen.delays_s) + len(seen.failures) < before + AFTERWARDS:  # noqa: ASYNC110
            await trio.sleep(CANARY_PAUSE_S)
        nursery.cancel_scope.cancel()
    return seen


if __name__ == "__main__":
    # Attacks run in a separate process, so that they do not delay the measurements.
    trio.run({attack.__name__: attack for attack in ATTACKS}[sys.argv[2]], sys.argv[1])

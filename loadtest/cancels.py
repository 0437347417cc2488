"""`python -m loadtest.cancels`: close connections at random moments; see that all KV comes back.

Streams over SSE and WebSocket and whole answers are begun and their sockets closed, politely or
not, at any time from the first byte on. The time from the closed socket to the freed blocks is
taken from the workers' log, whose clock is this machine's. Exit code 0 if every block is free
afterwards and the server still answers, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import struct
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import trio
from rich.console import Console

from .cancel_report import KvBlocks, blocks_of, release_times, table_of
from .raw_requests import chat_request, ws_handshake, ws_text_frame
from .server_process import ServerDidNotStartError, running_server

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
SERVE_OPTIONS = ("--max-num-seqs", "8", "--log-level", "info")
"""Few rows, so that with many clients some requests are cancelled while they are queued."""
MAX_WAIT_S = 1.2
"""Longest time until a socket is closed; the demo model has ended most answers by then."""
EARLY_S = 0.03
"""Half of all sockets are closed within about this time, to meet prefill and transfer."""
FREE_DEADLINE_S = 5.0
CONNECT_DEADLINE_S = 10.0
MAX_TOKENS = 400


@dataclass(frozen=True, slots=True)
class Cut:
    """One request whose socket was closed.

    Attributes:
      name: the id that the client gave it.
      kind: sse, ws or plain.
      closed_at: seconds since the epoch.
    """

    name: str
    kind: str
    closed_at: float


def _body(kind: str, rng: random.Random) -> bytes:
    filler = "and another dragon " * rng.choice((0, 1, 10, 60, 150))
    text = f"Tell me a story about dragon number {rng.randrange(10**6)} {filler}"
    message = {"role": "user", "content": text}
    if kind == "ws":
        request: dict[str, object] = {"type": "response.create", "input": [message]}
        return json.dumps(request | {"max_output_tokens": MAX_TOKENS}).encode()
    request = {"messages": [message], "stream": kind == "sse"}
    return json.dumps(request | {"max_tokens": MAX_TOKENS, "ignore_eos": True}).encode()


async def _swallow(stream: trio.SocketStream) -> None:
    """Read and forget, as a client that is interested would; an answer's end is waited out."""
    while await stream.receive_some(65536):
        pass


async def _begin(stream: trio.SocketStream, name: str, kind: str, host: str, body: bytes) -> None:
    if kind != "ws":
        await stream.send_all(chat_request(name, host, body))
        return
    await stream.send_all(ws_handshake(name, host))
    await stream.receive_some(4096)
    await stream.send_all(ws_text_frame(body))


async def cut_one(url: str, name: str, rng: random.Random) -> Cut:
    """Begin a request, wait for a random time, close its socket."""
    kind = rng.choice(("sse", "ws", "plain"))
    wait_s = rng.uniform(0, EARLY_S) if rng.random() < 0.5 else rng.uniform(0, MAX_WAIT_S)
    where = urlsplit(url)
    assert where.hostname is not None
    assert where.port is not None
    with trio.fail_after(CONNECT_DEADLINE_S):
        stream = await trio.open_tcp_stream(where.hostname, where.port)
        await _begin(stream, name, kind, where.netloc, _body(kind, rng))
    with trio.move_on_after(wait_s):
        await _swallow(stream)
    if rng.random() < 0.5:  # RST instead of FIN
        stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    closed_at = time.time()
    stream.socket.close()
    return Cut(name, kind, closed_at)


async def cut_many(url: str, count: int, clients: int, seed: int) -> list[Cut]:
    """Cut `count` requests, `clients` at a time."""
    rng = random.Random(seed)
    cuts: list[Cut] = []
    seats = trio.CapacityLimiter(clients)

    async def one(name: str, own: random.Random) -> None:
        async with seats:
            cuts.append(await cut_one(url, name, own))

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(one, f"cut-{number:06d}", random.Random(rng.random()))
    return cuts


def wait_until_free(url: str) -> KvBlocks:
    """Return the blocks by state once none is leased, or as they are at the deadline."""
    give_up = time.monotonic() + FREE_DEADLINE_S
    while True:
        with urllib.request.urlopen(f"{url}/metrics", timeout=CONNECT_DEADLINE_S) as answer:
            blocks = blocks_of(answer.read().decode())
        if blocks.is_all_free or time.monotonic() > give_up:
            return blocks
        time.sleep(0.05)


def still_answers(url: str) -> bool:
    """Ask one more question and read the whole answer."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8})
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        body.encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=CONNECT_DEADLINE_S) as answer:
        return bool(json.load(answer)["choices"][0]["message"]["content"])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.cancels", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="requests to cut (1000)")
    parser.add_argument("--clients", type=int, default=24, help="at the same time (24)")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments (1)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "cancels")
    parser.add_argument("serve", nargs="*", metavar="SERVE-OPTION", help="for `triolet serve`")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run and return the exit code."""
    options = parse(arguments)
    console = Console(highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "server.log"
    try:
        with running_server([*SERVE_OPTIONS, *options.serve], log) as url:
            cuts = trio.run(cut_many, url, options.count, options.clients, options.seed)
            blocks = wait_until_free(url)
            answers = still_answers(url)
    except ServerDidNotStartError as error:
        console.print(f"error: {error}", style="red", soft_wrap=True, markup=False)
        return 2
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    console.print(table_of(release_times(cuts, lines)))
    console.print(f"KV blocks afterwards: {blocks}")
    console.print(f"the server {'still answers' if answers else 'does not answer any more'}")
    return 0 if blocks.is_all_free and answers else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m loadtest.bench.fairness`: measure how evenly tenants are served, on real processes.

The queue part uses one fleet with the demo model and few rows. It measures the time to first token
of a quiet tenant, alone and while another tenant keeps ten times as many concurrent requests as
there are rows. Then several tenants demand more than the capacity: it measures their shares by
weight, and Jain's index with equal weights and different request sizes. A tenant's work is the
tokens of answers that ended while all tenants were active.

The edge part uses workers that compute nothing (front_source) and gives the server its own core. It
measures the delay from a worker's send to the server's write for a quiet stream, alone and during
another tenant's 200 readers with eight choices each; and the duration of a short chat on a new
connection, alone and while one address opens every connection it can without a key. Clients and
workers share the other core. Writes are timed by the kernel's receive timestamps, so that waiting
in clients does not count.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import socket
import struct
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import httpx2
import trio

from ..harness.progress import announce, progress
from ..harness.report import Ratio, Report, describe, finish
from ..harness.servers import on_core, running, running_server
from ..harness.statistics import percentile
from ..harness.streams import COMPLETIONS, Clients, Stream
from ..harness.tenants import key_of, write_tenants
from ..overload.outcomes import jain
from .front import CONTENT, Front, Source, chat_request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping
    from multiprocessing.synchronize import Event

ROWS: Final = 8
QUIET_PER_S: Final = 4.0
FLOOD: Final = 10 * ROWS
"""Concurrent requests of the flooding tenant."""
WEIGHTS: Final = {"one": 1.0, "two": 2.0, "four": 4.0}
EVEN: Final = {"a": 8, "b": 24, "c": 64, "d": 96}
"""Completion tokens of tenants with equal weights."""
CLIENTS: Final = 16
"""Clients of each competing tenant: more than its share of the rows."""
TIMEOUT_S: Final = 120.0
SOURCES: Final = 4
"""Decode workers in the edge part."""
RATE: Final = 10.0
"""Tokens per second of each stream."""
READERS: Final = 200
CHOICES: Final = 8
MAX_TOKENS: Final = 900
"""Within the demo model's context, and more than any stream gets here."""
LOUD_SEED: Final = 10_000
QUIET_SEED: Final = 7
UNCOUNTED: Final = 5
"""Tokens at the start of a stream that are not counted."""
OPENING_PAUSE_S: Final = 0.005
CROWD: Final = 4096
"""Connections of one address: as many as a server allows."""
CROWD_PER_S: Final = 1000
"""New connections per second until all are open, after about four seconds."""
REOPENED_PER_S: Final = 50
"""New connections per second after that."""
CHATS: Final = 300
SO_TIMESTAMPNS: Final = 35
"""Linux socket option: each read also returns the time at which the kernel received the bytes. The
socket module has no constant for it."""
TOKENS_ALONE: Final = "a stream's tokens, alone"
TOKENS_BESIDE: Final = "a stream's tokens, beside 200 readers with n = 8"
CHATS_ALONE: Final = "a chat on a new connection, alone"
CHATS_BESIDE: Final = "a chat on a new connection, beside 4,096 without a key"
WARM_S: Final = 3.0
"""Seconds before counting starts: the queue must be full."""
SHARES: Final = {"quiet": 1.0, "loud": 1.0, **WEIGHTS, **dict.fromkeys(EVEN, 1.0)}
PLANS: Final = {name: f"weight = {weight}" for name, weight in SHARES.items()}


@dataclass(slots=True)
class Found:
    """Measurements.

    Attributes:
      ttft_s: times to first token of the quiet tenant, by phase.
      tokens: tokens used by each tenant, by phase.
      edge: rows of the edge part.
    """

    ttft_s: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, dict[str, int]] = field(default_factory=dict)
    edge: list[dict[str, Any]] = field(default_factory=list)


def body(rng: random.Random, max_tokens: int) -> dict[str, Any]:
    """Return a request with a unique prompt."""
    words = " ".join(str(rng.randrange(10**6)) for _ in range(8))
    return {"prompt": words, "max_tokens": max_tokens, "ignore_eos": True, "seed": 1}


class Client:
    """One tenant's client."""

    def __init__(self, url: str, tenant: str) -> None:
        self.tenant = tenant
        headers = {"authorization": f"Bearer {key_of(tenant)}"}
        limits = httpx2.Limits(max_connections=512)
        self.http = httpx2.AsyncClient(
            base_url=url, timeout=TIMEOUT_S, headers=headers, limits=limits
        )

    async def first_token_s(self, request: dict[str, Any]) -> float:
        """Send a request, read the answer, and return the seconds to the first token."""
        began_at = time.perf_counter()
        first_s = None
        stream = self.http.stream("POST", COMPLETIONS, json=request | {"stream": True})
        async with stream as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if first_s is None and line.startswith("data: {"):
                    first_s = time.perf_counter() - began_at
        return float("inf") if first_s is None else first_s

    async def keep_asking(self, max_tokens: int, seed: int, used: dict[str, int]) -> None:
        """Send requests one after the other, and add up the tokens."""
        rng = random.Random(f"{self.tenant} {seed}")
        while True:
            answer = await self.http.post(COMPLETIONS, json=body(rng, max_tokens))
            if answer.status_code == 200:
                used[self.tenant] = (
                    used.get(self.tenant, 0) + answer.json()["usage"]["total_tokens"]
                )
            else:
                await trio.sleep(float(answer.headers.get("retry-after", "1")))


async def at_random(
    act: Callable[[random.Random], Awaitable[None]], per_s: float, seconds: float
) -> None:
    """Start tasks at random times (fixed seed), and wait for all."""
    rng = random.Random("arrivals")
    async with trio.open_nursery() as nursery:
        until = trio.current_time() + seconds
        while trio.current_time() < until:
            nursery.start_soon(act, rng)
            await trio.sleep(rng.expovariate(per_s))


async def ask_now_and_then(client: Client, seconds: float, into: list[float]) -> None:
    """Record the seconds to the first tokens of the quiet tenant."""

    async def ask(rng: random.Random) -> None:
        into.append(await client.first_token_s(body(rng, 16)))

    await at_random(ask, QUIET_PER_S, seconds)


async def measure(url: str, seconds: float, found: Found) -> None:
    """Run all phases one after the other."""
    quiet, loud = Client(url, "quiet"), Client(url, "loud")
    await ask_now_and_then(quiet, WARM_S, [])
    await ask_now_and_then(quiet, seconds, found.ttft_s.setdefault("alone", []))
    async with trio.open_nursery() as nursery:
        for number in range(FLOOD):
            nursery.start_soon(loud.keep_asking, 64, number, {})
        await trio.sleep(WARM_S)
        await ask_now_and_then(quiet, seconds, found.ttft_s.setdefault("beside a flood", []))
        nursery.cancel_scope.cancel()
    for phase, taken in found.ttft_s.items():
        progress(f"first token {phase}: p99 {1e3 * percentile(taken, 99):.1f} ms")
    for phase, sizes in (("by weight", dict.fromkeys(WEIGHTS, 32)), ("even", EVEN)):
        found.tokens[phase] = await compete(url, sizes, seconds)
        progress(f"tokens {phase}: {found.tokens[phase]}")


async def compete(url: str, sizes: Mapping[str, int], seconds: float) -> dict[str, int]:
    """Return the tokens of tenants that together demand more than the capacity."""
    used: dict[str, int] = {}
    async with trio.open_nursery() as nursery:
        for tenant, max_tokens in sizes.items():
            client = Client(url, tenant)
            for number in range(CLIENTS):
                nursery.start_soon(client.keep_asking, max_tokens, number, used)
        await trio.sleep(WARM_S)
        before = dict(used)
        await trio.sleep(seconds)
        nursery.cancel_scope.cancel()
    return {tenant: used.get(tenant, 0) - before.get(tenant, 0) for tenant in sizes}


@contextmanager
def neighbour(target: Callable[..., None], *arguments: object) -> Iterator[None]:
    """Run a neighbour in a separate process, and wait for its streams or connections."""
    context = multiprocessing.get_context("spawn")
    has_begun = context.Event()
    process = context.Process(target=target, args=(*arguments, has_begun), daemon=True)
    process.start()
    try:
        if not has_begun.wait(TIMEOUT_S):
            raise RuntimeError("the neighbour did not get its streams or connections; see above")
        time.sleep(WARM_S)
        yield
    finally:
        process.kill()
        process.join()


class UnreadStream(Stream):
    """A stream that is read but not parsed, so that reading costs very little CPU."""

    def take(self, data: bytes, now: float) -> None:
        """Ignore the data."""


def read_streams(port: int, has_begun: Event) -> None:
    """Read many streams of many choices as fast as possible, until killed."""
    clients = Clients(f"http://127.0.0.1:{port}", make=UnreadStream)
    for number in range(READERS):
        seed = LOUD_SEED + number * CHOICES
        request = chat_request(seed, MAX_TOKENS, n=CHOICES, key=key_of("loud"))
        clients.begin(request, lambda _: None)
        clients.read_until(time.monotonic() + OPENING_PAUSE_S)
    has_begun.set()
    while True:
        clients.read(TIMEOUT_S)


def hold_connections(port: int, has_begun: Event) -> None:
    """Open as many connections as possible, send nothing, and replace closed ones."""
    allow_files()
    held = deque[socket.socket]()
    while True:
        if len(held) == CROWD:
            held.popleft().close()  # the server has closed it, or would close it next
            has_begun.set()
        held.append(socket.create_connection(("127.0.0.1", port), TIMEOUT_S))
        time.sleep(1 / (REOPENED_PER_S if has_begun.is_set() else CROWD_PER_S))


def allow_files() -> None:
    """Raise the limit of open files of this process and its children to the maximum."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def write_delays_ms(port: int, seconds: float, source: Source) -> list[float]:
    """Return the delays of one stream's tokens from the worker's send to the server's write."""
    source.clear()
    ahead_s = time.time() - time.monotonic()  # offset of the kernel's clock
    arrivals: list[float] = []
    unread = b""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as raw:
        raw.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        raw.sendall(chat_request(QUIET_SEED, MAX_TOKENS, key=key_of("quiet")))
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            data, ancillary, _, _ = raw.recvmsg(65_536, 64)
            if not data:
                raise RuntimeError("the quiet stream broke")
            [(_, _, stamp)] = ancillary
            whole_s, nanoseconds = struct.unpack("qq", stamp)
            whole, mark, unread = (unread + data).rpartition(b"\n\n")
            count = sum(text.count(b" ") for text in CONTENT.findall(whole)) if mark else 0
            arrivals += [whole_s + nanoseconds / 1e9 - ahead_s] * count
    sent = source.times()[QUIET_SEED]
    pairs = zip(arrivals[UNCOUNTED:], sent[UNCOUNTED:], strict=False)
    return [1e3 * (arrived - began) for arrived, began in pairs]


def chats_ms(port: int, count: int) -> list[float]:
    """Return durations of short chats, each on a new connection from another address."""
    took = []
    for _ in range(count):
        began_at = time.monotonic()
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_S, ("127.0.0.2", 0)) as raw:
            raw.sendall(chat_request(QUIET_SEED, 2, key=key_of("quiet")))
            answer = b""
            while b"[DONE]" not in answer:
                data = raw.recv(65_536)
                if not data:
                    raise RuntimeError(f"the chat was not answered: {answer[:300]!r}")
                answer += data
        took.append(1e3 * (time.monotonic() - began_at))
    return took


def measure_edge(folder: Path, tenants: Path, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Measure the delays with and without neighbours, in turns. Return rows of medians."""
    allow_files()
    found: dict[str, list[list[float]]] = {}
    cores = sorted(os.sched_getaffinity(0))
    own_core, their_core = (cores[1], cores[0]) if len(cores) > 1 else (None, None)
    front = Front("triolet", options=("--set", f"server.tenants.file={tenants}"))
    with on_core(own_core), Source(folder, SOURCES, RATE) as source:
        for _ in range(rounds):
            process = front.process(folder, SOURCES, folder / "front.log")
            with running(process, their_core):
                port = process.port

                def note(phase: str, taken: list[float]) -> None:
                    progress(f"{phase}: p99 {percentile(taken, 99):.1f} ms")
                    found.setdefault(phase, []).append(sorted(taken))

                note(TOKENS_ALONE, write_delays_ms(port, seconds, source))
                with neighbour(read_streams, port):
                    note(TOKENS_BESIDE, write_delays_ms(port, seconds, source))
                note(CHATS_ALONE, chats_ms(port, CHATS))
                with neighbour(hold_connections, port):
                    note(CHATS_BESIDE, chats_ms(port, CHATS))
    return [
        {
            "phase": phase,
            "requests": len(taken[0]),
            "p50_ms": median(percentile(one, 50) for one in taken),
            "p99_ms": median(percentile(one, 99) for one in taken),
        }
        for phase, taken in found.items()
    ]


def edge_ratios(rows: list[dict[str, Any]]) -> dict[str, Ratio]:
    """Return the p99 with neighbours as a multiple of the p99 alone."""
    p99 = {row["phase"]: row["p99_ms"] for row in rows}
    return {
        "p99 of a stream's write delay with 200 readers / alone": Ratio(
            p99[TOKENS_BESIDE] / p99[TOKENS_ALONE], ceiling=2.0
        ),
        "p99 of a chat with 4,096 connections / alone": Ratio(
            p99[CHATS_BESIDE] / p99[CHATS_ALONE], ceiling=2.0
        ),
    }


def report_of(found: Found) -> Report:
    """Return rows and ratios."""
    rows: list[dict[str, Any]] = []
    for phase, taken in found.ttft_s.items():
        rows.append(
            {
                "phase": phase,
                "requests": len(taken),
                "p50_ms": 1e3 * percentile(taken, 50),
                "p99_ms": 1e3 * percentile(taken, 99),
            }
        )
    shares = []
    for phase, used in found.tokens.items():
        total = max(sum(used.values()), 1)
        shares += [
            {"phase": phase, "tenant": tenant, "tokens": tokens, "share": tokens / total}
            for tenant, tokens in used.items()
        ]
    by_weight, even = found.tokens["by weight"], found.tokens["even"]
    total, weights = max(sum(by_weight.values()), 1), sum(WEIGHTS.values())
    worst = max(
        abs(by_weight[tenant] / total / (weight / weights) - 1)
        for tenant, weight in WEIGHTS.items()
    )
    ratios = {
        "p99 of the first token during a flood / alone": Ratio(
            rows[1]["p99_ms"] / rows[0]["p99_ms"], ceiling=1.1
        ),
        "p50 of the first token during a flood / alone": Ratio(
            rows[1]["p50_ms"] / rows[0]["p50_ms"]
        ),
        "Jain's index at equal weights": Ratio(jain([*map(float, even.values())]), floor=0.95),
        "largest deviation from the share by weight": Ratio(worst, ceiling=0.05),
    }
    rows += found.edge
    ratios |= edge_ratios(found.edge)
    return Report("fairness", describe(1), rows, ratios, {}, {"shares": shares})


def edge_report(found: Found) -> Report:
    """Return the report of the edge part alone."""
    return Report("fairness-edge", describe(1), found.edge, edge_ratios(found.edge), {})


def main() -> None:
    """Measure, write and show it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of each phase")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the edge part (3)")
    parser.add_argument("--only-edge", action="store_true", help="skip the queue part")
    options = parser.parse_args()
    announce(__doc__)
    found = Found()
    with TemporaryDirectory() as folder:
        tenants = write_tenants(Path(folder), PLANS)
        serve = ("--tenants", str(tenants), "--max-num-seqs", str(ROWS))
        found.edge = measure_edge(Path(folder), tenants, options.seconds, options.rounds)
        if options.only_edge:
            report = edge_report(found)
        else:
            with running_server(serve, Path(folder) / "log") as url:
                trio.run(measure, url, options.seconds, found)
            report = report_of(found)
    finish(report)


if __name__ == "__main__":
    main()

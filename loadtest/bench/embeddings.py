"""`python -m loadtest.bench.embeddings`: what batching brings to vectors, over HTTP.

Two whole fleets stand beside one another, one that batches and one that computes input by input;
only one is asked at a time, and they take turns, so that whatever else the machine does strikes
both alike. Both must give the same vectors. Knows HTTP only.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import median
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from rich.console import Console

from ..server_process import running_server
from .engines import BENCH
from .machine import describe
from .report import Ratio, Report

if TYPE_CHECKING:
    from collections.abc import Sequence

FLOOR: Final = 3.0
"""Throughput with batches over that without, with `CLIENTS` of them."""
CLIENTS: Final = 16
LENGTHS: Final = (4, 8, 6, 12, 5, 10)
"""Tokens of queries, as people search."""
ONE_BY_ONE: Final = ("--embedding-batch", "1", "--embedding-wait", "0")
TIMEOUT_S: Final = 120.0
WARM_UP: Final = 4
FLEETS: Final = {"batched": (), "one by one": ONE_BY_ONE}


class Client:
    """One connection that asks for one vector after another."""

    def __init__(self, url: str, number: int) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port, timeout=TIMEOUT_S
        )
        self._number = number

    def ask(self, turn: int) -> tuple[float, str]:
        """Return the seconds that an answer took, and its vector."""
        at = self._number + CLIENTS * turn
        length = LENGTHS[at % len(LENGTHS)]
        ids = [10 + (at * 31 + offset * 7) % 800 for offset in range(length)]
        body = json.dumps({"input": ids, "encoding_format": "base64"})
        began_at = time.perf_counter()
        self._connection.request(
            "POST", "/v1/embeddings", body, {"content-type": "application/json"}
        )
        answer = self._connection.getresponse()
        document: dict[str, Any] = json.loads(answer.read())
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {document}")
        return time.perf_counter() - began_at, document["data"][0]["embedding"]


def measure(url: str, clients: int, turns: int) -> tuple[float, list[float], list[str]]:
    """Return inputs per second, the seconds of each answer, and the vectors."""

    def run(number: int) -> list[tuple[float, str]]:
        client = Client(url, number)
        return [client.ask(turn) for turn in range(turns)]

    with ThreadPoolExecutor(clients) as pool:
        began_at = time.perf_counter()
        found = [pair for pairs in pool.map(run, range(clients)) for pair in pairs]
        elapsed_s = time.perf_counter() - began_at
    return len(found) / elapsed_s, [pair[0] for pair in found], [pair[1] for pair in found]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description="batched vectors beside vectors one by one")
    parser.add_argument("--model", default=str(BENCH / "model-150m"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args(arguments)
    log = BENCH / "embeddings"
    log.mkdir(parents=True, exist_ok=True)
    rates: dict[tuple[str, int], list[float]] = {}
    waits: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        urls = {}
        for name, extra in FLEETS.items():
            command = [options.model, "--dtype", options.dtype, *extra]
            path = log / f"{name.replace(' ', '-')}.log"
            urls[name] = stack.enter_context(running_server(command, path))
        for url in urls.values():
            measure(url, CLIENTS, WARM_UP)
        for round_number in range(options.rounds):
            names = list(urls) if round_number % 2 else list(reversed(urls))
            for clients in (1, CLIENTS):
                vectors = {}
                for name in names:
                    rate, seconds, vectors[name] = measure(urls[name], clients, options.turns)
                    rates.setdefault((name, clients), []).append(rate)
                    waits.setdefault((name, clients), []).extend(seconds)
                if len({tuple(found) for found in vectors.values()}) != 1:
                    raise RuntimeError("a vector depends on who else is in its batch")
    report = _report(rates, waits)
    report.show(Console())
    report.write(BENCH)
    return 0 if all(ratio.is_met for ratio in report.ratios.values()) else 1


def _report(
    rates: dict[tuple[str, int], list[float]], waits: dict[tuple[str, int], list[float]]
) -> Report:
    rows = [
        {
            "fleet": name,
            "clients": clients,
            "inputs/s": median(found),
            "p50 ms": 1e3 * median(waits[name, clients]),
            "p99 ms": 1e3 * sorted(waits[name, clients])[int(0.99 * len(waits[name, clients]))],
        }
        for (name, clients), found in sorted(rates.items())
    ]
    gains = [
        batched / alone
        for batched, alone in zip(
            rates["batched", CLIENTS], rates["one by one", CLIENTS], strict=True
        )
    ]
    added_ms = 1e3 * (median(waits["batched", 1]) - median(waits["one by one", 1]))
    return Report(
        "embeddings",
        describe(2),
        rows,
        {
            f"throughput at {CLIENTS} clients, batched / one by one": Ratio(median(gains), FLOOR),
            "wait that batching adds to a lone client, ms": Ratio(added_ms),
        },
        {},
        (("fleet", "clients"), "inputs/s"),
    )


if __name__ == "__main__":
    sys.exit(main())

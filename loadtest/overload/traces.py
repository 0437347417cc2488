"""Real traces at the size of a small fleet: moments divided by one number, lengths by another.

What they are of: Azure's conversations of 2023 (CC-BY 4.0; Patel et al., Splitwise, ISCA 2024),
Mooncake's (Apache-2.0; Qin et al., FAST '25), 300 of ShareGPT (MIT, LLMServingSim), and the clients
of ServeGen (Apache-2.0; arXiv 2505.09999), each with its own rate, burstiness and lengths: the one
trace here in which tenants are as unequal as they are. Knows files; they are not a part of the
project, and whoever has none is told so.
"""

from __future__ import annotations

import csv
import json
import random
from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from .arrivals import MIN_OUTPUT, MIN_PROMPT, Arrival, Sizes, bursty, fit, merged

FOLDER: Final = Path(__file__).parents[3] / "shared" / "data" / "traces"
CLIENTS: Final = "servegen_m-small_clients_hourly.csv"
LENGTHS: Final = "servegen_m-small_client_lengths.csv"
SHARES: Final = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
"""Where ServeGen's lengths are known; the ends are drawn out of the nearest two."""
MAX_CV: Final = 8.0
"""Of a client's gaps: some are beyond 60, which in a minute is one burst or none at all."""


class NoTraceError(Exception):
    """A trace is not there."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How a trace is made to fit.

    Attributes:
      rate: requests per second, on average.
      seconds: how long they last.
      like: promises of each request.
      sizes: the medians that lengths shall have, and their bound.
    """

    rate: float
    seconds: float
    like: Arrival
    sizes: Sizes


def conversations(name: str, scale: Scale) -> list[Arrival]:
    """Return the first requests of a trace with moments and lengths, at the size of this fleet.

    Args:
      name: of the file.
      scale: what they shall be like.

    Raises:
      NoTraceError: there is no such file.
    """
    rows = sorted(_rows(_existing(name)))[: max(2, round(scale.rate * scale.seconds))]
    began_at = rows[0][0]
    stretch = (len(rows) - 1) / scale.rate / max(rows[-1][0] - began_at, 1e-9)
    prompt = scale.sizes.prompt / _middle([row[1] for row in rows])
    output = scale.sizes.output / _middle([row[2] for row in rows])
    return [
        replace(
            scale.like,
            at_s=(at_s - began_at) * stretch,
            prompt_tokens=fit(prompt * prompt_tokens, MIN_PROMPT, scale.sizes.most),
            output_tokens=fit(output * output_tokens, MIN_OUTPUT, scale.sizes.most),
        )
        for at_s, prompt_tokens, output_tokens in rows
    ]


def clients(hour: int, scale: Scale, seed: int) -> list[Arrival]:
    """Return what ServeGen's clients ask in an hour of their day: each is a tenant, with its share.

    Args:
      hour: 0 to 23.
      scale: what all of them together shall be like.
      seed: decides moments and lengths; a client's are its own.

    Raises:
      NoTraceError: the files are not there.
    """
    lengths = _lengths(_existing(LENGTHS))
    present = [
        (row["client"], float(row["req_per_s"]), float(row["interarrival_cv"]))
        for row in _table(_existing(CLIENTS))
        if int(row["hour"]) == hour and row["client"] in lengths and float(row["req_per_s"]) > 0
    ]
    total = sum(rate for _, rate, _ in present)
    prompt = scale.sizes.prompt / _weighted(present, lengths, 0, total)
    output = scale.sizes.output / _weighted(present, lengths, 1, total)
    streams = []
    for client, rate, cv in present:
        numbers = random.Random(f"{seed} {client}")
        moments = bursty(numbers, scale.rate * rate / total, scale.seconds, min(cv, MAX_CV))
        of_prompt, of_output = lengths[client]
        streams.append(
            [
                replace(
                    scale.like,
                    at_s=at_s,
                    tenant=f"client-{client}",
                    prompt_tokens=fit(
                        prompt * _draw(of_prompt, numbers), MIN_PROMPT, scale.sizes.most
                    ),
                    output_tokens=fit(
                        output * _draw(of_output, numbers), MIN_OUTPUT, scale.sizes.most
                    ),
                )
                for at_s in moments
            ]
        )
    return merged(*streams)


def _existing(name: str) -> Path:
    path = FOLDER / name
    if not path.exists():
        raise NoTraceError(f"{path} is not there: the trace is no part of this project")
    return path


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _rows(path: Path) -> list[tuple[float, int, int]]:
    if path.suffix == ".jsonl":
        lines = [json.loads(line) for line in path.read_text().splitlines() if line]
        return [(r["timestamp"] / 1000, r["input_length"], r["output_length"]) for r in lines]
    return [
        (float(r["arrival_s"]), int(r["input_tokens"]), int(r["output_tokens"]))
        for r in _table(path)
    ]


def _lengths(path: Path) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
    """Return quantiles of prompts and of answers, by client; of those whose lengths are known."""

    def quantiles(row: dict[str, str], kind: str) -> tuple[float, ...]:
        p10, p50, p90, p99 = (float(row[f"{kind}_tokens_p{p}"]) for p in (10, 50, 90, 99))
        return (p10 * p10 / max(p50, 1.0), p10, p50, p90, p99, p99)

    return {
        row["client"]: (quantiles(row, "input"), quantiles(row, "output"))
        for row in _table(path)
        if row["input_tokens_p50"] and row["output_tokens_p50"]
    }


def _draw(quantiles: tuple[float, ...], numbers: random.Random) -> float:
    share = numbers.random()
    above = max(1, bisect_left(SHARES, share))
    begin, end = SHARES[above - 1], SHARES[above]
    low, high = quantiles[above - 1], quantiles[above]
    return low + (high - low) * (share - begin) / (end - begin)


def _weighted(
    present: list[tuple[str, float, float]],
    lengths: dict[str, tuple[tuple[float, ...], tuple[float, ...]]],
    kind: int,
    total: float,
) -> float:
    """Return the medians' mean over requests: the longest tail shall not make all others short."""
    median_at = SHARES.index(0.5)
    return sum(rate * lengths[name][kind][median_at] for name, rate, _ in present) / total


def _middle(values: list[int]) -> float:
    return float(max(1, sorted(values)[len(values) // 2]))

"""What `bench.serve` asks: lengths and moments of requests, out of a real trace or made up. Pure.

Real traces come from models a thousand times larger on machines to match. Their lengths are divided
by one number and their moments by another, so that proportions, bursts and lulls stay as they were
and this machine can keep up.
"""

from __future__ import annotations

import csv
import json
import math
import random
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

SEED: Final = 9
MIN_PROMPT, MIN_OUTPUT = 8, 2
MADE_UP_PROMPT: Final = (1020, 0.8)
MADE_UP_OUTPUT: Final = (129, 0.9)
"""Medians and widths (of the logarithm) of conversations in Azure's trace of 2023."""


class Arrival(NamedTuple):
    """One request.

    Attributes:
      at_s: after the first.
      prompt_tokens: in.
      output_tokens: out.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int


class Shape(NamedTuple):
    """A series of requests.

    Attributes:
      name: where it is from; said beside whatever was measured with it.
      arrivals: in order.
    """

    name: str
    arrivals: tuple[Arrival, ...]


def read_trace(path: Path) -> list[Arrival]:
    """Return all requests of a trace: CSV with lengths and `arrival_s`, or Mooncake's JSONL."""
    if path.suffix == ".jsonl":
        lines = (json.loads(line) for line in path.read_text().splitlines() if line)
        return [
            Arrival(line["timestamp"] / 1000, line["input_length"], line["output_length"])
            for line in lines
        ]
    with path.open(newline="") as file:
        return [
            Arrival(float(r["arrival_s"]), int(r["input_tokens"]), int(r["output_tokens"]))
            for r in csv.DictReader(file)
        ]


def made_up(count: int) -> list[Arrival]:
    """Return requests whose lengths are log-normal and that come independently of one another."""
    numbers = random.Random(SEED)

    def length(of: tuple[float, float]) -> int:
        return round(numbers.lognormvariate(math.log(of[0]), of[1]))

    now = 0.0
    arrivals = []
    for _ in range(count):
        arrivals.append(Arrival(now, length(MADE_UP_PROMPT), length(MADE_UP_OUTPUT)))
        now += numbers.expovariate(1.0)
    return arrivals


def scaled(
    arrivals: Sequence[Arrival], *, divisor: float, rate: float, seconds: float, max_tokens: int
) -> tuple[Arrival, ...]:
    """Return the first requests of a trace at the size of this machine.

    Args:
      arrivals: of the trace.
      divisor: of all lengths.
      rate: requests per second, on average over those that are taken.
      seconds: how long they shall last.
      max_tokens: that one request may have, in and out.
    """
    taken = sorted(arrivals)[: max(2, round(rate * seconds))]
    began_at, ended_at = taken[0].at_s, taken[-1].at_s
    stretch = (len(taken) - 1) / rate / max(ended_at - began_at, 1e-9)
    half = max_tokens // 2
    return tuple(
        Arrival(
            (arrival.at_s - began_at) * stretch,
            min(half, max(MIN_PROMPT, round(arrival.prompt_tokens / divisor))),
            min(half, max(MIN_OUTPUT, round(arrival.output_tokens / divisor))),
        )
        for arrival in taken
    )


def shape_of(
    path: Path | None, scale: Callable[[Sequence[Arrival]], tuple[Arrival, ...]], count: int
) -> Shape:
    """Return the shape of a trace, or a made-up one where there is no such file."""
    if path is not None and path.exists():
        return Shape(path.stem, scale(read_trace(path)))
    return Shape("made up, no trace here", scale(made_up(count)))


def lengths_in_words(arrivals: Iterable[Arrival]) -> str:
    """Return what the requests are like."""
    listed = list(arrivals)
    prompts = sorted(arrival.prompt_tokens for arrival in listed)
    outputs = sorted(arrival.output_tokens for arrival in listed)
    middle = len(listed) // 2
    return (
        f"{len(listed)} requests in {listed[-1].at_s:.0f} s, tokens in {prompts[middle]} (median) "
        f"to {prompts[-1]}, out {outputs[middle]} to {outputs[-1]}"
    )

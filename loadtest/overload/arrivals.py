"""Plans of open loops: the arrivals and sizes of requests, synthetic or from a real trace.

Pure functions of a seed.
"""

from __future__ import annotations

import csv
import json
import math
import random
from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from triolet.service_class import ServiceClass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


SLO_S: Final = 2.0
"""SLO of the first token: ten times the time without load."""
DEADLINE_S: Final = 10.0
"""Deadline of the answer: a request that starts in time ends in time unless rows are scarce."""
MIN_PROMPT: Final = 4
MIN_OUTPUT: Final = 2
"""A completion of one token would come from prefill alone, without decode."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A planned request.

    Attributes:
      at_s: time after the start of the plan.
      prompt_tokens: length of the prompt.
      output_tokens: length of the answer.
      slo_s: deadline of the first token, relative to `at_s`.
      deadline_s: deadline of the whole answer, relative to `at_s`.
      tenant: its tenant; empty for none.
      service_class: its service class.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    slo_s: float = SLO_S
    deadline_s: float = DEADLINE_S
    tenant: str = ""
    service_class: ServiceClass = ServiceClass.DEFAULT


@dataclass(frozen=True, slots=True)
class Sizes:
    """Distribution of the lengths of prompts and answers: log-normal, cut at both ends.

    Attributes:
      prompt: median of prompts.
      output: median of answers.
      spread: standard deviation of the logarithm of both.
      most: maximum length of both.
    """

    prompt: float = 96.0
    output: float = 20.0
    spread: float = 0.5
    most: int = 240

    def draw(self, numbers: random.Random) -> tuple[int, int]:
        """Return the lengths of a prompt and its answer."""
        prompt = numbers.lognormvariate(math.log(self.prompt), self.spread)
        output = numbers.lognormvariate(math.log(self.output), self.spread)
        return fit(prompt, MIN_PROMPT, self.most), fit(output, MIN_OUTPUT, self.most)


def fit(tokens: float, least: int, most: int) -> int:
    """Round a number of tokens and clamp it to the bounds."""
    return min(most, max(least, round(tokens)))


def poisson(numbers: random.Random, rate: float, seconds: float) -> Iterator[float]:
    """Yield the times of a Poisson process.

    Args:
      numbers: random source.
      rate: mean rate per second.
      seconds: end of the times.
    """
    return bursty(numbers, rate, seconds, 1.0)


def bursty(numbers: random.Random, rate: float, seconds: float, cv: float) -> Iterator[float]:
    """Yield times with gamma-distributed gaps.

    Args:
      numbers: random source.
      rate: mean rate per second.
      seconds: end of the times.
      cv: standard deviation of the gaps over their mean; 1 is Poisson, more is burstier.
    """
    shape = 1.0 / (cv * cv)
    now = numbers.gammavariate(shape, 1.0 / (rate * shape))
    while now < seconds:
        yield now
        now += numbers.gammavariate(shape, 1.0 / (rate * shape))


def on_off(
    numbers: random.Random, rate: float, seconds: float, *, period_s: float, share: float
) -> Iterator[float]:
    """Yield times that are only in the first part of each period.

    Args:
      numbers: random source.
      rate: mean rate per second, over whole periods.
      seconds: end of the times.
      period_s: length of a period.
      share: share of a period with arrivals.
    """
    for busy_s in poisson(numbers, rate / share, seconds * share):
        whole, rest = divmod(busy_s, period_s * share)
        yield whole * period_s + rest


def requests(
    moments: Iterator[float],
    numbers: random.Random,
    like: Arrival,
    sizes: Sizes,
) -> list[Arrival]:
    """Return a request for each time, with random lengths."""
    arrivals = []
    for at_s in moments:
        prompt_tokens, output_tokens = sizes.draw(numbers)
        arrivals.append(
            replace(like, at_s=at_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        )
    return arrivals


def merged(*streams: Sequence[Arrival]) -> list[Arrival]:
    """Return all arrivals in order of time."""
    return sorted((a for stream in streams for a in stream), key=lambda arrival: arrival.at_s)


def in_classes(
    arrivals: Sequence[Arrival],
    shares: Sequence[tuple[ServiceClass, float]],
    numbers: random.Random,
    slo_of: Callable[[ServiceClass], float] | None = None,
) -> list[Arrival]:
    """Return the same requests in random classes.

    Args:
      arrivals: requests of any class.
      shares: share of each class; they need not add up to 1.
      numbers: random source.
      slo_of: returns the SLO of a class; None leaves it unchanged.
    """
    classes, weights = zip(*shares, strict=True)
    drawn = numbers.choices(classes, weights, k=len(arrivals))
    return [
        replace(
            arrival,
            service_class=chosen,
            slo_s=arrival.slo_s if slo_of is None else slo_of(chosen),
        )
        for arrival, chosen in zip(arrivals, drawn, strict=True)
    ]


def shifted(arrivals: Sequence[Arrival], by_s: float) -> list[Arrival]:
    """Return the same requests, later."""
    return [replace(arrival, at_s=arrival.at_s + by_s) for arrival in arrivals]


def offered(arrivals: Sequence[Arrival], seconds: float) -> tuple[float, float, float]:
    """Return the requests, prompt tokens and output tokens per second."""
    return (
        len(arrivals) / seconds,
        sum(a.prompt_tokens for a in arrivals) / seconds,
        sum(a.output_tokens for a in arrivals) / seconds,
    )


FOLDER: Final = Path(__file__).parents[3] / "shared" / "data" / "traces"
CLIENTS: Final = "servegen_m-small_clients_hourly.csv"
LENGTHS: Final = "servegen_m-small_client_lengths.csv"
SHARES: Final = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
"""Quantiles of lengths in ServeGen's data. The ends are extrapolated from the nearest two."""
MAX_CV: Final = 8.0
"""Limit of a client's burstiness. Some exceed 60, which means at most one burst per minute."""


class NoTraceError(Exception):
    """The files of a trace do not exist."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Target of scaling a trace.

    Attributes:
      rate: mean number of requests per second.
      seconds: duration.
      like: template with the SLO and deadline of each request.
      sizes: target medians and limit of lengths.
    """

    rate: float
    seconds: float
    like: Arrival
    sizes: Sizes

    @property
    def most_requests(self) -> int:
        """Number of requests to take from a trace."""
        return max(2, round(self.rate * self.seconds))


def conversations(name: str, scale: Scale) -> list[Arrival]:
    """Return the first requests of a trace, scaled to this fleet.

    Args:
      name: name of the file.
      scale: target of the scaling.

    Raises:
      NoTraceError: the file does not exist.
    """
    rows = sorted(read_rows(_existing(name)))[: scale.most_requests]
    prompt = scale.sizes.prompt / _middle([row[1] for row in rows])
    output = scale.sizes.output / _middle([row[2] for row in rows])
    return fitted(rows, scale, prompt, output)


def fitted(
    rows: Sequence[tuple[float, int, int]], scale: Scale, prompt: float, output: float
) -> list[Arrival]:
    """Return the first requests of a trace with scaled times and lengths.

    Args:
      rows: time, prompt tokens and output tokens of each request.
      scale: target of the scaling.
      prompt: factor of prompt lengths.
      output: factor of answer lengths.
    """
    rows = sorted(rows)[: scale.most_requests]
    began_at = rows[0][0]
    stretch = (len(rows) - 1) / scale.rate / max(rows[-1][0] - began_at, 1e-9)
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
    """Return the requests of ServeGen's clients in one hour of their day. Each client is a tenant.

    Args:
      hour: hour of the day, 0 to 23.
      scale: target for all clients together.
      seed: random seed of times and lengths.

    Raises:
      NoTraceError: the files do not exist.
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
        raise NoTraceError(f"{path} does not exist: the trace is not part of this project")
    return path


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_rows(path: Path) -> list[tuple[float, int, int]]:
    """Return time and lengths of all requests, from CSV with `arrival_s` or Mooncake's JSONL."""
    if path.suffix == ".jsonl":
        lines = [json.loads(line) for line in path.read_text().splitlines() if line]
        return [(r["timestamp"] / 1000, r["input_length"], r["output_length"]) for r in lines]
    return [
        (float(r["arrival_s"]), int(r["input_tokens"]), int(r["output_tokens"]))
        for r in _table(path)
    ]


def _lengths(path: Path) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
    """Return the quantiles of prompt and answer lengths by client, if known."""

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
    """Return the mean of the clients' medians, weighted by requests. A long tail does not affect
    it."""
    median_at = SHARES.index(0.5)
    return sum(rate * lengths[name][kind][median_at] for name, rate, _ in present) / total


def _middle(values: list[int]) -> float:
    return float(max(1, sorted(values)[len(values) // 2]))

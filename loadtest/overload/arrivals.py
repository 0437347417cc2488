"""Who comes when, and wants what: made up, or out of a real trace. An open loop's plan.

Pure functions of a seed. Knows nothing of servers, and nothing of what became of anybody.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from triolet.service_class import ServiceClass

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence

SLO_S: Final = 2.0
"""Until a first token: an order of magnitude above what it takes where nobody waits."""
DEADLINE_S: Final = 10.0
"""Until the end: what is begun in time is done in time, unless rows are what is missing."""
MIN_PROMPT: Final = 4
MIN_OUTPUT: Final = 2
"""A completion of one token is prefill's alone: nothing of it is ever decoded."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Attributes:
      at_s: after the beginning.
      prompt_tokens: in.
      output_tokens: out.
      slo_s: its first token is of use until so long after `at_s`.
      deadline_s: the whole answer is of use until so long after `at_s`.
      tenant: whose it is; empty for nobody's in particular.
      service_class: how early it may go.
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
    """How long prompts and answers are: log-normal, cut at both ends.

    Attributes:
      prompt: median.
      output: median.
      spread: of the logarithm, of both.
      most: tokens that a prompt or an answer may have.
    """

    prompt: float = 96.0
    output: float = 20.0
    spread: float = 0.5
    most: int = 240

    def draw(self, numbers: random.Random) -> tuple[int, int]:
        """Return tokens of a prompt and of its answer."""
        prompt = numbers.lognormvariate(math.log(self.prompt), self.spread)
        output = numbers.lognormvariate(math.log(self.output), self.spread)
        return fit(prompt, MIN_PROMPT, self.most), fit(output, MIN_OUTPUT, self.most)


def fit(tokens: float, least: int, most: int) -> int:
    """Return whole tokens within bounds."""
    return min(most, max(least, round(tokens)))


def poisson(numbers: random.Random, rate: float, seconds: float) -> Iterator[float]:
    """Yield moments that know nothing of one another.

    Args:
      numbers: draws.
      rate: per second.
      seconds: until when.
    """
    return bursty(numbers, rate, seconds, 1.0)


def bursty(numbers: random.Random, rate: float, seconds: float, cv: float) -> Iterator[float]:
    """Yield moments with gamma gaps.

    Args:
      numbers: draws.
      rate: per second.
      seconds: until when.
      cv: standard deviation of the gaps over their mean; 1 is Poisson, more comes in bursts.
    """
    shape = 1.0 / (cv * cv)
    now = numbers.gammavariate(shape, 1.0 / (rate * shape))
    while now < seconds:
        yield now
        now += numbers.gammavariate(shape, 1.0 / (rate * shape))


def on_off(
    numbers: random.Random, rate: float, seconds: float, *, period_s: float, share: float
) -> Iterator[float]:
    """Yield moments that come only in the first part of each period.

    Args:
      numbers: draws.
      rate: per second, on average over whole periods.
      seconds: until when.
      period_s: from one beginning to the next.
      share: of a period in which they come.
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
    """Return a request for each moment, alike in all but length."""
    arrivals = []
    for at_s in moments:
        prompt_tokens, output_tokens = sizes.draw(numbers)
        arrivals.append(
            replace(like, at_s=at_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        )
    return arrivals


def merged(*streams: Sequence[Arrival]) -> list[Arrival]:
    """Return everybody in the order in which they come."""
    return sorted((a for stream in streams for a in stream), key=lambda arrival: arrival.at_s)


def in_classes(
    arrivals: Sequence[Arrival],
    shares: Sequence[tuple[ServiceClass, float]],
    numbers: random.Random,
    slo_of: Callable[[ServiceClass], float] | None = None,
) -> list[Arrival]:
    """Return the same requests, each in a class that is drawn.

    Args:
      arrivals: of whatever class.
      shares: of each class; they need not add up to 1.
      numbers: draws.
      slo_of: what a class was promised; None leaves it as it is.
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
    """Return requests, prompt tokens and output tokens per second."""
    return (
        len(arrivals) / seconds,
        sum(a.prompt_tokens for a in arrivals) / seconds,
        sum(a.output_tokens for a in arrivals) / seconds,
    )

"""Results of requests, and figures over them: goodput, TTFT, refusals, waste. Pure.

Every time counts from the planned time of sending, not the actual one. A client that waits for a
slow server before its next request would measure only the server's good moments (coordinated
omission).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from ..harness import statistics

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .arrivals import Arrival


IN_A_ROW: Final = 3
"""Consecutive windows with a normal median that count as recovered, because one may be chance."""


class Fate(StrEnum):
    """How a request ended for its client."""

    WHOLE = "whole"
    """Complete, with all requested tokens."""
    CAPPED = "capped"
    """Complete but shortened by the server under load."""
    REFUSED = "refused"
    """Refused before any token, with a Retry-After."""
    DROPPED = "dropped"
    """Accepted, but dropped before any work because it would have been too late."""
    FAILED = "failed"
    """Anything else: an error, a deadline, a broken connection."""


@dataclass(slots=True)
class Outcome:
    """Result of a request. Times are relative to the planned time of sending.

    Attributes:
      arrival: the planned request.
      fate: how it ended.
      late_s: delay of the load generator itself.
      first_s: time to the first token; None without one.
      end_s: time to its end.
      tokens: number of received tokens.
      code: error code.
      retry_after_s: Retry-After of a refusal.
      again: outcome of the retry after `retry_after_s`; None without a retry.
    """

    arrival: Arrival
    fate: Fate = Fate.FAILED
    late_s: float = 0.0
    first_s: float | None = None
    end_s: float = 0.0
    tokens: int = 0
    code: str = ""
    retry_after_s: float | None = None
    again: Outcome | None = None

    @property
    def is_good(self) -> bool:
        """Return whether it was useful: the first token and the whole answer came in time. A
        shortened answer is useful too."""
        return (
            self.fate in (Fate.WHOLE, Fate.CAPPED)
            and self.first_s is not None
            and self.first_s <= self.arrival.slo_s
            and self.end_s <= self.arrival.deadline_s
        )

    @property
    def was_decoded(self) -> bool:
        """Return whether decode used the KV of its prompt."""
        return self.tokens >= min(2, self.arrival.output_tokens)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of the requests that arrived within a time span.

    Attributes:
      offered: number of requests.
      good: number of useful requests.
      goodput: useful requests per second.
      token_goodput: tokens of useful requests per second.
      refused: share of refused requests.
      dropped: share of dropped requests.
      dropped_of_accepted: share of dropped requests among the accepted ones.
      failed: share of failed requests.
      ttft_p50_s: median TTFT of requests that were accepted and not dropped.
      ttft_p99_s: p99 of the same.
      ttft_over_slo: p99 of TTFT / SLO of accepted requests.
      refusal_p99_s: p99 of the time to a refusal.
      late_p99_s: p99 of the load generator's delay.
    """

    offered: int
    good: int
    goodput: float
    token_goodput: float
    refused: float
    dropped: float
    dropped_of_accepted: float
    failed: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    ttft_over_slo: float | None
    refusal_p99_s: float | None
    late_p99_s: float


def figures(outcomes: Iterable[Outcome], seconds: float) -> Figures:
    """Return the figures of requests that arrived within a time span of `seconds`."""
    listed = list(outcomes)
    good = [outcome for outcome in listed if outcome.is_good]
    refused = [outcome for outcome in listed if outcome.fate is Fate.REFUSED]
    failed = [outcome for outcome in listed if outcome.fate is Fate.FAILED]
    dropped = [outcome for outcome in listed if outcome.fate is Fate.DROPPED]
    taken = [o for o in listed if o.fate not in (Fate.REFUSED, Fate.DROPPED)]
    # A request that was not dropped but got no token waited at least until the end.
    first_s = [o.end_s if o.first_s is None else o.first_s for o in taken]
    over = [t / o.arrival.slo_s for t, o in zip(first_s, taken, strict=True)]
    number = max(len(listed), 1)
    return Figures(
        offered=len(listed),
        good=len(good),
        goodput=len(good) / seconds,
        token_goodput=sum(outcome.tokens for outcome in good) / seconds,
        refused=len(refused) / number,
        dropped=len(dropped) / number,
        dropped_of_accepted=len(dropped) / max(len(listed) - len(refused), 1),
        failed=len(failed) / number,
        ttft_p50_s=percentile(first_s, 0.5),
        ttft_p99_s=percentile(first_s, 0.99),
        ttft_over_slo=percentile(over, 0.99),
        refusal_p99_s=percentile([outcome.end_s for outcome in refused], 0.99),
        late_p99_s=percentile([outcome.late_s for outcome in listed], 0.99) or 0.0,
    )


def within(outcomes: Iterable[Outcome], begin_s: float, end_s: float) -> list[Outcome]:
    """Return the outcomes of requests that arrived between two times."""
    return [outcome for outcome in outcomes if begin_s <= outcome.arrival.at_s < end_s]


def in_slo(outcomes: Iterable[Outcome]) -> float:
    """Return the share of requests answered within their SLO; 1 if there were none."""
    listed = list(outcomes)
    return sum(outcome.is_good for outcome in listed) / len(listed) if listed else 1.0


def wasted(outcomes: Iterable[Outcome], computed_tokens: int) -> float:
    """Return the share of computed prompt tokens that were never used by decode.

    Args:
      outcomes: outcomes of all requests; a retry counts as a second one. Prompts have no common
        prefixes, so caches have no effect.
      computed_tokens: prompt tokens computed by all workers.
    """
    came = [one for o in outcomes for one in (o, o.again) if one is not None]
    used = sum(one.arrival.prompt_tokens for one in came if one.was_decoded)
    return max(0.0, 1.0 - used / computed_tokens) if computed_tokens else 0.0


def tokens_by_tenant(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Return the tokens of each tenant: its answers, and the prompts that decode used."""
    got: defaultdict[str, int] = defaultdict(int)
    for outcome in outcomes:
        got[outcome.arrival.tenant] += outcome.tokens
        got[outcome.arrival.tenant] += outcome.arrival.prompt_tokens * outcome.was_decoded
    return dict(got)


def jain(shares: Sequence[float]) -> float:
    """Return Jain's index: 1 if all shares are equal, 1/n if one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def recovery_s(
    outcomes: Iterable[Outcome], ended_s: float, normal_s: float, window_s: float = 1.0
) -> float | None:
    """Return the time from the end of a surge until the median TTFT is normal again.

    Args:
      outcomes: outcomes of all requests, including those after the surge.
      ended_s: end of the surge.
      normal_s: median TTFT that counts as normal.
      window_s: length of the windows for medians.

    Returns:
      Seconds to the end of the first of `IN_A_ROW` normal windows; None if there are none. Later
      windows need not be normal: with few requests, single windows are not, even without a surge.
      Windows without an accepted request do not count as normal.
    """
    groups: defaultdict[int, list[float]] = defaultdict(list)
    windows = set()
    for outcome in outcomes:
        number = math.floor((outcome.arrival.at_s - ended_s) / window_s)
        if number < 0:
            continue
        windows.add(number)
        if outcome.first_s is not None:
            groups[number].append(outcome.first_s)
    num_normal = 0
    for number in sorted(windows):
        is_normal = (percentile(groups[number], 0.5) or math.inf) <= normal_s
        num_normal = num_normal + 1 if is_normal else 0
        if num_normal == IN_A_ROW:
            return (number + 2 - IN_A_ROW) * window_s
    return None


def percentile(values: Iterable[float], share: float) -> float | None:
    """Return the nearest-rank percentile for a share; None without values."""
    listed = list(values)
    return statistics.percentile(listed, 100 * share) if listed else None


def taken_at_return(outcomes: Iterable[Outcome]) -> float | None:
    """Return the share of clients that returned after Retry-After and were then accepted; None if
    none returned."""
    returned = [outcome.again for outcome in outcomes if outcome.again is not None]
    if not returned:
        return None
    out = (Fate.REFUSED, Fate.DROPPED)
    return sum(again.fate not in out for again in returned) / len(returned)

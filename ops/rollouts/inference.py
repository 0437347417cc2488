"""Statistics of a rollout: binomial tail, e-values over buckets, randomization test, and confidence
sequence of a ratio. Numbers in, numbers out.

The assignment of buckets to versions is the only randomness that these rely on. Users may differ
and their failures may come in bursts. See docs/architecture/judge.md.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

THETAS: Final = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0)
"""Odds ratios of a bucket's first failure that the e-value bets on, with equal weights: it grows
nearly as fast as the best of them."""
DRAWS: Final = 19_999
"""Redrawn assignments of a randomization test. The smallest p is 1 in 20,000, a quarter of the
level of 4 steps with 5 signals."""
MOST_CELLS: Final = 1_000_000
"""Numbers drawn at a time: 8 MB."""
COST_ALPHA: Final = 0.01
"""Probability that a confidence sequence is ever wrong."""
COST_PRIOR: Final = 4.0
"""Batches that the prior of the confidence sequence is worth: bounds of 10 % at a noise of 10 to
30 % are about as tight as with the best value."""


def binomial_tail(count: int, draws: int, share: float) -> float:
    """Return P(X >= count) for X ~ Binomial(draws, share), with 0 < share < 1.

    >>> round(binomial_tail(3, 4, 0.1), 6)
    0.0037
    """
    return math.fsum(
        math.exp(
            math.lgamma(draws + 1)
            - math.lgamma(hits + 1)
            - math.lgamma(draws - hits + 1)
            + hits * math.log(share)
            + (draws - hits) * math.log1p(-share)
        )
        for hits in range(count, draws + 1)
    )


def log_factors(share: float) -> tuple[list[float], list[float]]:
    """Return the logarithms by which a bucket's first failure moves each bet, on the stable version
    and on the canary.

    Args:
      share: probability that it is on the canary if both versions are equal.
    """
    losses = [-math.log1p((theta - 1.0) * share) for theta in THETAS]
    return losses, [loss + math.log(theta) for loss, theta in zip(losses, THETAS, strict=True)]


def log_e_value(log_bets: Sequence[float]) -> float:
    """Return the logarithm of the mean of bets, each given as its logarithm."""
    highest = max(log_bets)
    total = math.fsum(math.exp(bet - highest) for bet in log_bets)
    return highest + math.log(total / len(log_bets))


def bucket_log_e(on_stable: int, on_canary: int, share: float) -> float:
    """Return the log e-value of the buckets that have failed.

    If the versions are equal, its exponential has the mean 1, so it ever reaches 1/a with a
    probability of at most a, however often one looks.

    Args:
      on_stable: buckets on the stable version that failed in this step.
      on_canary: the same on the canary.
      share: probability with which this step moved a bucket to the canary.

    >>> round(math.exp(bucket_log_e(0, 2, 0.5)), 3)  # the mean of (2 theta / (1 + theta)) ** 2
    2.189
    """
    factors = zip(*log_factors(share), strict=True)
    return log_e_value([on_stable * loss + on_canary * gain for loss, gain in factors])


def randomization_p(
    groups: Mapping[tuple[int, int], Sequence[int]], share: float, seed: int, level: float
) -> float:
    """Return the p-value of the canary's excess of failures, by redrawing the assignment.

    Buckets with equal counts are exchangeable, so a redrawn assignment is a binomial number of
    canary buckets for each pair of counts. Redrawing stops when p must exceed `level`; the p-value
    is then the estimate so far.

    Args:
      groups: number of stable and of canary buckets, by (requests, failures).
      share: probability with which a bucket was assigned to the canary.
      seed: seed of the draws.
      level: above it, the exact value does not matter.
    """
    ordered = sorted(groups.items())  # the draws depend on the order
    counts = numpy.array([one for one, _ in ordered], dtype=float).reshape(-1, 2)
    assigned = numpy.array([sides for _, sides in ordered], dtype=int).reshape(-1, 2)
    buckets = assigned.sum(axis=1)
    seen = _excess(counts, buckets, assigned[None, :, 1])[0]
    rng = numpy.random.default_rng(seed)
    at_once = max(1, min(1_000, MOST_CELLS // max(1, len(counts))))
    done = as_high = 0
    while done < DRAWS and as_high < level * (DRAWS + 1):
        size = min(at_once, DRAWS - done)
        drawn = rng.binomial(buckets, share, size=(size, len(counts)))
        # Sums of floats may differ in the last bit between equal assignments.
        as_high += int((_excess(counts, buckets, drawn) >= seen - 1e-9).sum())
        done += size
    return (1 + as_high) / (1 + done)


def _excess(
    counts: NDArray[numpy.float64], buckets: NDArray[numpy.int64], canary: NDArray[numpy.int64]
) -> NDArray[numpy.float64]:
    """Return the canary's failure share minus the stable version's, divided by its standard error
    over buckets; 0 if one has no requests.

    Args:
      counts: requests and failures of a bucket, for each group.
      buckets: buckets of each group.
      canary: canary buckets of each group, one row for each assignment.
    """
    requests, failures = counts.T
    stable = buckets - canary
    on_canary, on_stable = canary @ requests, stable @ requests
    expected = requests * ((buckets @ failures) / max(1.0, float(buckets @ requests)))
    squares = (failures - expected) ** 2
    with numpy.errstate(divide="ignore", invalid="ignore"):
        excess = (canary @ failures) / on_canary - (stable @ failures) / on_stable
        error = numpy.sqrt((canary @ squares) / on_canary**2 + (stable @ squares) / on_stable**2)
        studentised: NDArray[numpy.float64] = numpy.nan_to_num(
            excess / error, nan=0.0, posinf=0.0, neginf=0.0
        )
    return studentised


def mean_bounds(number: int, total: float, squares: float) -> tuple[float, float] | None:
    """Return bounds on the mean of normal values of unknown variance that hold at all times
    together, except with probability COST_ALPHA; None while there is no finite bound.

    A t-test with a normal prior on the effect, inverted (Lai 1976; Wang and Ramdas 2023).

    Args:
      number: number of values.
      total: their sum.
      squares: the sum of their squares.

    >>> [round(bound, 3) for bound in mean_bounds(100, 5.0, 4.25)]  # mean 0.05, deviation 0.2
    [-0.025, 0.125]
    """
    if number == 0:
        return None
    weight = number + COST_PRIOR
    shrink = (COST_ALPHA**2 * COST_PRIOR / weight) ** (1 / number)
    room = shrink * weight - COST_PRIOR
    if room <= 0.0:
        return None
    mean = total / number
    variance = max(0.0, squares / number - mean**2)
    width = math.sqrt(variance * weight * (1.0 - shrink) / room)
    return mean - width, mean + width

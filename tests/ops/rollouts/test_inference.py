"""Tests of a rollout's statistics: examples by hand, and their promises by exact enumeration."""

from __future__ import annotations

import math
from itertools import product

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.rollouts import inference
from ops.rollouts.inference import (
    DRAWS,
    THETAS,
    binomial_tail,
    bucket_log_e,
    log_e_value,
    log_factors,
    mean_bounds,
    randomization_p,
)

SHARES = st.floats(0.01, 0.99)


@pytest.mark.parametrize(
    ("count", "draws", "share", "tail"),
    [
        (0, 5, 0.3, 1.0),
        (5, 5, 0.5, 1 / 32),
        (3, 4, 0.1, 4 * 0.001 * 0.9 + 0.0001),
        (2, 3, 0.5, 0.5),
        (6, 5, 0.5, 0.0),
    ],
)
def test_the_tail_is_that_of_the_binomial(
    count: int, draws: int, share: float, tail: float
) -> None:
    assert binomial_tail(count, draws, share) == pytest.approx(tail)


def test_the_tail_of_all_buckets_is_a_number() -> None:
    assert 0.0 <= binomial_tail(9_000, 10_000, 0.01) < 1e-300
    assert binomial_tail(90, 10_000, 0.01) == pytest.approx(0.853, abs=0.01)


def test_one_bucket_moves_the_bets_by_its_probability() -> None:
    # The candidate has half of the moved buckets. At an odds ratio of 3 it would have 3 of 4.
    down, up = log_factors(0.5)
    at_3 = THETAS.index(3.0)
    assert math.exp(up[at_3]) == pytest.approx(0.75 / 0.5)
    assert math.exp(down[at_3]) == pytest.approx(0.25 / 0.5)


def test_an_e_value_is_the_mean_of_its_bets() -> None:
    assert log_e_value([0.0] * 8) == 0.0
    assert math.exp(log_e_value([math.log(2.0), math.log(4.0)])) == pytest.approx(3.0)
    assert log_e_value([1e4, 1e4]) == pytest.approx(1e4), "no overflow"
    by_hand = sum((2 * t / (1 + t)) ** 3 * (2 / (1 + t)) for t in THETAS) / len(THETAS)
    assert math.exp(bucket_log_e(1, 3, 0.5)) == pytest.approx(by_hand)


@given(buckets=st.integers(0, 15), share=SHARES)
def test_the_e_value_of_equal_versions_has_the_mean_1(buckets: int, share: float) -> None:
    mean = math.fsum(
        math.comb(buckets, canary)
        * share**canary
        * (1 - share) ** (buckets - canary)
        * math.exp(bucket_log_e(buckets - canary, canary, share))
        for canary in range(buckets + 1)
    )
    assert mean == pytest.approx(1.0)


@given(shares=st.lists(SHARES, min_size=1, max_size=8))
def test_bets_on_incidents_have_the_mean_1_though_shares_change(shares: list[float]) -> None:
    mean = 0.0
    for sides in product((0, 1), repeat=len(shares)):
        chance, bets = 1.0, [0.0] * len(THETAS)
        for side, share in zip(sides, shares, strict=True):
            chance *= share if side else 1 - share
            bets = [bet + move for bet, move in zip(bets, log_factors(share)[side], strict=True)]
        mean += chance * math.exp(log_e_value(bets))
    assert mean == pytest.approx(1.0)


@pytest.mark.parametrize("share", [0.01, 0.1, 4 / 9, 0.8])
def test_a_limit_is_ever_reached_as_rarely_as_promised(share: float) -> None:
    """Follow every path of 60 failed buckets with a look after each."""
    limit = 50.0
    alive, reached = {0: 1.0}, 0.0  # probability by candidate's buckets, of what never reached it
    for number in range(1, 61):
        paths: dict[int, float] = {}
        for canary, chance in alive.items():
            paths[canary] = paths.get(canary, 0.0) + chance * (1 - share)
            paths[canary + 1] = paths.get(canary + 1, 0.0) + chance * share
        alive = {}
        for canary, chance in paths.items():
            if bucket_log_e(number - canary, canary, share) >= math.log(limit):
                reached += chance
            else:
                alive[canary] = chance
    assert 0.0 < reached <= 1 / limit


def test_a_regression_reaches_the_limit() -> None:
    # Half of the moved buckets are on the candidate, but nine of ten failures.
    assert bucket_log_e(2, 18, 0.5) > math.log(100) > bucket_log_e(9, 11, 0.5)


def exact_p(buckets: list[tuple[int, int]], canary: tuple[int, ...], share: float) -> float:
    """Return the randomization test's p-value from all assignments."""
    found = 0.0
    for drawn in product((0, 1), repeat=len(buckets)):
        chance = math.prod(share if side else 1 - share for side in drawn)
        if excess(buckets, drawn) >= excess(buckets, canary) - 1e-9:
            found += chance
    return found


def excess(buckets: list[tuple[int, int]], canary: tuple[int, ...]) -> float:
    """Return the studentised difference of the shares of failures."""
    mean = sum(bad for _, bad in buckets) / sum(total for total, _ in buckets)
    parts = []
    for side in (1, 0):
        own = [bucket for bucket, at in zip(buckets, canary, strict=True) if at == side]
        total = sum(requests for requests, _ in own)
        if total == 0:
            return 0.0
        squares = sum((bad - requests * mean) ** 2 for requests, bad in own)
        parts.append((sum(bad for _, bad in own) / total, squares / total**2))
    error = math.sqrt(parts[0][1] + parts[1][1])
    return (parts[0][0] - parts[1][0]) / error if error else 0.0


def grouped(
    buckets: list[tuple[int, int]], canary: tuple[int, ...]
) -> dict[tuple[int, int], list[int]]:
    groups: dict[tuple[int, int], list[int]] = {}
    for bucket, side in zip(buckets, canary, strict=True):
        groups.setdefault(bucket, [0, 0])[side] += 1
    return groups


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_redrawn_assignments_give_the_exact_p_value(share: float) -> None:
    buckets = [(5, 4), (5, 0), (5, 0), (2, 1), (30, 3), (1, 0), (1, 1), (8, 0)]
    for canary in ((1, 0, 0, 0, 0, 0, 0, 0), (1, 0, 1, 0, 0, 0, 1, 0), (0, 1, 0, 0, 1, 0, 0, 0)):
        exact = exact_p(buckets, canary, share)
        p = randomization_p(grouped(buckets, canary), share, 1, level=1.0)
        error = math.sqrt(exact * (1 - exact) / DRAWS)
        assert p == pytest.approx(exact, abs=4 * error + 1 / DRAWS)


def test_failures_of_the_candidate_only_give_a_small_p_value() -> None:
    groups = {(10, 0): [300, 20], (10, 5): [0, 12]}
    assert randomization_p(groups, 0.1, 1, 0.05) == pytest.approx(1 / (1 + DRAWS))
    mirrored = {(10, 0): [300, 20], (10, 5): [12, 0]}
    assert randomization_p(mirrored, 0.1, 1, 0.05) > 0.05


@pytest.mark.parametrize("groups", [{}, {(3, 0): [10, 2]}, {(3, 1): [9, 0]}])
def test_nothing_to_compare_is_no_evidence(groups: dict[tuple[int, int], list[int]]) -> None:
    assert randomization_p(groups, 0.1, 1, 0.05) == pytest.approx(1.0)


def test_an_early_stop_decides_as_all_draws_do() -> None:
    rng = numpy.random.default_rng(3)
    for seed in range(20):
        requests = rng.poisson(3.0, 60) + 1
        failures = rng.binomial(requests, 0.1)
        canary = tuple((rng.random(60) < 0.3).astype(int).tolist())
        buckets = list(zip(requests.tolist(), failures.tolist(), strict=True))
        early = randomization_p(grouped(buckets, canary), 0.3, seed, 0.05)
        late = randomization_p(grouped(buckets, canary), 0.3, seed, 1.0)
        assert (early > 0.05) == (late > 0.05)


def test_draws_repeat_with_their_seed() -> None:
    groups = {(10, 0): [50, 6], (10, 1): [5, 2]}
    first, again, other = (randomization_p(groups, 0.1, seed, 1.0) for seed in (1, 1, 2))
    assert first == again != other
    turned = dict(reversed(groups.items()))
    assert randomization_p(turned, 0.1, 1, 1.0) == first, "whatever the order of the groups"


def test_a_large_test_is_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {(number, number % 3): [4, 1] for number in range(3, 50)}
    whole = randomization_p(groups, 0.2, 1, 1.0)
    monkeypatch.setattr(inference, "MOST_CELLS", 1_000)
    assert randomization_p(groups, 0.2, 1, 1.0) == pytest.approx(whole, abs=0.02)


@given(values=st.lists(st.floats(-1, 1), min_size=12, max_size=30), shift=st.floats(-3, 3))
def test_bounds_move_with_their_values(values: list[float], shift: float) -> None:
    def bounds(xs: list[float]) -> tuple[float, float]:
        found = mean_bounds(len(xs), sum(xs), sum(x * x for x in xs))
        assert found is not None
        return found

    low, high = bounds(values)
    assert low <= sum(values) / len(values) <= high
    moved = bounds([value + shift for value in values])
    assert moved == pytest.approx((low + shift, high + shift), abs=1e-5)


def test_few_values_have_no_bounds() -> None:
    assert mean_bounds(0, 0.0, 0.0) is None
    assert mean_bounds(1, 0.5, 0.25) is None
    assert mean_bounds(2, 1.0, 1.0) is None
    numbers = (number for number in range(2, 50) if mean_bounds(number, 0.0, number) is not None)
    assert next(numbers) == 9


def test_the_width_is_that_of_the_formula() -> None:
    # 100 values with the mean 0 and the variance 1; alpha 0.01, prior worth 4.
    shrink = (0.01**2 * 4 / 104) ** (1 / 100)
    width = math.sqrt(104 * (1 - shrink) / (104 * shrink - 4))
    assert mean_bounds(100, 0.0, 100.0) == pytest.approx((-width, width))
    assert width == pytest.approx(0.38, abs=0.02)


def test_bounds_are_hardly_ever_wrong_at_any_time() -> None:
    rng = numpy.random.default_rng(7)
    wrong = 0
    for _ in range(400):
        values = rng.normal(0.1, 0.3, 200)
        totals, squares = values.cumsum(), (values**2).cumsum()
        bounds = [mean_bounds(n, totals[n - 1], squares[n - 1]) for n in range(2, 201)]
        wrong += any(found and not found[0] <= 0.1 <= found[1] for found in bounds)
    assert 0 < wrong <= 10, "1 %; the limit is three standard deviations above"


def test_a_decision_on_equal_costs_takes_as_long_as_the_page_says() -> None:
    def batches(noise: float) -> int:
        limit = math.log(1.10)
        return next(
            n
            for n in range(2, 1000)
            if (found := mean_bounds(n, 0.0, n * noise**2)) and found[1] <= limit
        )

    assert (batches(0.1), batches(0.3)) == (22, 137)

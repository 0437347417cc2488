"""Tests of the sampler: tokens follow the distribution that temperature, top-p, penalties, bias and
seed define."""

from __future__ import annotations

import math
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engine.batch import Barred, Mask, Sampled, SampleSpec
from engine.sampler import TOP_P_CANDIDATES, sample
from triolet.sampling import MIN_PENALTY, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.batch import PendingMask

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.0, -0.5, -1.0, -3.0, 0.7])
NUM_DRAWS = 3000


def draw(logits: torch.Tensor, fields: dict[str, Any]) -> list[int]:
    """Return a token for each of many seeds."""
    specs = [SampleSpec(SamplingParams(seed=seed, **fields), 4) for seed in range(NUM_DRAWS)]
    return [result.token_id for result in sample(logits.repeat(NUM_DRAWS, 1), specs)]


def one(logits: torch.Tensor, spec: SampleSpec) -> Sampled:
    [result] = sample(logits[None].clone(), [spec])
    return result


def distribution(logits: torch.Tensor, temperature: float, kept: list[int]) -> torch.Tensor:
    weights = torch.zeros(len(logits))
    weights[kept] = torch.softmax(logits / temperature, 0)[kept]
    return weights / weights.sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "temperature", "kept"),
    [
        ({}, 1.0, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"temperature": 0.5}, 0.5, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"temperature": 2.0}, 2.0, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"top_k": 3}, 1.0, [0, 1, 2]),
        ({"top_k": 50}, 1.0, [0, 1, 2, 3, 4, 5, 6, 7]),
        # Shares: 0.403 0.245 0.148 0.110 (token 7) 0.055 0.033 0.020 0.003
        ({"top_p": 0.5}, 1.0, [0, 1]),
        ({"top_p": 0.7}, 1.0, [0, 1, 2]),
        ({"top_p": 1e-6}, 1.0, [0]),
        ({"min_p": 0.25}, 1.0, [0, 1, 2, 7]),
        # Of the best three the first has 0.506, the first two 0.814.
        ({"top_k": 3, "top_p": 0.6}, 1.0, [0, 1]),
        ({"top_k": 5, "min_p": 0.5}, 1.0, [0, 1]),
        ({"top_p": 0.9, "min_p": 0.3}, 1.0, [0, 1, 2]),
        ({"temperature": 0.5, "top_p": 0.85}, 0.5, [0, 1]),
        ({"logit_bias": ((0, -100.0), (6, 4.0))}, 1.0, [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_draws_follow_the_distribution(
    fields: dict[str, Any], temperature: float, kept: list[int]
) -> None:
    biased = LOGITS.clone()
    for token_id, bias in fields.get("logit_bias", ()):
        biased[token_id] += bias
    expected = distribution(biased, temperature, kept).numpy() * NUM_DRAWS
    counts = np.bincount(draw(LOGITS, fields), minlength=8)
    assert set(np.flatnonzero(counts)) <= set(kept)
    likely = expected > 5
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi_square < 24.4  # 7 degrees of freedom, p = 0.001


def test_a_nucleus_larger_than_the_first_look_is_still_whole() -> None:
    flat = torch.zeros(4 * TOP_P_CANDIDATES)
    flat[0] = 1.0
    drawn = draw(flat, {"top_p": 0.9})
    # All but one are equal: nine tenths of the 4,096 can be drawn, 3,000 draws hit about 2,050.
    assert 1900 < len(set(drawn)) < 2200


def test_greedy_takes_the_best_and_no_random_number() -> None:
    for seed in range(3):
        params = SamplingParams(temperature=0.0, seed=seed, top_k=2, top_p=0.1, min_p=0.3)
        assert one(LOGITS, SampleSpec(params, seed)) == Sampled(0)


@pytest.mark.parametrize("temperature", [1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert set(draw(LOGITS * 50, {"temperature": temperature})) == {0}
    assert set(draw(LOGITS * 50, {"temperature": temperature, "top_p": 0.9})) == {0}


def test_the_same_seed_and_position_draw_the_same_token_in_any_batch() -> None:
    torch.manual_seed(3)
    logits = torch.randn(40, 500)
    fields: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.1, "logprobs": 3},
    ]
    specs = [
        SampleSpec(SamplingParams(seed=row % 7, **fields[row % 5]), row % 3, [1, 2], [3])
        for row in range(40)
    ]
    together = sample(logits.clone(), specs)
    assert [one(row, spec) for row, spec in zip(logits, specs, strict=True)] == together
    assert sample(logits[:9].clone(), specs[:7]) == together[:7]


def test_positions_of_one_seed_draw_apart() -> None:
    drawn = [
        one(torch.zeros(1000), SampleSpec(SamplingParams(seed=1), position)).token_id
        for position in range(50)
    ]
    assert len(set(drawn)) > 40


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"presence_penalty": 1.1}, [0.9, 0.4, 1.0, 0.0]),
        ({"frequency_penalty": 0.5}, [1.5, 0.0, 1.0, 0.0]),
        ({"presence_penalty": 0.25, "frequency_penalty": 0.5}, [1.25, -0.25, 1.0, 0.0]),
        ({"frequency_penalty": -1.0}, [3.0, 4.5, 1.0, 0.0]),
        # The prompt counts for repetition only: tokens 0, 1 and 4 (negative: multiplied).
        ({"repetition_penalty": 2.0}, [1.0, 0.75, 1.0, 0.0]),
        ({"repetition_penalty": 2.0, "presence_penalty": 1.0}, [0.0, -0.25, 1.0, 0.0]),
        ({"logit_bias": ((2, 7.0), (3, -1.0))}, [2.0, 1.5, 8.0, -1.0]),
    ],
)
def test_penalties_and_bias_move_the_logits(fields: dict[str, Any], expected: list[float]) -> None:
    logits = LOGITS[None].clone()
    params = SamplingParams(temperature=0.0, **fields)
    [result] = sample(logits, [SampleSpec(params, 3, [4, 4], [0, 1, 1, 1])])
    assert logits[0, :4].tolist() == pytest.approx(expected)
    changes_prompt = "repetition_penalty" in fields
    assert float(logits[0, 4]) == pytest.approx(-1.0 if changes_prompt else -0.5)
    assert result.token_id == int(logits.argmax())


@pytest.mark.parametrize("special", [3.0, float("-inf")])
def test_a_greedy_row_takes_the_first_of_the_largest_as_torch_does(special: float) -> None:
    logits = torch.randint(-3, 4, (8, 4099)).float()
    logits[:, 2000::700] = special
    chosen = sample(logits, [SampleSpec(SamplingParams(temperature=0.0), 4)] * 8)
    assert [one.token_id for one in chosen] == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_row_with_a_logit_that_is_not_finite_gets_no_token(
    broken: float, temperature: float
) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 5] = broken
    specs = [SampleSpec(SamplingParams(temperature=temperature), 4)] * 3
    assert [one.barred for one in sample(logits, specs)] == [None, Barred.NOT_FINITE, None]


class EndOnly:
    """A constraint that allows nothing but the end."""

    is_slow = False
    is_awaited = False

    def begin(self, output_ids: Sequence[int]) -> PendingMask:
        mask: Future[Mask | Barred] = Future()
        mask.set_result(Mask(np.zeros(len(LOGITS), dtype=np.bool_), may_end=True))
        return mask

    def late(self) -> Barred:
        return Barred.LATE


def test_a_mask_that_leaves_no_token_is_no_fault_of_the_model() -> None:
    params = SamplingParams(temperature=0.0)
    for ends, barred in (((), Barred.STUCK), ((3,), None)):
        spec = SampleSpec(params, 4, eos_token_ids=ends, constraint=EndOnly())
        assert one(LOGITS, spec).barred is barred


def test_the_smallest_penalty_is_no_fault_of_the_model() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=MIN_PENALTY)
    assert one(1e30 * LOGITS, SampleSpec(params, 1, [0], [1])).barred is None


def test_penalties_before_the_first_token_do_nothing() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    assert one(LOGITS, SampleSpec(params, 0, [0, 0])).token_id == 0


def test_no_end_token_before_min_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(1, 10**6))
    chosen = [
        one(LOGITS, SampleSpec(params, position, eos_token_ids=(0,))).token_id
        for position in range(4)
    ]
    assert chosen == [2, 2, 0, 0]
    ignoring = SamplingParams(temperature=0.0, min_tokens=2, ignore_eos=True)
    assert one(LOGITS, SampleSpec(ignoring, 0, eos_token_ids=(0,))).token_id == 0
    drawing = SamplingParams(min_tokens=1, seed=0)
    suppressed = [
        one(LOGITS, SampleSpec(drawing, 0, eos_token_ids=(0, 1, 2, 3, 7))).token_id
        for _ in range(2)
    ]
    assert set(suppressed) <= {4, 5, 6}


def test_logprobs_are_of_the_model_before_everything() -> None:
    params = SamplingParams(
        temperature=0.3,
        seed=1,
        top_k=1,
        logprobs=3,
        repetition_penalty=1.5,
        logit_bias=((4, 100.0),),
    )
    result = one(LOGITS, SampleSpec(params, 1, [0], [0]))
    exact = torch.log_softmax(LOGITS.double(), 0)
    assert result.token_id == 4
    assert result.logprob == pytest.approx(float(exact[4]), abs=1e-6)
    assert [token_id for token_id, _ in result.top] == [0, 1, 2]
    assert [value for _, value in result.top] == pytest.approx(exact[:3].tolist(), abs=1e-6)


def test_logprobs_of_no_alternatives_are_the_token_alone() -> None:
    params = SamplingParams(temperature=0.0, logprobs=0)
    result = one(LOGITS, SampleSpec(params, 0))
    assert result.top == ()
    assert result.logprob is not None
    assert math.isclose(result.logprob, float(torch.log_softmax(LOGITS, 0)[0]), abs_tol=1e-6)
    assert len(one(LOGITS, SampleSpec(SamplingParams(logprobs=20), 0)).top) == len(LOGITS)

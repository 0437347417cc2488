"""Tests of building an engine step: how rows of all kinds are flattened and padded, and which rows
are refused."""

from __future__ import annotations

import pytest

from engine.batch import STEP_TOKENS_MULTIPLE, SampleSpec, StepRow, check_request, flatten
from triolet.errors import RequestError
from triolet.sampling import SamplingParams

PARAMS = SamplingParams(seed=1)


def test_a_mixed_step_is_laid_out_flat() -> None:
    rows = [
        StepRow([7, 8, 9], 3, [5, 6]),
        StepRow([4], 8, [2, 9, 1, 7], SampleSpec(PARAMS, 3), is_decode=True),
        StepRow([3], 0, [8], SampleSpec(PARAMS, 0)),
    ]
    step = flatten(rows, block_size=4)
    assert step.token_ids == [7, 8, 9, 4, 3, 0, 0, 0]
    assert step.positions == [3, 4, 5, 8, 0, 0, 0, 0]
    assert step.slots == [(5, 3), (6, 0), (6, 1), (1, 0), (8, 0)]
    assert step.query_start_loc == [0, 3, 4, 5]
    assert step.seq_lens == [6, 9, 1]
    assert step.block_tables == [[5, 6], [2, 9, 1], [8]]
    assert step.is_decode == [False, True, False]
    assert step.sample_rows == [1, 2]
    assert step.sample_tokens == [3, 4, 0, 0]


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 11])
def test_a_step_is_padded_and_padding_has_no_slot(num_tokens: int) -> None:
    step = flatten([StepRow([5] * num_tokens, 2, [3, 1, 2, 6])], block_size=4)
    padded = -(-num_tokens // STEP_TOKENS_MULTIPLE) * STEP_TOKENS_MULTIPLE
    assert len(step.token_ids) == len(step.positions) == padded
    assert len(step.slots) == num_tokens
    assert step.slots[0] == (3, 2)
    assert step.query_start_loc == [0, num_tokens]
    assert step.sample_tokens == []


@pytest.mark.parametrize(
    "row", [StepRow([], 0, [1]), StepRow([1, 2], 3, [1]), StepRow([1, 2], 0, [1], is_decode=True)]
)
def test_a_row_that_cannot_be_is_our_bug(row: StepRow) -> None:
    with pytest.raises(AssertionError):
        flatten([row], block_size=4)


@pytest.mark.parametrize(
    ("token_ids", "bias", "param"),
    [
        ([], (), "prompt"),
        ([1, 100], (), "prompt"),
        ([-1, 5], (), "prompt"),
        ([1], ((100, 1.0),), "logit_bias"),
        ([1], ((-1, 1.0),), "logit_bias"),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(
    token_ids: list[int], bias: tuple[tuple[int, float], ...], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        check_request(100, token_ids, SamplingParams(logit_bias=bias))
    assert (caught.value.status, caught.value.param) == (400, param)


def test_tokens_of_the_vocabulary_pass() -> None:
    check_request(100, [0, 99], SamplingParams(logit_bias=((0, -1.0), (99, 1.0))))

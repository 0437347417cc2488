"""Tests of the GPU sampler: it draws the same random numbers and the same tokens as
engine/sampler.py."""

from __future__ import annotations

import pytest
import torch

from engine.batch import SampleSpec
from engine.philox import uniform
from engine.sampler import sample
from triolet.sampling import MAX_SEED, SamplingParams


def test_random_numbers_have_the_bits_of_the_host(device: torch.device) -> None:
    from engine.gpu.sampler_kernels import uniforms

    seeds = [0, 1, MAX_SEED, 0x0123_4567_89AB_CDEF] * 20
    positions = [0, 1, 2**31, *range(77)]
    drawn = uniforms(
        torch.tensor(seeds, device=device), torch.tensor(positions, device=device)
    ).tolist()
    assert drawn == [
        uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)
    ]


@pytest.mark.parametrize("vocab_size", [17, 4096, 9001])
def test_rows_are_chosen_as_the_host_chooses(device: torch.device, vocab_size: int) -> None:
    from engine.gpu.sampler_kernels import choose

    torch.manual_seed(vocab_size)
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=0.3, seed=6),
        SamplingParams(temperature=40.0, seed=7),
        SamplingParams(temperature=1e-6, seed=8),
        SamplingParams(temperature=2.0, seed=9, min_p=0.2),
        SamplingParams(temperature=2.0, seed=MAX_SEED, min_p=1.0),
    ] * 3
    logits = torch.randn(len(params), vocab_size) * 3
    specs = [SampleSpec(one, position) for position, one in enumerate(params)]
    chosen = choose(
        logits.to(device),
        torch.tensor([one.temperature for one in params], dtype=torch.float64, device=device),
        torch.tensor([one.min_p for one in params], dtype=torch.float64, device=device),
        torch.tensor([one.seed for one in params], device=device),
        torch.tensor([spec.position for spec in specs], device=device),
    )
    assert chosen.tolist() == [one.token_id for one in sample(logits.clone(), specs)]


def test_equal_logits_fall_to_the_first(device: torch.device) -> None:
    from engine.gpu.sampler_kernels import choose

    logits = torch.zeros(2, 5000, device=device)
    logits[1, 4321:] = 1.0
    zeros = torch.zeros(2, dtype=torch.float64, device=device)
    seeds = torch.zeros(2, dtype=torch.int64, device=device)
    assert choose(logits, zeros, zeros, seeds, seeds).tolist() == [0, 4321]

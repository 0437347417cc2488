"""Tests of rotary position embeddings: the frequencies equal those of transformers for every kind
of scaling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine.rope import RotaryTable, inverse_frequencies, rotate
from engine.rope_config import RopeConfig, RopeKind
from tests.lazily import lazily

if TYPE_CHECKING:
    import transformers
else:
    transformers = lazily("transformers")


@pytest.mark.parametrize(
    ("parameters", "rope"),
    [
        (
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
            RopeConfig(1e4, RopeKind.LINEAR, 4.0, 8192),
        ),
        (
            {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            RopeConfig(5e5, RopeKind.LLAMA3, 32.0, 8192),
        ),
        (
            {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            },
            RopeConfig(1e6, RopeKind.YARN, 4.0, 32768),
        ),
        (
            {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "attention_factor": 1.25,
            },
            RopeConfig(
                1e4, RopeKind.YARN, 16.0, 4096, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25
            ),
        ),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scaled_frequencies_are_those_of_transformers(
    parameters: dict[str, Any], rope: RopeConfig, head_dim: int
) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    expected, scale = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"))
    ours, our_scale = inverse_frequencies(rope, head_dim)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert our_scale == pytest.approx(scale)
    assert not torch.equal(ours, inverse_frequencies(RopeConfig(rope.theta), head_dim)[0])


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    table = RotaryTable(RopeConfig(), 16, 100, torch.device("cpu"))
    torch.manual_seed(0)
    query, key = torch.randn(16), torch.randn(16)

    def score(query_position: int, key_position: int) -> float:
        heads = torch.stack((query, key)).unsqueeze(1)
        rotate(heads, *table.at(torch.tensor([query_position, key_position])))
        assert torch.allclose(heads.norm(dim=-1)[:, 0], torch.stack((query.norm(), key.norm())))
        return float(heads[0, 0] @ heads[1, 0])

    assert score(7, 3) == pytest.approx(score(74, 70), abs=1e-4)
    assert score(0, 0) == pytest.approx(float(query @ key), abs=1e-5)
    assert abs(score(7, 3) - score(9, 3)) > 1e-2

"""Tests of counting a model's weights: the number equals that of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine.model_config import load_model_config
from tests.engine.checkpoints import FAMILIES, write_checkpoint
from worker.entry import num_parameters

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_weights_are_counted_as_transformers_does(family: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, family)
    expected = sum(weights.numel() for weights in checkpoint.model.parameters())
    assert num_parameters(load_model_config(tmp_path)) == expected

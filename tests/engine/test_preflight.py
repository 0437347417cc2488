"""What a check of headers finds is what a loader of the tensors finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine.model_config import load_model_config
from engine.preflight.headers import read_headers, weight_files
from engine.preflight.tensors import check_tensors, tensor_shapes
from engine.weights import Checkpoint as WeightFiles

from .checkpoints import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable

    from .checkpoints import Checkpoint


@pytest.mark.parametrize("family", FAMILIES)
def test_headers_of_sound_checkpoints_hold_what_their_config_asks_for(
    checkpoint: Callable[[str], Checkpoint], family: str
) -> None:
    path = checkpoint(family).path
    config = load_model_config(path)
    stored = read_headers(weight_files(path))
    check_tensors(config, stored, path)
    assert stored.keys() == WeightFiles(path).names()
    assert {name: stored[name].shape for name in tensor_shapes(config)} == tensor_shapes(config)

"""Tests of pooled embedding vectors: they equal those of transformers and do not depend on other
rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from engine.batch import SampleSpec, StepRow
from engine.pooling import Pool
from triolet.config import EngineConfig
from triolet.pooling import Pooling, VectorForm
from triolet.units import MIB

from .driver import GREEDY, open_engine

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from engine.load import Engine

    from .checkpoints import Checkpoint

INPUTS = [[5], list(range(3, 40)), [7] * 16, list(range(200, 60, -3))]


def reference(model: Checkpoint, ids: list[int], pooling: Pooling) -> npt.NDArray[np.float64]:
    """Return the vector pooled from transformers' hidden states, not normalised."""
    with torch.inference_mode():
        states = model.model.base_model(torch.tensor([ids])).last_hidden_state
    hidden = states[0].double().numpy()
    match pooling:
        case Pooling.LAST:
            return np.asarray(hidden[-1])
        case Pooling.FIRST:
            return np.asarray(hidden[0])
        case Pooling.MEAN:
            return np.asarray(hidden.mean(axis=0))
        case Pooling.MAX:
            return np.asarray(hidden.max(axis=0))


def vectors(
    engine: Engine, inputs: list[list[int]], form: VectorForm, chunk: int
) -> list[npt.NDArray[np.float32]]:
    """Compute all inputs together in chunks, with a sampling prompt in the same steps."""
    block_size = engine.pool.layout.block_size
    pools = [Pool(form, len(ids)) for ids in inputs]
    tables = [engine.ledger.lease(i, -(-len(ids) // block_size)) for i, ids in enumerate(inputs)]
    other = engine.ledger.lease("prompt", 1)
    for start in range(0, max(map(len, inputs)), chunk):
        rows = [
            StepRow(ids[start : start + chunk], start, table, pool=pool)
            for ids, table, pool in zip(inputs, tables, pools, strict=True)
            if start < len(ids)
        ]
        spec = SampleSpec(GREEDY, 0)
        results = engine.runner.step([rows[0], StepRow([9, 8, 7], 0, other, spec), *rows[1:]])
        assert [result is not None for result in results] == [False, True] + [False] * (
            len(rows) - 1
        )
    for owner in (*range(len(inputs)), "prompt"):
        engine.ledger.release(owner)
    return [np.frombuffer(pool.vector(), dtype="<f4") for pool in pools]


@pytest.mark.slow
@pytest.mark.parametrize("pooling", list(Pooling))
def test_vectors_are_those_of_transformers(
    checkpoint: Callable[[str], Checkpoint], backend: str, pooling: Pooling
) -> None:
    model = checkpoint("llama")
    engine = open_engine(model.path, EngineConfig(kv_pool_bytes=4 * MIB, backend=backend))
    expected = [reference(model, ids, pooling) for ids in INPUTS]
    form = VectorForm(pooling, is_normalized=False)
    for chunk in (1000, 16):
        for vector, wanted in zip(vectors(engine, INPUTS, form, chunk), expected, strict=True):
            np.testing.assert_allclose(vector, wanted, rtol=0, atol=1e-5)
    form = VectorForm(pooling, dimensions=24)
    for vector, wanted in zip(vectors(engine, INPUTS, form, 1000), expected, strict=True):
        cut = wanted[:24] / np.linalg.norm(wanted[:24])
        np.testing.assert_allclose(vector, cut, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_vector_does_not_depend_on_who_else_is_in_the_step(
    checkpoint: Callable[[str], Checkpoint],
) -> None:
    engine = open_engine(checkpoint("llama3-tied").path)
    for pooling in (Pooling.LAST, Pooling.MEAN):
        form = VectorForm(pooling)
        together = vectors(engine, INPUTS, form, 16)
        alone = [vectors(engine, [ids], form, 16)[0] for ids in INPUTS]
        assert all((a == b).all() for a, b in zip(alone, together, strict=True))


def test_a_vector_of_nothing_is_not_divided_by_its_length() -> None:
    pool = Pool(VectorForm(Pooling.MEAN), 1)
    pool.add(np.zeros((1, 4), dtype=np.float32))
    assert pool.vector() == bytes(16)

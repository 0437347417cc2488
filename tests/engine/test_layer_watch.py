"""A step that tells how far it is computes the same bits, and what it says is final stays so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine.batch import LayerWatch, StepRow
from triolet.config import Dtype, EngineConfig
from triolet.units import MIB

from .driver import GREEDY, Running, exported, open_engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from .checkpoints import Checkpoint

PROMPT = [3 + 7 * index % 250 for index in range(100)]


def test_layers_are_divided_evenly_and_not_beyond_their_number() -> None:
    def ends(num_groups: int, num_layers: int) -> list[int]:
        return LayerWatch(num_groups, lambda _: None).ends(num_layers)

    assert ends(1, 7) == [7]
    assert ends(3, 7) == [2, 4, 7]
    assert ends(9, 2) == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(Dtype))
def test_what_is_told_to_be_final_is_final_and_the_same(
    checkpoint: Callable[[str], Checkpoint], dtype: Dtype, backend: str
) -> None:
    config = EngineConfig(dtype=dtype, backend=backend, kv_pool_bytes=4 * MIB)
    engine = open_engine(checkpoint("llama").path, config)
    num_layers = engine.pool.layout.num_layers
    whole, parts = Running(engine, "whole", PROMPT, 0), Running(engine, "parts", PROMPT, 0)
    rows = {
        run: [StepRow(PROMPT, 0, run.blocks, run.spec(engine, GREEDY))] for run in (whole, parts)
    }
    expected = engine.runner.step(rows[whole])
    told: list[tuple[int, bytes]] = []

    def tell(done: int) -> None:
        told.append((done, bytes(engine.pool.export_blocks(parts.blocks, layers=range(done)))))

    assert engine.runner.step(rows[parts], LayerWatch(num_layers, tell)) == expected
    assert [done for done, _ in told] == list(range(1, num_layers))
    # Padding behind the prompt is whatever was there: only whole blocks are compared.
    num_whole = len(PROMPT) // 16
    for done, early in told:
        size = len(early) // len(parts.blocks)
        final = engine.pool.export_blocks(whole.blocks[:num_whole], layers=range(done))
        assert early[: num_whole * size] == bytes(final)
    assert exported(engine.pool, parts.blocks[:num_whole]) == exported(
        engine.pool, whole.blocks[:num_whole]
    )

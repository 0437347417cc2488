"""Tests golden prompts and shadow copies with two fleets that compute a real model, in virtual
time."""

from __future__ import annotations

from dataclasses import replace
from shutil import copytree
from typing import TYPE_CHECKING

import pytest
import trio
from safetensors.torch import load_file, save_file

from server.rollouts.golden import golden_answers
from server.rollouts.shadow import ShadowCopies
from tests.engine.checkpoints import write_checkpoint
from tests.recovery.house import House, open_house, read_all
from tests.recovery.test_real_engine import engines, one_thread, requests
from triolet.config import CandidateConfig, Dtype
from triolet.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch
    from trio.testing import MockClock

__all__ = ["one_thread"]

pytestmark = pytest.mark.slow

CONFIG = CandidateConfig()


@pytest.fixture(scope="module")
def stable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("stable"), "llama").path


def changed(stable: Path, folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """Return a copy of a model with one changed matrix."""
    candidate = copytree(stable, folder)
    path = candidate / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, path, {"format": "pt"})
    return candidate


async def encode(text: str) -> tuple[int, ...]:
    return tuple(3 + byte % 250 for byte in text.encode())


async def answers(house: House) -> tuple[str, ...]:
    return await golden_answers(house.fleet, encode, CONFIG)


async def test_the_answers_of_one_model_never_change(
    stable: Path, autojump_clock: MockClock
) -> None:
    """Other requests in the batch make no difference."""
    made = engines(stable, Dtype.FLOAT32)
    async with open_house(make_engines=made) as one, open_house(make_engines=made) as other:
        alone = await answers(one)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all, other, requests())
            assert await answers(other) == alone
        await one.check_idle()
        await other.check_idle()


async def test_another_model_answers_otherwise(
    stable: Path, tmp_path: Path, autojump_clock: MockClock
) -> None:
    candidate = changed(stable, tmp_path / "candidate", lambda matrix: matrix.flip(0))
    async with (
        open_house(make_engines=engines(stable, Dtype.FLOAT32)) as one,
        open_house(make_engines=engines(candidate, Dtype.FLOAT32)) as other,
    ):
        assert await answers(one) != await answers(other)


async def test_a_model_that_computes_no_numbers_fails(
    stable: Path, tmp_path: Path, autojump_clock: MockClock
) -> None:
    broken = changed(stable, tmp_path / "broken", lambda matrix: matrix * float("nan"))
    async with open_house(make_engines=engines(broken, Dtype.FLOAT32)) as house:
        with pytest.raises(RequestError, match="3 attempts failed, the last one: prefill error"):
            await answers(house)


async def test_copies_on_an_equal_model_have_equal_tokens(
    stable: Path, autojump_clock: MockClock
) -> None:
    made = engines(stable, Dtype.FLOAT32)
    asked = [replace(one, request_id=bytes([9]) + one.request_id[1:]) for one in requests()]
    async with open_house(make_engines=made) as one, open_house(make_engines=made) as other:
        with ShadowCopies(one.fleet, other.fleet, len(asked)) as shadow:
            shadow.share = 1.0
            await read_all(one, asked)
            await trio.sleep(30.0)
        assert (shadow.sums.pairs, shadow.sums.same_finish) == (len(asked), len(asked))
        assert shadow.sums.equal_tokens == shadow.sums.tokens[0] == shadow.sums.tokens[1] > 50
        assert shadow.sums.rows_while_waiting == 0
        await other.check_idle()

"""Tests that recovery is exact with speculative decoding: when a process dies, a real model still
gives the tokens of an undisturbed run without it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from decode.drafts import Drafts
from engine.native.library import load_library
from tests.engine.checkpoints import write_checkpoint
from tests.engine.driver import open_engine
from triolet.config import Dtype, EngineConfig, SpeculationConfig
from triolet.ids import Role
from triolet.units import KIB
from worker.local_engine import LocalEngine

from .house import Guessing, House, Record, disturb_at, open_house, read_all
from .test_real_engine import CUTS, NUM_TOKENS, requests
from .test_real_engine import one_thread as one_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trio.testing import MockClock

    from decode.attempt import DecodeAttempt
    from triolet.ids import AttemptKey
    from worker.engine_port import EnginePort

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

EAGER = SpeculationConfig(max_step_tokens=64, pause_rows=1, max_pause_rows=1)
WRONG_EVERY = 5


class Recall:
    """A source of guesses: the tokens of an undisturbed run, some of them replaced by wrong ones.

    Attributes:
      num_guesses: number of tokens guessed so far.
    """

    ledger = None

    def __init__(self, records: Sequence[Record]) -> None:
        self.num_guesses = 0
        self._records = records

    def guess(self, attempt: DecodeAttempt, most: int) -> list[int]:
        """See decode.speculation.GuessSource."""
        record = self._records[int.from_bytes(attempt.key.request_id, "big")]
        position = len(attempt.output_ids)
        tokens = list(enumerate(record.token_ids))[position : position + most]
        self.num_guesses += len(tokens)
        return [token_id ^ (index % WRONG_EVERY == 0) for index, token_id in tokens]

    def forget(self, key: AttemptKey) -> None:
        """See decode.speculation.GuessSource."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), "llama").path


@pytest.mark.proof
@pytest.mark.parametrize("backend", ["native", "sdpa"])
@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_a_client_cannot_tell(model: Path, dtype: Dtype, backend: str, whole: bool) -> None:
    if backend == "native" and load_library() is None:
        pytest.skip("the kernels are not built for this machine")
    config = EngineConfig(
        dtype=dtype,
        backend=backend,
        block_size=4,
        kv_pool_bytes=512 * KIB,
        max_num_batched_tokens=16,
    )
    expected = _run(model, config, Guessing())
    assert all(record.end is not None and record.end[0] == "length" for record in expected)
    # In the short form each disturbs one or two of the four.
    cell = 2 * (dtype is Dtype.BFLOAT16) + (backend == "sdpa")
    cuts = CUTS if whole else [CUTS[cell % len(CUTS)]]
    for disturb, num_tokens in ((None, 0), *cuts):
        recall = Recall(expected)
        guessing = Guessing(partial(_same, recall), EAGER)
        records = _run(model, config, guessing, disturb, num_tokens)
        assert records == expected, (disturb, num_tokens)
        assert recall.num_guesses > len(expected) * NUM_TOKENS / 2


@pytest.mark.proof
def test_neither_can_it_tell_whose_drafts_they_were(model: Path, whole: bool) -> None:
    config = EngineConfig(
        dtype=Dtype.BFLOAT16, block_size=4, kv_pool_bytes=512 * KIB, max_num_batched_tokens=16
    )
    # Nearly the same model: most of its guesses hold.
    exact = replace(config, dtype=Dtype.FLOAT32, block_size=16)
    made: list[Drafts] = []

    def make() -> Drafts:
        engine = LocalEngine(open_engine(model, exact))
        made.append(Drafts(engine, EAGER, engine.vocab_size))
        return made[-1]

    expected = _run(model, config, Guessing())
    # Of what disturbs, the death of a decode worker alone ends the life of drafts.
    for disturb, num_tokens in ((None, 0), *(CUTS if whole else CUTS[:1])):
        records = _run(model, config, Guessing(make, EAGER), disturb, num_tokens)
        assert records == expected, (disturb, num_tokens)
    # Those of a life that was killed went with it.
    assert sum(drafts.ledger.leased_blocks == 0 for drafts in made) >= len(made) - 1


def _same(recall: Recall) -> Recall:
    return recall


def _run(
    model: Path,
    config: EngineConfig,
    guessing: Guessing,
    disturb: Callable[[House], None] | None = None,
    num_tokens: int = 0,
) -> list[Record]:
    def make() -> EnginePort:
        return LocalEngine(open_engine(model, config))

    async def run() -> list[Record]:
        engines = dict.fromkeys((Role.PREFILL, Role.DECODE), make)
        async with open_house(1, 2, make_engines=engines, guessing=guessing) as house:
            async with trio.open_nursery() as nursery:
                if disturb is not None:
                    nursery.start_soon(disturb_at, house, disturb, num_tokens)
                records = await read_all(house, requests())
            assert bool(house.seen.causes) == (disturb is not None), house.seen.causes
            await house.check_idle()
        return records

    clock: MockClock = trio.testing.MockClock(autojump_threshold=0)
    return trio.run(run, clock=clock)

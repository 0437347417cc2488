"""With decode guessing ahead, whatever dies: ids, text, logprobs and ends are those of a run
without guesses in which nothing died. A real model, both backends of the CPU, fp32 and bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from engine.native.library import load_library
from tests.engine.checkpoints import write_checkpoint
from tests.engine.driver import open_engine
from triolet.config import Dtype, EngineConfig
from triolet.config_speculation import SpeculationConfig
from triolet.ids import Role
from triolet.units import KIB
from worker.local_engine import LocalEngine

from .house import Guessing, House, Record, open_house, read_all
from .test_real_engine import CUTS, NUM_TOKENS, requests
from .test_real_engine import one_thread as one_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trio.testing import MockClock

    from decode.attempt import Attempt
    from triolet.ids import AttemptKey
    from worker.engine_port import EnginePort

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

EAGER = SpeculationConfig(max_step_tokens=64, pause_rows=1, max_pause_rows=1)
WRONG_EVERY = 5


class Recall:
    """Guesses what an undisturbed run has said, and sometimes something else.

    Attributes:
      num_guesses: given out.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.num_guesses = 0
        self._records = records

    def guess(self, attempt: Attempt, most: int) -> list[int]:
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


@pytest.mark.parametrize("backend", ["native", "sdpa"])
@pytest.mark.parametrize("dtype", list(Dtype))
def test_a_client_cannot_tell(model: Path, dtype: Dtype, backend: str) -> None:
    if backend == "native" and load_library() is None:
        pytest.skip("the kernels are not built for this machine")
    config = EngineConfig(
        dtype=dtype,
        backend=backend,
        block_size=4,
        kv_pool_bytes=512 * KIB,
        max_num_batched_tokens=16,
    )
    make = lambda: LocalEngine(open_engine(model, config))  # noqa: E731 (one line, used twice)
    expected = _run(make, None)
    assert all(record.end is not None and record.end[0] == "length" for record in expected)
    for disturb, num_tokens in ((None, 0), *CUTS):
        recall = Recall(expected)
        assert _run(make, recall, disturb, num_tokens) == expected, (disturb, num_tokens)
        assert recall.num_guesses > len(expected) * NUM_TOKENS / 2


def _run(
    make: Callable[[], EnginePort],
    recall: Recall | None,
    disturb: Callable[[House], None] | None = None,
    num_tokens: int = 0,
) -> list[Record]:
    async def run() -> list[Record]:
        engines = dict.fromkeys((Role.PREFILL, Role.DECODE), make)
        guessing = Guessing(recall, EAGER)
        async with open_house(1, 2, make_engines=engines, guessing=guessing) as house:
            async with trio.open_nursery() as nursery:
                if disturb is not None:
                    nursery.start_soon(_disturb, house, disturb, num_tokens)
                records = await read_all(house, requests())
            assert bool(house.seen.causes) == (disturb is not None), house.seen.causes
            await house.check_idle()
        return records

    clock: MockClock = trio.testing.MockClock(autojump_threshold=0)
    return trio.run(run, clock=clock)


async def _disturb(house: House, disturb: Callable[[House], None], num_tokens: int) -> None:
    await house.until(lambda: any(len(r.token_ids) >= num_tokens for r in house.records.values()))
    disturb(house)

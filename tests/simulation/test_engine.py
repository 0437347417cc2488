"""Tests of the scripted engine: wrong KV results in another token, and writes into blocks without a
lease are reported."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.batch import SampleSpec, StepRow
from engine.pace import pace_of
from simulation.engine import ScriptedEngine, reference
from simulation.faults import Fault
from triolet.config import EngineConfig
from triolet.sampling import SamplingParams

PROMPT = tuple(range(5, 18))
PARAMS = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)


class Bench:
    """A scripted engine with one sequence, and the complaints and faults that it reported."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.happened: Counter[Fault] = Counter()
        pace = pace_of(16, 0.01, EngineConfig(max_num_batched_tokens=16))
        self.engine = ScriptedEngine(
            16, 4, pace, report=self.complaints.append, happened=self.happened
        )
        self.table = self.engine.ledger.lease("a", 6)
        self.token_ids: list[int] = []

    def step(self, token_ids: tuple[int, ...], start: int) -> int:
        spec = SampleSpec(PARAMS, len(self.token_ids), PROMPT, tuple(self.token_ids))
        row = StepRow(token_ids, start, self.table, spec)
        [sampled] = self.engine.step([row])
        assert sampled is not None
        self.token_ids.append(sampled.token_id)
        return sampled.token_id

    def run(self) -> tuple[int, ...]:
        token_id = self.step(PROMPT, 0)
        while len(self.token_ids) < PARAMS.max_tokens:
            token_id = self.step((token_id,), len(PROMPT) + len(self.token_ids) - 1)
        return tuple(self.token_ids)


def test_a_run_gives_the_reference() -> None:
    bench = Bench()
    assert bench.run() == reference(PROMPT, PARAMS)
    assert bench.complaints == []


@pytest.mark.parametrize("position", [0, 5, 12])
def test_one_wrong_byte_of_kv_changes_the_token(position: int) -> None:
    right, wrong = Bench(), Bench()
    for bench in (right, wrong):
        bench.step(PROMPT, 0)
    block = wrong.table[position // 4]
    wrong.engine._pool[block][position % 4 * 4] ^= 1
    assert right.step((9,), len(PROMPT)) != wrong.step((9,), len(PROMPT))


def test_kv_in_another_order_changes_the_token() -> None:
    right, wrong = Bench(), Bench()
    for bench in (right, wrong):
        bench.step(PROMPT, 0)
    wrong.table[0], wrong.table[1] = wrong.table[1], wrong.table[0]
    assert right.step((9,), len(PROMPT)) != wrong.step((9,), len(PROMPT))


def exported(bench: Bench, num_blocks: int) -> memoryview:
    payload = memoryview(bytearray(num_blocks * bench.engine.bytes_per_block))
    bench.engine.export_blocks(bench.table[:num_blocks], payload)
    return payload


def test_blocks_that_travel_hold_the_same() -> None:
    here, there = Bench(), Bench()
    here.step(PROMPT, 0)
    there.engine.import_blocks(there.table[:4], exported(here, 4))
    there.token_ids = list(here.token_ids)
    assert here.step((9,), len(PROMPT)) == there.step((9,), len(PROMPT))
    assert there.complaints == []


def test_writing_into_freed_blocks_is_told_on() -> None:
    bench = Bench()
    payload = exported(bench, 1)
    assert bench.engine.ledger.release("a") == 6
    bench.engine.check_poison()
    assert bench.complaints == []
    bench.engine.import_blocks(bench.table[:1], b"\0" * len(payload))
    assert "is not leased" in bench.complaints.pop()
    bench.engine.check_poison()
    assert "written after it was freed" in bench.complaints.pop()
    bench.step((5,), 0)
    assert "uses a block that is not leased" in bench.complaints.pop()


def test_a_step_that_was_told_to_fail_is_counted() -> None:
    bench = Bench()
    bench.engine.fail_steps = 1
    with pytest.raises(RuntimeError):
        bench.step(PROMPT, 0)
    assert bench.happened[Fault.STEP_ERROR] == 1
    assert bench.run() == reference(PROMPT, PARAMS)

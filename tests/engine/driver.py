"""A minimal scheduler for engine tests: prefill all prompts in chunks, then decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.batch import Sampled, SampleSpec, StepRow
from engine.load import Engine, load_engine
from triolet.config import EngineConfig
from triolet.sampling import SamplingParams
from triolet.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from pathlib import Path

    from engine.kv_pool import KVPool

GREEDY = SamplingParams(temperature=0.0, logprobs=20)


def open_engine(path: Path, config: EngineConfig | None = None) -> Engine:
    """Load an engine with a small pool."""
    return load_engine(path, config or EngineConfig(kv_pool_bytes=4 * MIB), lambda *_: None)


def exported(pool: KVPool, block_ids: Sequence[int]) -> memoryview:
    """Return the bytes of some blocks."""
    payload = memoryview(bytearray(len(block_ids) * pool.bytes_per_block))
    pool.export_blocks(block_ids, payload)
    return payload


class Running:
    """One sequence and its blocks."""

    def __init__(
        self, engine: Engine, owner: Hashable, prompt: Sequence[int], num_tokens: int
    ) -> None:
        block_size = engine.pool.layout.block_size
        num_blocks = -(-(len(prompt) + num_tokens) // block_size)
        self.blocks = engine.ledger.lease(owner, num_blocks)
        self.prompt = list(prompt)
        self.results: list[Sampled] = []

    @property
    def output_ids(self) -> list[int]:
        return [result.token_id for result in self.results]

    def spec(self, engine: Engine, params: SamplingParams) -> SampleSpec:
        return SampleSpec(
            params, len(self.results), self.prompt, self.output_ids, engine.eos_token_ids
        )


def prefill(engine: Engine, sequence: Running, params: SamplingParams, chunk: int) -> None:
    """Compute a prompt in chunks and its first token."""
    for start in range(0, len(sequence.prompt), chunk):
        ids = sequence.prompt[start : start + chunk]
        is_last = start + len(ids) == len(sequence.prompt)
        spec = sequence.spec(engine, params) if is_last else None
        [result] = engine.runner.step([StepRow(ids, start, sequence.blocks, spec)])
        assert (result is not None) == is_last
        if result is not None:
            sequence.results.append(result)


def decode(
    engine: Engine, sequences: Sequence[Running], params: SamplingParams, num_tokens: int
) -> None:
    """Decode sequences together until each has `num_tokens`."""
    while running := [s for s in sequences if len(s.results) < num_tokens]:
        rows = [
            StepRow(
                [s.results[-1].token_id],
                len(s.prompt) + len(s.results) - 1,
                s.blocks,
                s.spec(engine, params),
                is_decode=True,
            )
            for s in running
        ]
        for sequence, result in zip(running, engine.runner.step(rows), strict=True):
            assert result is not None
            sequence.results.append(result)


def launched_ahead(
    engine: Engine, sequences: list[Running], params: SamplingParams, num_tokens: int
) -> None:
    """Decode with each step launched before the one before it is read."""
    under_way: list[tuple[list[Running], Callable[[], list[Sampled | None]]]] = []
    while True:
        pending = under_way[-1][0] if under_way else []
        rows, running = [], []
        for sequence in sequences:
            is_pending = sequence in pending
            position = len(sequence.results) + is_pending
            if position >= num_tokens:
                continue
            rows.append(
                StepRow(
                    [0 if is_pending else sequence.results[-1].token_id],
                    len(sequence.prompt) + position - 1,
                    sequence.blocks,
                    SampleSpec(params, position),
                    is_decode=True,
                    follows=pending.index(sequence) if is_pending else None,
                )
            )
            running.append(sequence)
        if rows:
            under_way.append((running, engine.runner.launch(rows)))
        if not under_way:
            return
        if len(under_way) == 2 or not rows:
            finished, read = under_way.pop(0)
            for sequence, sampled in zip(finished, read(), strict=True):
                assert sampled is not None
                sequence.results.append(sampled)


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    params: SamplingParams = GREEDY,
    chunk: int = 512,
) -> list[list[Sampled]]:
    """Return the prompts' completions, computed in one batch."""
    sequences = [Running(engine, i, prompt, num_tokens) for i, prompt in enumerate(prompts)]
    for sequence in sequences:
        prefill(engine, sequence, params, chunk)
    decode(engine, sequences, params, num_tokens)
    for owner in range(len(prompts)):
        engine.ledger.release(owner)
    engine.ledger.check_invariants()
    return [sequence.results for sequence in sequences]


def ids(results: Sequence[Sampled]) -> list[int]:
    """Return the token ids only."""
    return [result.token_id for result in results]

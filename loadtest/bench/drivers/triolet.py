"""`python -m loadtest.bench.drivers.triolet`: Triolet's engine alone, without server and links."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Final

import torch

from engine.batch import SampleSpec, StepRow
from engine.load import load_engine
from engine.native.model import NativeModel
from store.gguf.directory import gguf_directory
from triolet.config import AUTO_BACKEND, Dtype, EngineConfig, WeightFormat
from triolet.sampling import SamplingParams
from triolet.units import MIB

from .loop import answer_requests, driver_parser

if TYPE_CHECKING:
    from engine.batch import Sampled
    from engine.load import Engine

GREEDY: Final = SamplingParams(temperature=0.0)
CHUNK: Final = 512
"""Prompt tokens per step: the default of max_num_batched_tokens."""


class TrioletSession:
    """Runs the engine's prefill and decode steps, one after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tables: list[list[int]] = []
        self._last: list[int] = []
        self._position = 0
        self._done = 0

    def begin(self, prompts: list[list[int]], most_steps: int) -> None:
        """See loop.Session."""
        ledger, block_size = self._engine.ledger, self._engine.pool.layout.block_size
        num_blocks = -(-(len(prompts[0]) + most_steps + 1) // block_size)
        self._tables = [ledger.lease(index, num_blocks) for index in range(len(prompts))]
        self._last = self._prefill(prompts, self._tables)
        self._position, self._done = len(prompts[0]), 0

    def step(self) -> None:
        """See loop.Session."""
        self._done += 1
        self._last = self._decode(self._last, self._position, self._done, self._tables)
        self._position += 1

    def end(self) -> None:
        """See loop.Session."""
        for index in range(len(self._tables)):
            self._engine.ledger.release(index)
        self._tables = []

    def parts(self) -> dict[str, float]:
        """See loop.Session."""
        model = self._engine.runner.model
        return model.take_part_s() if isinstance(model, NativeModel) else {}

    def _prefill(self, prompts: list[list[int]], tables: list[list[int]]) -> list[int]:
        """Compute prompts in steps of CHUNK tokens, with as many prompts per step as fit."""
        first: list[int] = []
        rows: list[StepRow] = []
        room = CHUNK
        for prompt, table in zip(prompts, tables, strict=True):
            done = 0
            while done < len(prompt):
                part = prompt[done : done + room]
                is_last = done + len(part) == len(prompt)
                rows.append(StepRow(part, done, table, SampleSpec(GREEDY, 0) if is_last else None))
                done, room = done + len(part), room - len(part)
                if not room:
                    first += tokens_of(self._engine.runner.step(rows))
                    rows, room = [], CHUNK
        return first + tokens_of(self._engine.runner.step(rows))

    def _decode(
        self, last: list[int], start: int, position: int, tables: list[list[int]]
    ) -> list[int]:
        spec = SampleSpec(GREEDY, position)
        rows = [
            StepRow([token], start, table, spec, is_decode=True)
            for token, table in zip(last, tables, strict=True)
        ]
        return tokens_of(self._engine.runner.step(rows))


def tokens_of(results: list[Sampled | None]) -> list[int]:
    """Return the tokens of the rows that sampled one."""
    return [result.token_id for result in results if result is not None]


def main() -> None:
    """Load the model and answer requests."""
    parser = driver_parser(__doc__)
    parser.add_argument("--backend", default=AUTO_BACKEND)
    parser.add_argument("--weights", type=WeightFormat, default=WeightFormat.AUTO)
    parser.add_argument("--kv-pool-mib", type=int, default=1024)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = EngineConfig(
        dtype=Dtype(arguments.dtype),
        backend=arguments.backend,
        weights=arguments.weights,
        kv_pool_bytes=arguments.kv_pool_mib * MIB,
        max_num_batched_tokens=CHUNK,
    )

    is_file = arguments.model.suffix == ".gguf"

    def open_session() -> tuple[TrioletSession, str]:
        model = gguf_directory(arguments.model) if is_file else arguments.model
        engine = load_engine(model, config, lambda *_: None)
        return TrioletSession(engine), f"triolet {version('triolet')}, torch {torch.__version__}"

    answer_requests(open_session)


if __name__ == "__main__":
    main()

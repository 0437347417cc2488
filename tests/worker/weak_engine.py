"""A draft model for the fake engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .fake_engine import VOCAB_SIZE, FakeEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.batch import Sampled, StepRow


class WeakEngine(FakeEngine):
    """Says what the fake engine says, but for every so many-th position of a sequence.

    It knows what to say from its KV alone: with any of that wrong it says nothing right.
    """

    def __init__(self, wrong_every: int = 0, **sizes: int) -> None:
        super().__init__(**sizes)  # type: ignore[arg-type]
        self.wrong_every = wrong_every
        self.step_sizes: list[int] = []

    def step(self, rows: Sequence[StepRow]) -> list[Sampled | None]:
        self.step_sizes.append(sum(len(row.token_ids) for row in rows))
        results = super().step(rows)
        for i, (row, sampled) in enumerate(zip(rows, results, strict=True)):
            position = row.start + len(row.token_ids)
            if sampled is not None and self.wrong_every and position % self.wrong_every == 0:
                results[i] = type(sampled)((sampled.token_id + 1) % VOCAB_SIZE)
        return results

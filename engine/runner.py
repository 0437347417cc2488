"""One step: rows in, tokens out. Runs on the device thread.

Knows how to lay a batch out as tensors; does not know which rows run, the owners of their blocks,
or when a sequence ends.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch

from triolet.config import MaskConfig
from triolet.errors import CapacityError

from .batch import Sampled, StepRow, flatten
from .sampler import begin_masks, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from .batch import FlatStep, SampleSpec
    from .gpu.decoder import Decoder
    from .kv_pool import KVPool


class StepModel(Protocol):
    """A model with its KV pool. Used by the device thread only."""

    def compute(self, step: FlatStep) -> Tensor | None:
        """Store the KV of a step's tokens and compute the logits of its sampled ones.

        Args:
          step: the rows.

        Returns:
          fp32 [at least len(sample_rows), vocab_size]; None where no row samples.
        """
        ...


class Runner:
    """Computes steps of one model over one KV pool.

    Args:
      model: the forward pass.
      block_size: tokens per block.
      pool: where KV goes.
      decoder: launches steps of decode rows alone, where there is a GPU for it.
      masks: how long a step waits for them.

    Attributes:
      model: the same.
    """

    def __init__(
        self,
        model: StepModel,
        block_size: int,
        pool: KVPool,
        decoder: Decoder | None = None,
        masks: MaskConfig | None = None,
    ) -> None:
        self.model = model
        self._block_size = block_size
        self._pool = pool
        self._decoder = decoder
        self._masks = MaskConfig() if masks is None else masks
        self._previous: Callable[[], list[Sampled | None]] = list
        self._is_decoding = False

    def step(self, rows: Sequence[StepRow]) -> list[Sampled | None]:
        """Compute decode rows and chunks of prompts together.

        Every token id must be in the vocabulary: `engine.batch.check_request` sees to that when a
        request arrives.

        Returns:
          For each row its token, or None where it asked for none.

        Raises:
          CapacityError: the device has no memory for a step of this size.
        """
        return self.launch(rows)()

    def launch(self, rows: Sequence[StepRow]) -> Callable[[], list[Sampled | None]]:
        """Begin a step, and finish it where the device cannot compute by itself.

        Args:
          rows: as for `step`; those with `follows` name a row of the step launched before this.

        Returns:
          What waits for the step to end and returns its tokens; to be called on this thread, in the
          order of launching, before more than `MAX_UNDER_WAY` steps are under way.

        Raises:
          CapacityError: the device has no memory for a step of this size.
        """
        if not rows:
            return list
        try:
            with torch.inference_mode():
                self._previous = self._launch(rows)
                return self._previous
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"no device memory for a step of {sum(len(r.token_ids) for r in rows)} tokens: "
                "lower kv_pool_bytes or max_num_batched_tokens"
            ) from error

    def _launch(self, rows: Sequence[StepRow]) -> Callable[[], list[Sampled | None]]:
        self._pool.await_imports()
        decoder = self._decoder
        was_decoding, self._is_decoding = self._is_decoding, False
        if decoder is None or not decoder.takes(rows):
            told = self._told(rows)
            if decoder is not None and decoder.is_fixed:
                results = self._step_apart(decoder, told)
            else:
                results = self._step(told)
            return lambda: results
        if not was_decoding:
            rows = self._told(rows)
            decoder.forget_places()
        self._is_decoding = True
        return cache(decoder.launch(rows))

    def _step_apart(self, decoder: Decoder, rows: Sequence[StepRow]) -> list[Sampled | None]:
        """Compute decode rows in batches of the one size, then the chunks beside them: together
        they would be another number of rows, which has other bits. Rows of one sequence stay in
        order, so that each finds the KV of the one before it."""
        results: list[Sampled | None] = [None] * len(rows)
        decoding = [index for index, row in enumerate(rows) if row.is_decode]
        chunks = [index for index, row in enumerate(rows) if not row.is_decode]
        size = decoder.sizes[-1]
        for start in range(0, len(decoding), size):
            batch = decoding[start : start + size]
            decoder.forget_places()
            computed = decoder.launch([rows[index] for index in batch])()
            for index, sampled in zip(batch, computed, strict=True):
                results[index] = sampled
        if chunks:
            computed = self._step([rows[index] for index in chunks])
            for index, sampled in zip(chunks, computed, strict=True):
                results[index] = sampled
        return results

    def _told(self, rows: Sequence[StepRow]) -> Sequence[StepRow]:
        """Wait for the tokens of rows that follow others."""
        if all(row.follows is None for row in rows):
            return rows
        previous = self._previous()
        return [_with_token(row, previous) for row in rows]

    def _step(self, rows: Sequence[StepRow]) -> list[Sampled | None]:
        flat = flatten(rows, self._block_size)
        specs = [spec for row in rows if (spec := row.sample) is not None]
        masks = begin_masks(specs)
        began_at = time.monotonic()
        logits = self.model.compute(flat)
        results: list[Sampled | None] = [None] * len(rows)
        if logits is not None:
            computed_s = time.monotonic() - began_at
            wait_s = max(self._masks.least_wait_s, self._masks.step_wait_share * computed_s)
            chosen = sample(logits, specs, masks, wait_s, wait_s if _are_slow(specs) else 0.0)
            for index, sampled in zip(flat.sample_rows, chosen, strict=True):
                results[index] = sampled
        # Sampling has waited for the device already; a caller that only fills blocks must not
        # believe them final before they are.
        if logits is None:
            self._pool.finish_writes()
        return results


def _are_slow(specs: Sequence[SampleSpec]) -> bool:
    """Return whether all rows have slow masks, so that waiting delays no others."""
    return all(spec.constraint is not None and spec.constraint.is_slow for spec in specs)


def _with_token(row: StepRow, previous: Sequence[Sampled | None]) -> StepRow:
    if row.follows is None:
        return row
    sampled = previous[row.follows]
    assert sampled is not None, "a row that follows one which chooses nothing"
    return replace(row, token_ids=(sampled.token_id,), follows=None)

"""Run one step on the device thread: forward pass and sampling, rows in, tokens out."""

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
        """Store the KV of a step's tokens and compute the logits of its sampled rows.

        Returns:
          fp32 [at least len(sample_rows), vocab_size]; None if no row samples.
        """
        ...


class Runner:
    """Computes steps of one model over one KV pool.

    Args:
      model: the forward pass.
      block_size: tokens per block.
      pool: the KV pool.
      decoder: launches steps of decode rows only, on a GPU.
      masks: how long a step waits for masks.

    Attributes:
      model: the forward pass.
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
        """Compute decode rows and prompt chunks together.

        Every token id must be in the vocabulary; `engine.batch.check_request` checks requests when
        they arrive.

        Returns:
          The sampled token of each row, or None for rows that do not sample.

        Raises:
          CapacityError: the device has no memory for a step of this size.
        """
        return self.launch(rows)()

    def launch(self, rows: Sequence[StepRow]) -> Callable[[], list[Sampled | None]]:
        """Start a step. On a device without asynchronous steps, also finish it.

        Args:
          rows: rows as in `step`; `follows` names a row of the step launched before this one.

        Returns:
          A function that waits for the step and returns its tokens. Call it on this thread, in the
          order of launches, so that at most `MAX_UNDER_WAY` steps are in flight.

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
        """Compute decode rows in batches of a fixed size, then the prompt chunks: together they
        would have another number of rows and therefore other bits. Rows of one sequence stay in
        order, because each reads the KV of the previous one."""
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
        """Fill in the tokens of rows that follow others, waiting for them."""
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
        # Sampling has already waited for the device. A step that only fills blocks must wait here,
        # so that the caller does not treat them as final too early.
        if logits is None:
            self._pool.finish_writes()
        return results


def _are_slow(specs: Sequence[SampleSpec]) -> bool:
    """Return whether all rows have slow masks, so that waiting delays no other row."""
    return all(spec.constraint is not None and spec.constraint.is_slow for spec in specs)


def _with_token(row: StepRow, previous: Sequence[Sampled | None]) -> StepRow:
    if row.follows is None:
        return row
    sampled = previous[row.follows]
    assert sampled is not None, "a row follows one that samples nothing"
    return replace(row, token_ids=(sampled.token_id,), follows=None)

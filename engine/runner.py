"""One step: rows in, tokens out. Runs on the device thread.

Knows how to lay a batch out as tensors; does not know which rows run, who owns their blocks, or
when a sequence ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from triolet.errors import CapacityError

from .batch import Sampled, StepRow, flatten
from .sampler import sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from .batch import FlatStep, LayerWatch


class StepModel(Protocol):
    """A model with its KV pool. Used by the device thread only."""

    def compute(self, step: FlatStep, watch: LayerWatch | None = None) -> Tensor | None:
        """Store the KV of a step's tokens and compute the logits of its sampled ones.

        Args:
          step: the rows.
          watch: told how far it is.

        Returns:
          fp32 [at least len(sample_rows), vocab_size]; None where no row samples.
        """
        ...


class Runner:
    """Computes steps of one model over one KV pool.

    Args:
      model: the forward pass.
      block_size: tokens per block.

    Attributes:
      model: the same.
    """

    def __init__(self, model: StepModel, block_size: int) -> None:
        self.model = model
        self._block_size = block_size

    def step(
        self, rows: Sequence[StepRow], watch: LayerWatch | None = None
    ) -> list[Sampled | None]:
        """Compute decode rows and chunks of prompts together.

        Every token id must be in the vocabulary: `engine.batch.check_request` sees to that when a
        request arrives.

        Returns:
          For each row its token, or None where it asked for none.

        Raises:
          CapacityError: the device has no memory for a step of this size.
        """
        if not rows:
            return []
        try:
            with torch.inference_mode():
                return self._step(rows, watch)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"no device memory for a step of {sum(len(r.token_ids) for r in rows)} tokens: "
                "lower kv_pool_bytes or max_num_batched_tokens"
            ) from error

    def _step(self, rows: Sequence[StepRow], watch: LayerWatch | None) -> list[Sampled | None]:
        flat = flatten(rows, self._block_size)
        logits = self.model.compute(flat, watch)
        results: list[Sampled | None] = [None] * len(rows)
        if logits is not None:
            specs = [spec for row in rows if (spec := row.sample) is not None]
            for index, sampled in zip(flat.sample_rows, sample(logits, specs), strict=True):
                results[index] = sampled
        return results

"""One step: rows in, tokens out. Runs on the device thread.

Knows how to lay a batch out as tensors; does not know which rows run, who owns their blocks, or
when a sequence ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from triolet.errors import CapacityError

from .batch import Sampled, StepRow, flatten
from .sampler import sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .attention.interface import AttentionBackend
    from .model import Transformer


class Runner:
    """Computes steps of one model over one KV pool.

    Args:
      model: the forward pass.
      attention: the backend, which holds the pool.
      block_size: tokens per block.
    """

    def __init__(self, model: Transformer, attention: AttentionBackend, block_size: int) -> None:
        self._model = model
        self._attention = attention
        self._block_size = block_size
        self._device = model.weights.embedding.device

    def step(self, rows: Sequence[StepRow]) -> list[Sampled | None]:
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
                return self._step(rows)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"no device memory for a step of {sum(len(r.token_ids) for r in rows)} tokens: "
                "lower kv_pool_bytes or max_num_batched_tokens"
            ) from error

    def _step(self, rows: Sequence[StepRow]) -> list[Sampled | None]:
        flat = flatten(rows, self._block_size)
        self._attention.plan(flat)
        hidden = self._model.forward(
            torch.tensor(flat.token_ids, device=self._device),
            torch.tensor(flat.positions, device=self._device),
            self._attention,
        )
        results: list[Sampled | None] = [None] * len(rows)
        if flat.sample_rows:
            last = torch.tensor(flat.sample_tokens, device=self._device)
            logits = self._model.logits(hidden.index_select(0, last))
            specs = [spec for row in rows if (spec := row.sample) is not None]
            for index, sampled in zip(flat.sample_rows, sample(logits, specs), strict=True):
                results[index] = sampled
        return results

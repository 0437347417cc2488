"""The device side of a decode step: persistent tensors and the computation on them.

Only the number of places is a host value, so a CUDA graph of one step computes every later step of
that size. Positions, slots and tokens are derived on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .decode_rows import LENGTH, MIN_P, NUM_FIELDS, POSITION, SEED, SOURCE, TEMPERATURE, TOKEN
from .sampler_kernels import choose

if TYPE_CHECKING:
    from torch import Tensor

    from .transformer import FusedTransformer


class DecodeState:
    """Tensors that stay on the device from step to step.

    Args:
      num_places: rows of the largest step.
      max_blocks: blocks of the longest sequence.
      vocab_size: size of the vocabulary.
      device: the device.

    Attributes:
      fields: int64 [NUM_FIELDS, num_places], fields of the running step.
      tables: int32 [num_places, max_blocks].
      chosen: int64 [num_places], token that each place sampled last.
      logits: fp32 [num_places, vocab_size], logits of the last step.
    """

    def __init__(
        self, num_places: int, max_blocks: int, vocab_size: int, device: torch.device
    ) -> None:
        self.fields = torch.zeros(NUM_FIELDS, num_places, dtype=torch.int64, device=device)
        self.fields[LENGTH] = 1
        self.tables = torch.zeros(num_places, max_blocks, dtype=torch.int32, device=device)
        self.chosen = torch.zeros(num_places, dtype=torch.int64, device=device)
        self.logits = torch.zeros(num_places, vocab_size, dtype=torch.float32, device=device)

    def take(self, fields: Tensor, patches: Tensor) -> None:
        """Store the host's arrangement of the next step.

        Args:
          fields: int64 [NUM_FIELDS, size].
          patches: int64 [3, n], places, columns and blocks.
        """
        self.fields[:, : fields.shape[1]] = fields
        if patches.shape[1]:
            places, columns, blocks = patches.unbind(0)
            self.tables.index_put_((places, columns), blocks.int())


def compute_step(
    transformer: FusedTransformer, state: DecodeState, block_size: int, size: int
) -> None:
    """Compute the first `size` places: read tokens from `chosen` and write the next ones to it."""
    fields = state.fields[:, :size]
    source = fields[SOURCE]
    token_ids = torch.where(source >= 0, state.chosen[source.clamp(min=0)], fields[TOKEN])
    positions = fields[LENGTH] - 1
    tables = state.tables[:size]
    blocks = tables.gather(1, (positions // block_size).unsqueeze(1)).squeeze(1)
    slots = blocks * block_size + positions % block_size
    transformer.attention.plan_decode(tables, fields[LENGTH].int())
    hidden = transformer.forward(token_ids, positions, slots.long())
    logits = state.logits[:size]
    logits.copy_(transformer.head(hidden))
    state.chosen[:size] = choose(
        logits,
        fields[TEMPERATURE].contiguous().view(torch.float64),
        fields[MIN_P].contiguous().view(torch.float64),
        fields[SEED].contiguous(),
        fields[POSITION].contiguous(),
    )

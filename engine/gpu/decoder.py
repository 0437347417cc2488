"""Launch decode steps on a GPU without waiting for the previous step.

At most `MAX_UNDER_WAY` steps may be in flight. Beyond that, the caller of `launch` must first read
the result of the oldest step.

A row with sampling options beyond temperature and min_p is sampled on the host by
engine/sampler.py. A step with such a row is awaited at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ..batch import MAX_UNDER_WAY, Sampled, is_plain
from ..sampler import begin_masks, sample
from .decode_rows import NUM_FIELDS, DecodeRows
from .decode_step import DecodeState, compute_step
from .host_copies import HostUpload, Mark, host_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..batch import PendingMask, SampleSpec, StepRow
    from ..kv_pool import KVPool
    from .decode_rows import Arrangement
    from .transformer import FusedTransformer

_DEPTH: Final = MAX_UNDER_WAY + 1
_PATCH_FIELDS: Final = 3


class Decoder:
    """Launches decode steps over one pool.

    Args:
      transformer: the forward pass.
      pool: the KV pool.
      sizes: batch sizes, ascending.
      max_model_len: longest sequence.
      mask_wait_s: how long a step waits for masks.
    """

    def __init__(
        self,
        transformer: FusedTransformer,
        pool: KVPool,
        sizes: Sequence[int],
        max_model_len: int,
        mask_wait_s: float,
    ) -> None:
        device = pool.blocks.device
        self._mask_wait_s = mask_wait_s
        self._transformer = transformer
        self._device = device
        self._block_size = pool.layout.block_size
        self._rows = DecodeRows(sizes, self._block_size)
        self.sizes = tuple(sizes)
        max_blocks = -(-max_model_len // self._block_size)
        self._state = DecodeState(sizes[-1], max_blocks, transformer.vocab_size, device)
        self._fields = HostUpload(device, NUM_FIELDS, sizes[-1], _DEPTH)
        self._patches = HostUpload(device, _PATCH_FIELDS, sizes[-1] * max_blocks, _DEPTH)
        self._results = [host_tensor(device, torch.int64, sizes[-1]) for _ in range(_DEPTH)]
        self._num_steps = 0
        self._replay: Callable[[int], None] = self.compute

    def compute(self, size: int) -> None:
        """Launch a step of one size, operation by operation, on the last uploaded fields."""
        compute_step(self._transformer, self._state, self._block_size, size)

    def replay_with(self, replay: Callable[[int], None]) -> None:
        """Use `replay` instead of `compute` from now on."""
        self._replay = replay

    @property
    def is_fixed(self) -> bool:
        """Whether all steps have one size and use the same kernels."""
        return len(self.sizes) == 1

    def takes(self, rows: Sequence[StepRow]) -> bool:
        """Return whether this decoder can compute a step."""
        return len(rows) <= self.sizes[-1] and all(row.is_decode for row in rows)

    def forget_places(self) -> None:
        """Record that the last step was not launched here."""
        self._rows.forget_places()

    def launch(self, rows: Sequence[StepRow]) -> Callable[[], list[Sampled | None]]:
        """Begin a step; return what waits for its tokens."""
        try:
            return self._launch(rows)
        except Exception:
            # Out of memory, say. What the device was not told must be told with the next step.
            self._rows.forget_tables()
            raise

    def _launch(self, rows: Sequence[StepRow]) -> Callable[[], list[Sampled | None]]:
        arrangement = self._rows.arrange(rows)
        self._state.take(
            self._fields.send(arrangement.fields), self._patches.send(arrangement.patches)
        )
        asking = {
            index: spec
            for index, row in enumerate(rows)
            if (spec := row.sample) is not None and not is_plain(spec.params, spec.position)
        }
        masks = begin_masks(list(asking.values()))
        self._replay(arrangement.size)
        on_host = self._sample_on_host(asking, arrangement, masks)
        read = self._download(arrangement.size)
        places = [
            place if row.sample is not None else None
            for row, place in zip(rows, arrangement.places, strict=True)
        ]

        def results() -> list[Sampled | None]:
            tokens = read()
            return [
                None if place is None else on_host.get(index) or Sampled(tokens[place])
                for index, place in enumerate(places)
            ]

        return results

    def _sample_on_host(
        self,
        asking: dict[int, SampleSpec],
        arrangement: Arrangement,
        masks: dict[int, PendingMask],
    ) -> dict[int, Sampled]:
        """Sample rows that ask for more, and tell the device what was chosen."""
        if not asking:
            return {}
        places = torch.tensor([arrangement.places[index] for index in asking], device=self._device)
        logits = self._state.logits.index_select(0, places)
        sampled = sample(logits, list(asking.values()), masks, self._mask_wait_s, self._mask_wait_s)
        chosen = torch.tensor([one.token_id for one in sampled], device=self._device)
        self._state.chosen.index_copy_(0, places, chosen)
        return dict(zip(asking, sampled, strict=True))

    def _download(self, size: int) -> Callable[[], list[int]]:
        host = self._results[self._num_steps % _DEPTH][:size]
        self._num_steps += 1
        host.copy_(self._state.chosen[:size], non_blocking=True)
        mark = Mark(self._device)

        def read() -> list[int]:
            mark.wait()
            tokens: list[int] = host.tolist()
            return tokens

        return read

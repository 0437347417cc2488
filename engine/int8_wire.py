"""KV on the wire as int8: half of bfloat16's bytes and a quarter of float32's, and not the same KV.

Knows the layout of blocks and of payloads; knows no frames. Each token's key and each token's value
has a scale of its own in each head: the largest number there is 127. A payload is, for each block
and layer in turn, the rounded numbers [2, block_size, num_kv_heads, head_dim], then the scales
[2, block_size, num_kv_heads] as float32. What is computed on such KV errs; how far is said beside
the setting (`KvWire` in triolet/config/link.py) and kept by a test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from triolet.errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from .kv_pool import KVPool

    Floats = npt.NDArray[np.float32]

LARGEST: Final = 127
SCALE_BYTES: Final = 4


class Int8Wire:
    """Rounds blocks on their way out of a pool, and widens them on their way in.

    Args:
      pool: of the blocks.

    Attributes:
      bytes_per_block: of one block with all its layers, on the wire.
    """

    def __init__(self, pool: KVPool) -> None:
        layout = pool.layout
        self._pool = pool
        self._is_bf16 = layout.dtype is torch.bfloat16
        self._num_layers = layout.num_layers
        self._head_dim = layout.head_dim
        self._num_heads = 2 * layout.block_size * layout.num_kv_heads
        self._bytes_per_layer = self._num_heads * (layout.head_dim + SCALE_BYTES)
        self.bytes_per_block = layout.num_layers * self._bytes_per_layer

    def export_blocks(self, block_ids: Sequence[int], into: memoryview | None = None) -> memoryview:
        """Copy some blocks out, rounded. See KVPool.export_blocks."""
        num_parts = len(block_ids) * self._num_layers
        if into is None:
            into = np.empty(num_parts * self._bytes_per_layer, dtype=np.uint8).data
        assert len(into) == num_parts * self._bytes_per_layer, "a buffer of another size"
        numbers = self._widen(self._pool.export_blocks(block_ids), num_parts)
        scales = np.abs(numbers).max(axis=-1) / np.float32(LARGEST)
        # Unwritten blocks may hold anything: it stays unusable, and harms nothing.
        is_usable = np.isfinite(scales) & (scales > 0)
        with np.errstate(invalid="ignore"):
            rounded = np.rint(numbers / np.where(is_usable, scales, np.float32(1))[..., None])
        rounded[~is_usable] = 0
        parts = np.frombuffer(into, dtype=np.uint8).reshape(num_parts, -1)
        num_numbers = self._num_heads * self._head_dim
        parts[:, :num_numbers] = rounded.astype(np.int8).reshape(num_parts, -1).view(np.uint8)
        parts[:, num_numbers:] = np.ascontiguousarray(scales).view(np.uint8).reshape(num_parts, -1)
        return into

    def import_blocks(self, block_ids: Sequence[int], payload: bytes | memoryview) -> None:
        """Overwrite some blocks with what `export_blocks` gave.

        Raises:
          RemoteProtocolError: the payload has not the size of that many blocks; nothing is written.
        """
        num_parts = len(block_ids) * self._num_layers
        if len(payload) != num_parts * self._bytes_per_layer:
            raise RemoteProtocolError(
                f"KV payload of {len(payload)} bytes for {num_parts} layers of blocks "
                f"of {self._bytes_per_layer}"
            )
        parts = np.frombuffer(payload, dtype=np.uint8).reshape(num_parts, -1)
        num_numbers = self._num_heads * self._head_dim
        rounded = parts[:, :num_numbers].view(np.int8)
        scales = np.ascontiguousarray(parts[:, num_numbers:]).view(np.float32)
        shape = (num_parts, self._num_heads, self._head_dim)
        numbers = rounded.reshape(shape).astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            numbers *= scales.reshape(*shape[:2], 1)
        self._pool.import_blocks(block_ids, self._narrow(numbers))

    def _widen(self, payload: memoryview, num_parts: int) -> Floats:
        """Return a pool's bytes as floats [parts, heads, head_dim]."""
        shape = (num_parts, self._num_heads, self._head_dim)
        if self._is_bf16:
            halves = np.frombuffer(payload, dtype=np.uint16).astype(np.uint32)
            return (halves << np.uint32(16)).view(np.float32).reshape(shape)
        return np.frombuffer(payload, dtype=np.float32).reshape(shape)

    def _narrow(self, numbers: Floats) -> memoryview:
        """Return floats as a pool's bytes."""
        if not self._is_bf16:
            return numbers.reshape(-1).view(np.uint8).data
        words = numbers.reshape(-1).view(np.uint32)
        # To the nearest, ties to even, as torch rounds.
        odd = (words >> np.uint32(16)) & np.uint32(1)
        halves = (words + np.uint32(0x7FFF) + odd) >> np.uint32(16)
        halves[np.isnan(numbers.reshape(-1))] = 0x7FC0
        return halves.astype(np.uint16).view(np.uint8).data

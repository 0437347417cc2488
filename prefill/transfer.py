"""State of the KV transfer of one attempt: which blocks are computed, exported, sent, taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from transport.digest import sealed
from transport.frames import KvChunk, KvManifest
from triolet.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transport.frames import TokenRow
    from triolet.ids import AttemptKey

    from .ring import RingSlot

CACHED_BYTES: Final = 1 * MIB
"""Bytes that are digested right after copying, while they are in the core's cache."""


@dataclass(slots=True)
class TransferChunk:
    """Whole blocks outside the pool, kept until the receiver has taken them.

    Attributes:
      frame: address and digest.
      slot: the bytes, which no longer change.
      sent_at: when it was last sent; None if it is to be sent.
    """

    frame: KvChunk
    slot: RingSlot
    sent_at: float | None = None

    @property
    def num_bytes(self) -> int:
        """Size of its payload."""
        return len(self.slot.memory)


@dataclass(frozen=True, slots=True)
class Frames:
    """Sizes of chunks.

    Attributes:
      chunk_bytes: approximate size of a chunk.
      bytes_per_block: on the wire.
    """

    chunk_bytes: int
    bytes_per_block: int

    @property
    def blocks_per_chunk(self) -> int:
        """Number of blocks in a full chunk."""
        return max(1, self.chunk_bytes // self.bytes_per_block)

    def parts_of(self, blocks: range) -> Iterator[range]:
        """Yield parts of a chunk that fit into a core's cache, in order."""
        step = max(1, CACHED_BYTES // self.bytes_per_block)
        for begin in range(blocks.start, blocks.stop, step):
            yield range(begin, min(begin + step, blocks.stop))

    def bytes_of(self, blocks: range) -> int:
        """Return the size of a payload."""
        return len(blocks) * self.bytes_per_block


@dataclass(slots=True, eq=False)
class Transfer:
    """The KV transfer of one attempt.

    Attributes:
      key: request and attempt number.
      target_epoch: epoch of the receiver that holds the lease.
      num_blocks: blocks of the whole prompt.
      num_tokens: tokens of the prompt.
      num_exported: leading blocks that have left the pool, or that the receiver had from the start.
      num_computed: leading blocks with final KV.
      first: first completion token, known when the whole prompt is computed.
      chunks: by index, those that the receiver has not taken yet.
      num_chunks: chunks made so far.
      num_unsent: those of `chunks` that are to be sent.
      manifest_sent_at: when the manifest was last sent.
      kv_key: key of the MACs of chunks and manifest; empty for none.
      is_released: whether the pool has been told that its blocks are no longer needed.
    """

    key: AttemptKey
    target_epoch: int
    num_blocks: int
    num_tokens: int
    num_exported: int
    num_computed: int = 0
    first: TokenRow | None = None
    chunks: dict[int, TransferChunk] = field(default_factory=dict)
    num_chunks: int = 0
    num_unsent: int = 0
    manifest_sent_at: float | None = None
    kv_key: bytes = b""
    is_released: bool = False

    @property
    def is_exported(self) -> bool:
        """Return whether the pool's blocks are no longer needed."""
        return self.first is not None and self.num_exported >= self.num_blocks

    @property
    def is_all_sent(self) -> bool:
        """Return whether only the manifest is left to send."""
        return self.is_exported and not self.num_unsent

    def next_export(self, frames: Frames) -> range | None:
        """Return the blocks of the next chunk, or None if more must be computed first.

        Chunks are full except for the last one: many small frames cost more than a short wait.
        """
        ready = self.num_computed - self.num_exported
        if ready >= frames.blocks_per_chunk or (ready and self.num_computed >= self.num_blocks):
            end = self.num_exported + min(ready, frames.blocks_per_chunk)
            return range(self.num_exported, end)
        return None

    def add_chunk(self, blocks: range, slot: RingSlot, digest: bytes) -> TransferChunk:
        """Keep exported blocks for sending; return their chunk."""
        request_id, attempt = self.key
        frame = KvChunk(
            request_id,
            attempt,
            target_epoch=self.target_epoch,
            index=self.num_chunks,
            first_block=blocks.start,
            num_blocks=len(blocks),
            digest=digest,
        )
        if self.kv_key:
            frame = sealed(frame, self.kv_key, slot.memory)
        chunk = self.chunks[self.num_chunks] = TransferChunk(frame, slot)
        self.num_chunks += 1
        self.num_unsent += 1
        self.num_exported = blocks.stop
        return chunk

    def manifest(self) -> KvManifest:
        """Return the frame that ends the transfer."""
        assert self.is_exported, "a manifest before the last chunk"
        assert self.first is not None, "a manifest before the first token"
        request_id, attempt = self.key
        manifest = KvManifest(
            request_id,
            attempt,
            target_epoch=self.target_epoch,
            num_chunks=self.num_chunks,
            num_tokens=self.num_tokens,
            first=self.first,
        )
        return sealed(manifest, self.kv_key) if self.kv_key else manifest

"""The KV of one attempt on its way out: which blocks are computed, exported, sent, taken.

Knows block counts and chunks; does not know windows, other attempts or sockets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from transport.digest import sealed
from transport.frames import KvChunk, KvManifest
from triolet.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transport.frames import TokenRow
    from triolet.ids import AttemptKey

    from .ring import Slot

CACHED_BYTES: Final = 1 * MIB
"""What is digested right after it was copied, from the cache of the core that copied it."""


@dataclass(slots=True)
class Chunk:
    """Some whole blocks outside the pool, kept until the receiver has taken them.

    Attributes:
      frame: address and digest.
      slot: the bytes, which do not change any more.
      sent_at: when it was last handed to the link, None if it is to be sent.
    """

    frame: KvChunk
    slot: Slot
    sent_at: float | None = None

    @property
    def num_bytes(self) -> int:
        """Of its payload."""
        return len(self.slot.memory)


class Piece(NamedTuple):
    """What one chunk carries: some layers of some blocks."""

    blocks: range
    layers: range


@dataclass(slots=True)
class LayerGroups:
    """Blocks that leave layer by layer while the step that completes them still runs.

    Attributes:
      blocks: which.
      layers: those that are leaving now, or have just left.
      num_final: leading layers whose KV is final.
      next_block: the first whose `layers` have not left.
    """

    blocks: range
    layers: range
    num_final: int
    next_block: int


@dataclass(frozen=True, slots=True)
class Frames:
    """How much goes into a chunk.

    Attributes:
      chunk_bytes: about.
      num_layers: of a block.
      bytes_per_layer: of a block's layer.
    """

    chunk_bytes: int
    num_layers: int
    bytes_per_layer: int

    def blocks_of(self, num_layers: int) -> int:
        """Return how many blocks' parts of so many layers make a chunk."""
        return max(1, self.chunk_bytes // (num_layers * self.bytes_per_layer))

    def parts_of(self, piece: Piece) -> Iterator[Piece]:
        """Yield parts of a piece that fit into a core's cache, in order."""
        first, last = piece.blocks.start, piece.blocks.stop
        step = max(1, CACHED_BYTES // (len(piece.layers) * self.bytes_per_layer))
        for begin in range(first, last, step):
            yield Piece(range(begin, min(begin + step, last)), piece.layers)

    def bytes_of(self, piece: Piece) -> int:
        """Return the size of a payload."""
        return len(piece.blocks) * len(piece.layers) * self.bytes_per_layer


@dataclass(slots=True, eq=False)
class Transfer:
    """One attempt's shipment.

    Attributes:
      key: request and attempt number.
      target_epoch: the life of the receiver that holds the lease.
      num_blocks: blocks of the whole prompt.
      num_tokens: tokens of the prompt.
      num_exported: leading blocks out of the pool, or held by the receiver from the start.
      num_computed: leading blocks whose KV is final.
      first: the first completion token, known when the whole prompt is computed.
      chunks: by index, those that the receiver has not taken yet.
      num_chunks: chunks made so far.
      num_unsent: of `chunks`, those that are to be sent.
      manifest_sent_at: when the manifest was last handed to the link.
      groups: the blocks that leave layer by layer, None if none do.
      kv_key: by which chunks and manifest get a MAC; empty for none.
      is_released: whether the pool has been told that its blocks are not needed any more.
    """

    key: AttemptKey
    target_epoch: int
    num_blocks: int
    num_tokens: int
    num_exported: int
    num_computed: int = 0
    first: TokenRow | None = None
    chunks: dict[int, Chunk] = field(default_factory=dict)
    num_chunks: int = 0
    num_unsent: int = 0
    manifest_sent_at: float | None = None
    groups: LayerGroups | None = None
    kv_key: bytes = b""
    is_released: bool = False

    @property
    def is_exported(self) -> bool:
        """Whether the pool's blocks are not needed any more."""
        return self.first is not None and self.num_exported >= self.num_blocks

    @property
    def is_all_sent(self) -> bool:
        """Whether only the manifest is left to send."""
        return self.is_exported and not self.num_unsent

    def note_layers(self, num_blocks: int, num_layers: int, frames: Frames) -> None:
        """Note that the first layers are final of the leading `num_blocks`, all of which will be
        when the running step has returned."""
        if self.groups is None:
            # A transfer that is behind with whole blocks gains nothing by smaller pieces.
            is_behind = self.num_computed - self.num_exported >= frames.blocks_of(frames.num_layers)
            if is_behind or num_blocks <= self.num_exported:
                return
            blocks = range(self.num_exported, num_blocks)
            self.groups = LayerGroups(blocks, range(0), 0, blocks.start)
        if self.groups.blocks.stop == num_blocks:
            self.groups.num_final = max(self.groups.num_final, num_layers)

    def note_blocks(self, num_blocks: int, num_layers: int) -> None:
        """Note that the leading blocks are final with all their layers."""
        self.num_computed = num_blocks
        if self.groups is not None and num_blocks >= self.groups.blocks.stop:
            self.groups.num_final = num_layers

    def next_export(self, frames: Frames) -> Piece | None:
        """Return what the next chunk holds, or None if more must be computed first.

        Chunks are full but for the last one: many small frames cost more than a short wait.
        """
        if self.groups is not None:
            return self._next_of(self.groups, frames)
        ready = self.num_computed - self.num_exported
        blocks_per_chunk = frames.blocks_of(frames.num_layers)
        if ready >= blocks_per_chunk or (ready and self.num_computed >= self.num_blocks):
            end = self.num_exported + min(ready, blocks_per_chunk)
            return Piece(range(self.num_exported, end), range(frames.num_layers))
        return None

    def add_chunk(self, piece: Piece, slot: Slot, digest: bytes, frames: Frames) -> Chunk:
        """Keep an exported piece for sending; return it."""
        blocks, layers = piece
        is_whole = len(layers) == frames.num_layers
        request_id, attempt = self.key
        frame = KvChunk(
            request_id,
            attempt,
            target_epoch=self.target_epoch,
            index=self.num_chunks,
            first_block=blocks.start,
            num_blocks=len(blocks),
            digest=digest,
            first_layer=layers.start,
            num_layers=0 if is_whole else len(layers),
        )
        if self.kv_key:
            frame = sealed(frame, self.kv_key, slot.memory)
        chunk = self.chunks[self.num_chunks] = Chunk(frame, slot)
        self.num_chunks += 1
        self.num_unsent += 1
        if self.groups is None:
            self.num_exported = blocks.stop
            return chunk
        self.groups.next_block = blocks.stop
        if blocks.stop == self.groups.blocks.stop and layers.stop == frames.num_layers:
            self.num_exported, self.groups = blocks.stop, None
        return chunk

    @staticmethod
    def _next_of(groups: LayerGroups, frames: Frames) -> Piece | None:
        if groups.next_block == groups.blocks.stop or not groups.layers:
            if groups.num_final == groups.layers.stop:
                return None
            groups.layers = range(groups.layers.stop, groups.num_final)
            groups.next_block = groups.blocks.start
        end = groups.next_block + frames.blocks_of(len(groups.layers))
        return Piece(range(groups.next_block, min(end, groups.blocks.stop)), groups.layers)

    def manifest(self) -> KvManifest:
        """Return the frame that says that this is all."""
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

"""Assemble the KV of one prompt from chunks that may be late, duplicated, reordered or damaged.

Checks addresses, digests and counts. The caller copies chunks that are judged TAKEN.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

from transport.digest import payload_digest
from triolet.errors import RemoteProtocolError

if TYPE_CHECKING:
    from transport.frames import KvChunk, KvManifest


class ChunkVerdict(Enum):
    """What to do with a chunk."""

    TAKEN = auto()  # copy it into the leased blocks
    DUPLICATE = auto()  # already there; only give its window back
    CORRUPT = auto()  # ask for it again


class Assembly:
    """The chunks of one attempt.

    Attributes:
      manifest: the sender's manifest, once received.
    """

    def __init__(
        self,
        *,
        first_block: int,
        num_blocks: int,
        num_tokens: int,
        bytes_per_block: int,
    ) -> None:
        """Start with nothing received.

        Args:
          first_block: leading blocks that need no transfer.
          num_blocks: blocks of the whole prompt, including those.
          num_tokens: tokens of the prompt.
          bytes_per_block: payload bytes of one block.
        """
        self.manifest: KvManifest | None = None
        self._first_block = first_block
        self._num_blocks = num_blocks
        self._num_tokens = num_tokens
        self._bytes_per_block = bytes_per_block
        self._chunks: dict[int, tuple[int, int]] = {}
        self._filled = bytearray(num_blocks)
        self._num_missing = num_blocks - first_block
        self._failures: dict[int, int] = {}

    @property
    def is_complete(self) -> bool:
        """Return whether every block has arrived and the manifest confirms it."""
        return self.manifest is not None and self._num_missing == 0

    def judge(self, chunk: KvChunk, payload: bytes | memoryview) -> ChunkVerdict:
        """Check one chunk and record it as received if it is good.

        Raises:
          RemoteProtocolError: its address contradicts the prompt, the manifest or another chunk.
        """
        where = (chunk.first_block, chunk.num_blocks)
        known = self._chunks.get(chunk.index)
        if known is not None:
            if known != where:
                raise RemoteProtocolError(f"chunk {chunk.index} came twice with other blocks")
            return ChunkVerdict.DUPLICATE
        self._check_address(chunk, len(payload))
        if payload_digest(payload) != chunk.digest:
            self._failures[chunk.index] = self._failures.get(chunk.index, 0) + 1
            return ChunkVerdict.CORRUPT
        blocks = slice(chunk.first_block, chunk.first_block + chunk.num_blocks)
        if any(self._filled[blocks]):
            raise RemoteProtocolError(f"chunk {chunk.index} overlaps another chunk")
        self._filled[blocks] = b"\x01" * chunk.num_blocks
        self._chunks[chunk.index] = where
        self._num_missing -= chunk.num_blocks
        self._check_count()
        return ChunkVerdict.TAKEN

    def num_failures(self, index: int) -> int:
        """Return how often this chunk arrived with a wrong digest."""
        return self._failures.get(index, 0)

    def accept_manifest(self, manifest: KvManifest) -> None:
        """Record the manifest; the same one again changes nothing.

        Raises:
          RemoteProtocolError: it contradicts the prompt, the chunks so far or an earlier manifest.
        """
        if self.manifest is not None and manifest != self.manifest:
            raise RemoteProtocolError("a second manifest differs from the first")
        if manifest.num_tokens != self._num_tokens:
            raise RemoteProtocolError(
                f"manifest of {manifest.num_tokens} tokens for a prompt of {self._num_tokens}"
            )
        if manifest.first.position != 0 or manifest.first.key != manifest.key:
            raise RemoteProtocolError("the manifest's first token is not position 0 of its attempt")
        last = max(self._chunks, default=-1)
        if last >= manifest.num_chunks:
            raise RemoteProtocolError(f"chunk {last} of only {manifest.num_chunks}")
        self.manifest = manifest
        self._check_count()

    def _check_count(self) -> None:
        if self.manifest is None:
            return
        has_all_chunks = len(self._chunks) == self.manifest.num_chunks
        if has_all_chunks != (self._num_missing == 0):
            raise RemoteProtocolError(
                f"{len(self._chunks)} of {self.manifest.num_chunks} chunks arrived, "
                f"{self._num_missing} blocks are missing"
            )

    def _check_address(self, chunk: KvChunk, num_bytes: int) -> None:
        end = chunk.first_block + chunk.num_blocks
        if not self._first_block <= chunk.first_block < end <= self._num_blocks:
            raise RemoteProtocolError(
                f"chunk {chunk.index} is blocks {chunk.first_block}…{end - 1}; "
                f"expected {self._first_block}…{self._num_blocks - 1}"
            )
        if num_bytes != chunk.num_blocks * self._bytes_per_block:
            raise RemoteProtocolError(
                f"chunk {chunk.index} of {chunk.num_blocks} blocks has {num_bytes} bytes"
            )
        if self.manifest is not None and chunk.index >= self.manifest.num_chunks:
            raise RemoteProtocolError(
                f"chunk {chunk.index} of only {self.manifest.num_chunks} in the manifest"
            )

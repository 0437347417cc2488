"""An engine without arithmetic whose tokens still depend on every byte of KV.

Its "KV" is the token itself, written where a real one would be. The next token is a hash of what a
step reads back through the block table, so a chunk that was lost, misplaced or overwritten shows as
a wrong token.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

from engine.batch import Sampled
from engine.block_ledger import BlockLedger
from engine.host_tier import HostTier
from engine.pace import Pace
from engine.prefix_cache import Node, PrefixCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.batch import SampleSpec, StepRow

VOCAB_SIZE = 1000
_TOKEN = struct.Struct("<I")
_POISON = b"\xff" * 4


def next_token(tokens: Sequence[int], seed: int) -> int:
    """Return the token that follows: the reference that tests compare with."""
    packed = b"".join(_TOKEN.pack(token) for token in tokens)
    digest = hashlib.blake2b(packed + seed.to_bytes(8, "little"), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


def completion(prompt: Sequence[int], seed: int, num_tokens: int) -> list[int]:
    """Return what a whole greedy run gives."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


class FakeEngine:
    """See worker.engine_port.EnginePort."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 256,
        fingerprint: str = "fake",
        host_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.bytes_per_block = block_size * _TOKEN.size
        self.max_model_len = max_model_len
        self.vocab_size = VOCAB_SIZE
        self.fingerprint = fingerprint
        self.pace = Pace(8, step_s=0.0, target_s=1.0, least_tokens=8, most_tokens=8)
        self.fail_next_step = False
        self._pool = [bytearray(_POISON * block_size) for _ in range(num_blocks + 1)]
        self.ledger = BlockLedger(num_blocks + 1, poison=self)
        host: HostTier[Node] = HostTier(host_blocks * self.bytes_per_block, self.bytes_per_block)
        self.prefix_cache = PrefixCache(
            self.ledger, block_size, self, host=host if host_blocks else None
        )

    def poison(self, block_ids: Sequence[int]) -> None:
        """See engine.block_ledger.Poison."""
        for block in block_ids:
            self._pool[block][:] = _POISON * self.block_size

    def count_spoiled(self, block_ids: Sequence[int]) -> int:
        """See engine.block_ledger.Poison."""
        clean = _POISON * self.block_size
        return sum(self._pool[block] != clean for block in block_ids)

    def step(self, rows: Sequence[StepRow]) -> list[Sampled | None]:
        """Store tokens and hash what is read back."""
        if self.fail_next_step:
            self.fail_next_step = False
            raise RuntimeError("the fake engine was told to fail")
        return [self._compute(row) for row in rows]

    def export_blocks(self, block_ids: Sequence[int], into: memoryview | None = None) -> bytes:
        """Copy blocks out."""
        payload = b"".join(self._pool[block] for block in block_ids)
        if into is not None:
            into[:] = payload
        return payload

    def pin(self, memory: memoryview) -> bool:
        """Do nothing: there is no device."""
        return True

    def import_blocks(self, block_ids: Sequence[int], payload: bytes | memoryview) -> None:
        """Overwrite blocks."""
        assert len(payload) == len(block_ids) * self.bytes_per_block
        for index, block in enumerate(block_ids):
            start = index * self.bytes_per_block
            self._pool[block][:] = payload[start : start + self.bytes_per_block]

    def _compute(self, row: StepRow) -> Sampled | None:
        for offset, token in enumerate(row.token_ids):
            block, slot = self._where(row.block_table, row.start + offset)
            self._pool[block][slot : slot + _TOKEN.size] = _TOKEN.pack(token)
        if row.sample is None:
            return None
        return self._sample(row, row.sample)

    def _sample(self, row: StepRow, sample: SampleSpec) -> Sampled:
        tokens = []
        for position in range(row.start + len(row.token_ids)):
            block, slot = self._where(row.block_table, position)
            tokens.append(_TOKEN.unpack_from(self._pool[block], slot)[0])
        return Sampled(next_token(tokens, sample.params.seed))

    def _where(self, block_table: Sequence[int], position: int) -> tuple[int, int]:
        block = block_table[position // self.block_size]
        return block, position % self.block_size * _TOKEN.size

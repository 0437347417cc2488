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
from simulation.engine import HIDDEN_SIZE, VOCAB_SIZE, PoolEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.batch import SampleSpec, StepRow

_TOKEN = struct.Struct("<I")


def next_token(tokens: Sequence[int], seed: int) -> int:
    """Return the token that follows: the reference that tests compare with."""
    packed = b"".join(_TOKEN.pack(token) for token in tokens)
    digest = hashlib.blake2b(packed + seed.to_bytes(8, "little"), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


def hidden(tokens: Sequence[int]) -> list[float]:
    """Return the hidden state of the last of some tokens: a hash of them all."""
    digest = hashlib.blake2b(b"".join(map(_TOKEN.pack, tokens)), digest_size=HIDDEN_SIZE).digest()
    return [float(byte) for byte in digest]


def completion(prompt: Sequence[int], seed: int, num_tokens: int) -> list[int]:
    """Return what a whole greedy run gives."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


class FakeEngine(PoolEngine):
    """See worker.engine_port.EnginePort."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 256,
        fingerprint: str = "fake",
        host_blocks: int = 0,
    ) -> None:
        super().__init__(num_blocks, block_size, block_size * _TOKEN.size)
        self.ledger = BlockLedger(num_blocks + 1, poison=self)
        host: HostTier[Node] = HostTier(host_blocks * self.bytes_per_block, self.bytes_per_block)
        self.prefix_cache = PrefixCache(
            self.ledger, block_size, self, host=host if host_blocks else None
        )
        self.max_model_len = max_model_len
        self.fingerprint = fingerprint
        self.pace = Pace(8, step_s=0.0, target_s=1.0, least_tokens=8, most_tokens=8, chunk_tokens=8)
        self.num_rests = 0
        self.fail_next_step = False
        self.is_device_lost = False

    def poison(self, block_ids: Sequence[int]) -> None:
        """See engine.block_ledger.Poison."""
        for block in block_ids:
            self._pool[block][:] = self._poisoned

    def count_spoiled(self, block_ids: Sequence[int]) -> int:
        """See engine.block_ledger.Poison."""
        return sum(self._pool[block] != self._poisoned for block in block_ids)

    def rest(self) -> None:
        """Count."""
        self.num_rests += 1

    def step(self, rows: Sequence[StepRow]) -> list[Sampled | None]:
        """Store tokens, and hash what is read back."""
        if self.fail_next_step:
            self.fail_next_step = False
            raise RuntimeError("the fake engine was told to fail")
        for row in rows:
            self._store(row)
        for row in rows:
            self._pool_hidden(row, self.hidden_of)
        return [None if row.sample is None else self._sample(row, row.sample) for row in rows]

    def check_device(self) -> None:
        """Raise if it was told that its device is lost."""
        if self.is_device_lost:
            raise RuntimeError("the fake device was told to be lost")

    def _store(self, row: StepRow) -> None:
        for offset, token in enumerate(row.token_ids):
            block, place = self._where(row.block_table, row.start + offset)
            self._pool[block][place : place + _TOKEN.size] = _TOKEN.pack(token)

    def _sample(self, row: StepRow, sample: SampleSpec) -> Sampled:
        tokens = self._read_back(row, row.start + len(row.token_ids))
        return Sampled(next_token(tokens, sample.params.seed))

    def hidden_of(self, row: StepRow, num_tokens: int) -> list[float]:
        """Return a hash of the first tokens of a row's sequence."""
        return hidden(self._read_back(row, num_tokens))

    def _read_back(self, row: StepRow, num_tokens: int) -> list[int]:
        tokens = []
        for position in range(num_tokens):
            block, place = self._where(row.block_table, position)
            tokens.append(_TOKEN.unpack_from(self._pool[block], place)[0])
        return tokens

    def _where(self, block_table: Sequence[int], position: int) -> tuple[int, int]:
        """Return block and place of a token."""
        place = position % self.block_size * _TOKEN.size
        return block_table[position // self.block_size], place

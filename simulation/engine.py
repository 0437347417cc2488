"""The scripted engine: an engine that computes nothing but detects every misplaced byte of KV.

The KV of a token is the token with its position, stored in the place of real KV. A script gets the
KV that a step reads through the block table and returns the next token. A chunk that was lost,
misplaced, damaged or overwritten therefore changes the tokens. Freed blocks are poisoned and must
stay poisoned. `chosen` is the simulator's script, SimulatedDevice its device in virtual time.
"""

from __future__ import annotations

import struct
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar, TypeVarTuple, cast

import numpy as np
import trio
import xxhash

from engine.batch import Sampled
from engine.block_ledger import BlockLedger
from engine.host_tier import HostTier
from engine.pooling import Pool
from engine.prefix_cache import Node, PrefixCache
from triolet.config import SpeculationConfig
from triolet.pooling import VectorForm
from triolet.sampling import is_end_token

from .faults import Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from decode.attempt import DecodeAttempt
    from engine.batch import SampleSpec, StepRow
    from engine.pace import Pace
    from triolet.ids import AttemptKey
    from triolet.sampling import SamplingParams

    Says = Callable[[bytes, SampleSpec], Sampled]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

VOCAB_SIZE: Final = 1000
HIDDEN_SIZE: Final = 4
EOS_ID: Final = 0
EOS_ONE_IN: Final = 43
"""Probability of the end token: most answers reach their maximum length, some end earlier."""
MAX_MODEL_LEN: Final = 512
FINGERPRINT: Final = "simulated"
TOKEN: Final = 500
"""The only token without a script: a whole word of the demo model, so each token is an event."""

_KV = struct.Struct("<HH")


def choose(kv: bytes, seed: int, position: int) -> int:
    """Return the token that follows some KV at a completion position."""
    number = xxhash.xxh3_64_intdigest(kv, seed=(seed * 1_000_003 + position) & (2**64 - 1))
    if number % EOS_ONE_IN == 0:
        return EOS_ID
    return 1 + (number >> 16) % (VOCAB_SIZE - 1)


def kv_of(token_ids: Sequence[int]) -> bytes:
    """Return the KV of a sequence."""
    return b"".join(_KV.pack(token_id, at) for at, token_id in enumerate(token_ids))


def tokens_in(kv: bytes) -> list[int]:
    """Return the tokens stored in some KV, with any positions."""
    return [token_id for token_id, _ in _KV.iter_unpack(kv)]


def only_token(rows: Sequence[StepRow]) -> list[Sampled | None]:
    """Return the same token for every row that samples."""
    return [None if row.sample is None else Sampled(TOKEN) for row in rows]


def chosen(kv: bytes, sample: SampleSpec) -> Sampled:
    """Return the next token. This is the simulator's script."""
    return Sampled(choose(kv, sample.params.seed, sample.position))


def reference(prompt_ids: Sequence[int], sampling: SamplingParams) -> tuple[int, ...]:
    """Return the expected completion, which faults must not change."""
    kv = bytearray(kv_of(prompt_ids))
    token_ids: list[int] = []
    for position in range(sampling.max_tokens):
        token_id = choose(bytes(kv), sampling.seed, position)
        token_ids.append(token_id)
        if is_end_token(sampling, (EOS_ID,), position, token_id):
            break
        kv += _KV.pack(token_id, len(kv) // _KV.size)
    return tuple(token_ids)


def hidden(kv: bytes) -> list[float]:
    """Return the hidden state of the last token of some KV."""
    return [float(byte) for byte in xxhash.xxh3_64_digest(kv)[:HIDDEN_SIZE]]


def reference_vector(input_ids: Sequence[int]) -> bytes:
    """Return the expected vector of an input, which faults must not change."""
    pool = Pool(VectorForm(), len(input_ids))
    pool.add(np.array([hidden(kv_of(input_ids))], dtype=np.float32))
    return pool.vector()


class SimulatedCost(NamedTuple):
    """Duration of a step.

    Attributes:
      step_s: fixed part.
      token_s: additional time per token.
    """

    step_s: float
    token_s: float

    def of(self, num_tokens: int) -> float:
        """Return the duration of a step in seconds."""
        return self.step_s + num_tokens * self.token_s


class TellingLedger(BlockLedger):
    """A block ledger that reports the end of each lease.

    Attributes:
      on_freed: called with the owner once its blocks are free.
    """

    on_freed: Callable[[Hashable], None] | None = None

    def release(self, owner: Hashable) -> int:
        """End a lease."""
        had_blocks = self.has_lease(owner) and bool(self.blocks_of(owner))
        num_freed = super().release(owner)
        if had_blocks and self.on_freed is not None:
            self.on_freed(owner)
        return num_freed

    def is_leased(self, block: int) -> bool:
        """Return whether a lease names the block."""
        return self.num_leases_of(block) > 0

    def is_free(self, block: int) -> bool:
        """Return whether a block is neither leased nor cached."""
        return not self.is_leased(block) and block not in self.kept


def _fail(what: str) -> None:
    raise AssertionError(what)


class ScriptedEngine:
    """See worker.engine_port.EnginePort.

    Args:
      num_blocks: number of blocks that can be leased, without block 0.
      block_size: tokens per block.
      pace: capacity and duration of steps.
      says: the script; None always gives the same token.
      host_bytes: host memory for evicted KV.
      report: called with a description of each violation.
      happened: counts injected step errors.

    Attributes:
      before_step: called with the rows of each step; may raise.
      fail_steps: number of coming steps that raise.
      is_device_lost: whether the device fails.
      num_rests: number of calls of `rest`.
      sampled_at: start of the step that last sampled, by prompt and seed.
    """

    speedup = 1.0
    adapters: frozenset[bytes] = frozenset()

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        pace: Pace,
        says: Says | None = chosen,
        *,
        max_model_len: int = MAX_MODEL_LEN,
        vocab_size: int = VOCAB_SIZE,
        fingerprint: str = FINGERPRINT,
        host_bytes: int = 0,
        report: Callable[[str], None] = _fail,
        happened: Counter[Fault] | None = None,
    ) -> None:
        self.block_size = block_size
        self.bytes_per_block = block_size * _KV.size
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.fingerprint = fingerprint
        self.pace = pace
        self._poisoned = b"\xff" * self.bytes_per_block
        self._pool = [bytearray(self._poisoned) for _ in range(num_blocks + 1)]
        self.ledger = TellingLedger(num_blocks + 1, poison=self)
        host: HostTier[Node] = HostTier(host_bytes, self.bytes_per_block)
        self.prefix_cache = PrefixCache(
            self.ledger, block_size, self, host=host if host_bytes else None
        )
        self.before_step: Callable[[Sequence[StepRow]], None] | None = None
        self.fail_steps = 0
        self.is_device_lost = False
        self.num_rests = 0
        self.sampled_at: dict[tuple[Sequence[int], int], float] = {}
        self._says = says
        self._report = report
        self._happened = Counter() if happened is None else happened

    def rest(self) -> None:
        """Count the call. There are no cores to lend."""
        self.num_rests += 1

    def constrain(self, sampling: SamplingParams) -> None:
        """Return None. Tokens are not text, so grammars are not supported."""
        assert not sampling.is_constrained

    def check_device(self) -> None:
        """Raise if the device was made to fail."""
        if self.is_device_lost:
            raise RuntimeError("the scripted device was made to fail")

    def poison(self, block_ids: Sequence[int]) -> None:
        """See engine.block_ledger.Poison."""
        for block in block_ids:
            self._pool[block][:] = self._poisoned

    def count_spoiled(self, block_ids: Sequence[int]) -> int:
        """See engine.block_ledger.Poison."""
        return sum(self._pool[block] != self._poisoned for block in block_ids)

    def check_poison(self) -> None:
        """Report blocks that were written without a lease."""
        for block, kv in enumerate(self._pool):
            if kv != self._poisoned and block and self.ledger.is_free(block):
                self._report(f"block {block} was written after it was freed")

    def export_blocks(self, block_ids: Sequence[int], into: memoryview | None = None) -> bytes:
        """Copy blocks out of the pool."""
        payload = b"".join(self._pool[block] for block in block_ids)
        if into is not None:
            into[:] = payload
        return payload

    def pin(self, memory: memoryview) -> bool:
        """Do nothing: there is no device."""
        return True

    def unpin(self, memory: memoryview) -> None:
        """Do nothing: there is no device."""

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block over another."""
        if not (self.ledger.is_leased(source) and self.ledger.is_leased(target)):
            self._report(f"block {source} was copied to {target}, but one of them is not leased")
        self._pool[target][:] = self._pool[source]

    def import_blocks(self, block_ids: Sequence[int], payload: bytes | memoryview) -> None:
        """Copy KV into blocks."""
        size = self.bytes_per_block
        assert len(payload) == len(block_ids) * size
        for index, block in enumerate(block_ids):
            if not self.ledger.is_leased(block):
                self._report(f"KV was written into block {block}, which is not leased")
            self._pool[block][:] = payload[index * size : (index + 1) * size]

    def step(self, rows: Sequence[StepRow]) -> list[Sampled | None]:
        """Store the tokens of rows, and return the script's next tokens."""
        if self.before_step is not None:
            self.before_step(rows)
        if self.fail_steps:
            self.fail_steps -= 1
            self._happened[Fault.STEP_ERROR] += 1
            raise RuntimeError("the scripted engine was made to fail")
        if self._says is None:
            return only_token(rows)
        self._check_owned(rows)
        return [self._compute(row, self._says) for row in rows]

    def _compute(self, row: StepRow, says: Says) -> Sampled | None:
        for offset, token_id in enumerate(row.token_ids):
            position = row.start + offset
            block = row.block_table[position // self.block_size]
            _KV.pack_into(
                self._pool[block], position % self.block_size * _KV.size, token_id, position
            )
        end = row.start + len(row.token_ids)
        if row.pool is not None:
            wanted = row.pool.wanted(row.start, end)
            states = [hidden(self._read_back(row, position + 1)) for position in wanted]
            row.pool.add(np.array(states, dtype=np.float32).reshape(-1, HIDDEN_SIZE))
        return None if row.sample is None else says(self._read_back(row, end), row.sample)

    def _read_back(self, row: StepRow, num_tokens: int) -> bytes:
        num_blocks = -(-num_tokens // self.block_size)
        kv = b"".join(self._pool[block] for block in row.block_table[:num_blocks])
        return kv[: num_tokens * _KV.size]

    def _check_owned(self, rows: Sequence[StepRow]) -> None:
        # Rows of one sequence share a block table.
        written = {(id(row.block_table), block) for row in rows for block in self._written(row)}
        blocks = [block for _, block in written]
        if len(set(blocks)) != len(blocks):
            self._report("two sequences of one step write one block")
        if any(self.ledger.num_leases_of(b) > 1 or b in self.ledger.kept for b in blocks):
            self._report("a step writes a block that others read")
        if not all(self.ledger.is_leased(block) for row in rows for block in row.block_table):
            self._report("a step uses a block that is not leased")

    def _written(self, row: StepRow) -> Sequence[int]:
        end = row.start + len(row.token_ids)
        return row.block_table[row.start // self.block_size : -(-end // self.block_size)]


class SimulatedDevice:
    """A device that takes virtual time for each step and can hang.

    Args:
      engine: engine that runs the steps.
      cost: cost of a step.
      happened: counts steps that were delayed.

    Attributes:
      on_step: called with the start time of each step.
    """

    def __init__(
        self, engine: ScriptedEngine, cost: SimulatedCost, happened: Counter[Fault]
    ) -> None:
        self.on_step: Callable[[float], None] | None = None
        self._engine = engine
        self._cost = cost
        self._happened = happened
        self._wedged_until = 0.0
        self._standstill: trio.CancelScope | None = None

    def wedge(self, seconds: float) -> None:
        """Make steps hang for a while; 0 s ends that."""
        self._wedged_until = trio.current_time() + seconds
        if self._standstill is not None:
            self._standstill.deadline = self._wedged_until

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a step after its duration."""
        began_at = trio.current_time()
        rows = _rows(args)
        if rows and self.on_step is not None:
            self.on_step(began_at)
        num_tokens = 0
        for row in rows:
            num_tokens += len(row.token_ids)
            if row.sample is not None:
                chosen = (row.sample.prompt_ids, row.sample.params.seed)
                self._engine.sampled_at[chosen] = began_at
        await trio.sleep(self._cost.of(num_tokens))
        if self._wedged_until > trio.current_time():
            self._happened[Fault.WEDGE] += 1
            with trio.CancelScope(deadline=self._wedged_until) as self._standstill:
                await trio.sleep_forever()
        return fn(*args)


def _rows(args: tuple[object, ...]) -> Sequence[StepRow]:
    """Return the rows of a step; none if the call only checks the device."""
    return cast("Sequence[StepRow]", args[0]) if args else ()


EAGER: Final = SpeculationConfig(max_guesses=4, max_step_tokens=12, pause_rows=1, max_pause_rows=2)
"""Short, because longer pauses would outlast most answers."""
WRONG_ONE_IN: Final = 4


class Guesses:
    """A source of guesses based on the known completions."""

    ledger = None

    def __init__(self) -> None:
        self._completions: dict[AttemptKey, tuple[int, ...]] = {}

    def guess(self, attempt: DecodeAttempt, most: int) -> list[int]:
        """Return the next tokens, with errors that depend only on seed and position."""
        if attempt.key not in self._completions:
            self._completions[attempt.key] = reference(attempt.prompt_ids, attempt.sampling)
        position, seed = len(attempt.output_ids), attempt.sampling.seed
        right = self._completions[attempt.key][position : position + most]
        return [
            (token_id + ((position + i) * 7 + seed) % WRONG_ONE_IN // (WRONG_ONE_IN - 1))
            % VOCAB_SIZE
            for i, token_id in enumerate(right)
        ]

    def forget(self, key: AttemptKey) -> None:
        """Drop an attempt that has ended."""
        self._completions.pop(key, None)

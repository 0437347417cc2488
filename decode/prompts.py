"""Prompts that a decode worker computes itself, blocks that it caches for later prompts, and forks:
attempts that share another attempt's prompt blocks.

Prompt KV has the bits of prefill on any worker. Completion KV is computed by decode, and replaces
prefill's only where both give the same bits (`PrefixCache.keeps_completions`): a request's tokens
must not depend on earlier requests of others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from transport.frames import EndReason
from transport.lease import LeaseEvent, LeaseState
from transport.tokens import pack_tokens
from worker.chunks import ChunkScheduler, PromptChunk
from worker.rates import StepRates

if TYPE_CHECKING:
    from engine.pace import Pace
    from engine.prefix_cache import PrefixCache
    from transport.frames import AttemptRow
    from triolet.ids import AttemptKey, PeerId
    from worker.attempt_table import AttemptTable
    from worker.engine_port import EnginePort

    from .attempt import DecodeAttempt


def keep_prompt(cache: PrefixCache, attempt: DecodeAttempt, block_size: int) -> None:
    """Cache the KV of a whole prompt."""
    _keep(cache, attempt, len(attempt.prompt_ids) // block_size)


def keep_completion(cache: PrefixCache, attempt: DecodeAttempt, block_size: int) -> None:
    """Cache the KV of an attempt that ends: the next turn of its chat begins with it."""
    if cache.keeps_completions and attempt.output_ids:
        _keep(cache, attempt, attempt.num_computed_tokens // block_size)


def _keep(cache: PrefixCache, attempt: DecodeAttempt, num_blocks: int) -> None:
    if num_blocks:
        tokens = pack_tokens((*attempt.prompt_ids, *attempt.output_ids))
        cache.insert(tokens, attempt.cache_key, attempt.block_table[:num_blocks], attempt.keeper)


PROMPT_ROWS: Final = 4
"""Prompts get at most one row in this many: more would have only a few tokens each, and streams
would lose their turns to them."""


class Prompts:
    """The prompts that one decode worker computes itself.

    Args:
      attempt_table: the attempts with leases.
      pace: capacity of steps.
      max_num_seqs: rows of a step.

    Attributes:
      rates: speed of steps.
    """

    def __init__(
        self, attempt_table: AttemptTable[DecodeAttempt], pace: Pace, max_num_seqs: int
    ) -> None:
        self.rates = StepRates(pace)
        self._attempt_table = attempt_table
        self._most_rows = max(1, max_num_seqs // PROMPT_ROWS)
        self._scheduler: ChunkScheduler[DecodeAttempt] = ChunkScheduler()
        self._open: dict[AttemptKey, DecodeAttempt] = {}
        self._chunks: list[PromptChunk[DecodeAttempt]] = []
        self._began_at = 0.0

    def add(self, attempt: DecodeAttempt) -> None:
        """Add an attempt to compute its prompt here."""
        self._open[attempt.key] = attempt

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that are still to be computed."""
        return sum(attempt.num_remaining_tokens for attempt in self._waiting())

    @property
    def num_rows(self) -> int:
        """Rows of the next step that prompts could use."""
        return min(len(self._waiting()), self._most_rows)

    def plan(self, num_decode_rows: int, now: float) -> list[PromptChunk[DecodeAttempt]]:
        """Choose the chunks that run beside this many rows of streams."""
        budget = self.rates.chunk_tokens(num_decode_rows)
        self._chunks = self._scheduler.plan(self._waiting(), budget, 0, self._most_rows)
        self._began_at = now
        for chunk in self._chunks:
            lease = self._attempt_table.leases.get(chunk.attempt.key)
            if lease is not None and lease.state is LeaseState.RESERVED:
                self._attempt_table.leases.step(lease.key, LeaseEvent.START)
        return self._chunks

    def take(
        self, num_decode_rows: int, now: float, speedup: float
    ) -> list[PromptChunk[DecodeAttempt]]:
        """Return the chunks of the finished step, after learning from its duration."""
        chunks, self._chunks = self._chunks, []
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        self.rates.took(
            now - self._began_at,
            num_prompt_tokens=num_tokens,
            num_decode_rows=num_decode_rows,
            speedup=speedup,
        )
        return chunks

    def _waiting(self) -> list[DecodeAttempt]:
        """Return live attempts with unfinished prompts, and forget the others."""
        if not self._open:
            return []  # the usual case: this is called several times per step
        alive = self._attempt_table.attempts
        self._open = {
            key: attempt
            for key, attempt in self._open.items()
            if key in alive and attempt.num_remaining_tokens
        }
        return list(self._open.values())


def num_shared_blocks(num_prompt_tokens: int, block_size: int) -> int:
    """Return how many leading blocks of a prompt a fork never writes: all but the last token's."""
    return (num_prompt_tokens - 1) // block_size


class Forks:
    """Attempts that wait for the prompts of others on one decode worker.

    Args:
      engine: shares and copies blocks.
      attempt_table: the attempts with leases.
      prompts: computes the part that a fork does not share.
    """

    def __init__(
        self, engine: EnginePort, attempt_table: AttemptTable[DecodeAttempt], prompts: Prompts
    ) -> None:
        self._engine = engine
        self._attempt_table = attempt_table
        self._prompts = prompts
        self._waiting: dict[AttemptKey, list[DecodeAttempt]] = {}

    def origin(
        self, row: AttemptRow, server: PeerId, prompt_ids: tuple[int, ...], cache_key: bytes
    ) -> DecodeAttempt | None:
        """Return the attempt whose prompt is to be shared; None if it is not here or has another
        prompt."""
        origin = self._attempt_table.attempts.get(row.key)
        if origin is None or origin.server != server or origin.cache_key != cache_key:
            return None
        return origin if origin.prompt_ids == prompt_ids else None

    def add(self, fork: DecodeAttempt, origin: DecodeAttempt) -> None:
        """Add an attempt with a lease on its own blocks; it gets the shared ones when the prompt is
        computed, at once if it already is."""
        if origin.output_ids:
            self._part(fork, origin)
        else:
            self._waiting.setdefault(origin.key, []).append(fork)

    def complete(self, origin: DecodeAttempt) -> None:
        """Process that an attempt's prompt is computed, before anything else happens to it."""
        for fork in self._waiting.pop(origin.key, ()):
            if fork.key in self._attempt_table.attempts:
                self._part(fork, origin)

    def forsake(self, origin: DecodeAttempt, now: float) -> None:
        """Process the end of an attempt: forks that still wait for its prompt must start over."""
        for fork in self._waiting.pop(origin.key, ()):
            self._attempt_table.end(fork.key, EndReason.FORSAKEN, now)

    def _part(self, fork: DecodeAttempt, origin: DecodeAttempt) -> None:
        num_shared = fork.num_held_blocks
        self._engine.copy_block(origin.block_table[num_shared], fork.block_table[0])
        shared = origin.block_table[:num_shared]
        self._engine.ledger.extend(fork.key, 0, shared)
        fork.block_table[:0] = shared
        fork.num_computed_tokens = len(fork.prompt_ids) - 1
        self._prompts.add(fork)

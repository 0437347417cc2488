"""State of one attempt on a decode worker: its tokens, its blocks, and how far it is computed.

The state of its lease (RESERVED, RUNNING, …) is in transport/lease.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.batch import FollowedBy, SampleSpec, StepRow
from transport.frames import EndReason
from triolet.fair_lru import ANYBODY
from triolet.sampling import is_end_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.batch import Constraint
    from transport.frames import TokenRow
    from transport.window import TokenWindow
    from triolet.fair_lru import Keeper
    from triolet.ids import AttemptKey, PeerId
    from triolet.sampling import SamplingParams

    from .assembly import Assembly


@dataclass(slots=True, eq=False)
class DecodeAttempt:
    """An attempt with a lease.

    Attributes:
      key: request and attempt number.
      server: server and epoch that asked for it.
      prompt_ids: the prompt.
      replay_ids: completion tokens that the client already has; computed, not sampled or sent.
      sampling: parameters of the next token.
      eos_token_ids: the model's end tokens.
      priority: lower is more important.
      order: increases with each reservation; the greatest is the youngest.
      window: how far the stream may run.
      assembly: the KV being received.
      block_table: leased blocks in sequence order.
      output_ids: known completion tokens, replayed ones first; empty until the KV has arrived.
      num_computed_tokens: leading tokens of prompt and completion with KV in the pool.
      last_turn: increases with every row of any attempt; the lowest has waited longest.
      unheard: sent rows that the server has not acknowledged; bounded by its window.
      kv_sender: routing id of the prefill worker that sends to it; None before the first chunk.
      cache_key: key of its KV in the cache, from salt and adapter.
      num_held_blocks: leading blocks of the prompt that were here on arrival, or that it shares
        with the attempt that it forks.
      is_local: whether its prompt is computed here, without a transfer.
      keeper: tenant that its cached blocks count for.
      weight: weight of its tenant within the class.
      constraint: on its completion; None for none.
      adapter: digest of its adapter; empty for the base model.
      kv_key: key of the MACs of its chunks and manifest, where KV is not encrypted.
    """

    key: AttemptKey
    server: PeerId
    prompt_ids: tuple[int, ...]
    replay_ids: tuple[int, ...]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    priority: int
    order: int
    window: TokenWindow
    assembly: Assembly
    block_table: list[int]
    output_ids: list[int]
    num_computed_tokens: int = 0
    last_turn: int = 0
    unheard: list[TokenRow] = field(default_factory=list)
    kv_sender: bytes | None = None
    cache_key: bytes = b""
    num_held_blocks: int = 0
    is_local: bool = False
    keeper: Keeper = ANYBODY
    weight: float = 1.0
    constraint: Constraint | None = None
    adapter: bytes = b""
    kv_key: bytes = b""

    @property
    def num_needed_blocks(self) -> int:
        """Always 0: a lease has all blocks of its prompt from the beginning."""
        return 0

    @property
    def is_started(self) -> bool:
        """Return whether it has its blocks."""
        return True

    @property
    def num_remaining_tokens(self) -> int:
        """Prompt tokens that are still to be computed here."""
        return max(0, len(self.prompt_ids) - self.num_computed_tokens) if self.is_local else 0

    @property
    def num_output_tokens(self) -> int:
        """Number of completion tokens, including replayed ones."""
        return max(len(self.output_ids), len(self.replay_ids))

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens and known completion tokens."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def samples_next(self) -> bool:
        """Return whether its next row samples a token; if not, that row only replays one."""
        return self.num_computed_tokens == self.num_tokens - 1

    @property
    def num_to_replay(self) -> int:
        """Number of known tokens that are computed without sampling."""
        return max(0, self.num_tokens - 1 - self.num_computed_tokens)

    @property
    def is_blocked(self) -> bool:
        """Return whether it must wait until its client has read more."""
        return self.samples_next and not self.window.may_produce(len(self.output_ids))

    @property
    def is_awaiting_mask(self) -> bool:
        """Return whether its next row would be wasted because its slow mask is not there yet."""
        return self.samples_next and self.constraint is not None and self.constraint.is_awaited

    def rows(self, guesses: Sequence[int] = (), num_more: int = 0) -> list[StepRow]:
        """Return its next decode rows: the first token that is not computed yet, then known or
        guessed tokens after it.

        Args:
          guesses: only if the first row samples a token.
          num_more: only if it does not: number of known tokens after the first.
        """
        first = self.num_computed_tokens - len(self.prompt_ids)
        known = self.output_ids[first : first + 1 + num_more]
        rows = [self._row(token_id, offset, ()) for offset, token_id in enumerate(known)]
        rows += [self._row(guesses[i], i + 1, guesses[: i + 1]) for i in range(len(guesses))]
        return rows

    def _row(self, token_id: int, offset: int, guesses: Sequence[int]) -> StepRow:
        sample = None
        if self.samples_next:
            sample = SampleSpec(
                params=self.sampling,
                position=len(self.output_ids) + offset,
                prompt_ids=self.prompt_ids,
                output_ids=FollowedBy(self.output_ids, guesses) if guesses else self.output_ids,
                eos_token_ids=self.eos_token_ids,
                constraint=self.constraint,
            )
        return StepRow(
            token_ids=(token_id,),
            start=self.num_computed_tokens + offset,
            block_table=self.block_table,
            sample=sample,
            is_decode=True,
            adapter=self.adapter,
        )

    def finish_reason(self, max_model_len: int) -> EndReason | None:
        """Return why it ends with its last known token, or None if it continues."""
        position = len(self.output_ids) - 1
        if is_end_token(self.sampling, self.eos_token_ids, position, self.output_ids[position]):
            return EndReason.STOP
        if len(self.output_ids) >= self.sampling.max_tokens or self.num_tokens >= max_model_len:
            return EndReason.LENGTH
        return None

"""One attempt at a request as decode holds it: its tokens, its blocks, how far it is computed.

Plain state with the questions that schedulers ask of it; knows no frames and changes nothing by
itself. Where it is in its life is its lease's state.
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
    """A lease and what it is for.

    Attributes:
      key: request and attempt number.
      server: the life of the server that asked.
      prompt_ids: the prompt.
      replay_ids: completion tokens that the client has already; computed, never sampled or sent.
      sampling: how the next token is chosen.
      eos_token_ids: the model's end tokens.
      priority: lower is more important.
      order: rises with each reservation; the greatest is the youngest.
      window: how far the stream may run.
      assembly: the KV on its way.
      block_table: leased blocks in sequence order.
      output_ids: completion tokens that are decided, replayed ones first; empty until the KV is in.
      num_computed_tokens: leading tokens of prompt and completion whose KV is in the pool.
      last_turn: rises with every row that any attempt has; the lowest has waited longest.
      unheard: rows that were sent and that the server has not said it has; at most what its window
        lets it run ahead.
      kv_sender: routing id of the prefill worker that ships to it, None before the first chunk.
      cache_key: under which its KV is found again: of salt and adapter.
      num_held_blocks: leading blocks of the prompt that were here when it came, or that it shares
        with the attempt whose fork it is.
      is_local: its prompt is computed here; no KV is shipped to it.
      keeper: the tenant for which its KV is kept.
      weight: of its tenant, beside others of the same class.
      constraint: what its completion has to be, None for anything.
      adapter: digest of the adapter that computes it; empty for the base alone.
      kv_key: by which its chunks and manifest are authenticated, where KV is not encrypted.
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
        """Blocks that its prompt lacks: none, for a lease has them all from its beginning."""
        return 0

    @property
    def is_started(self) -> bool:
        """Whether it has its blocks."""
        return True

    @property
    def num_remaining_tokens(self) -> int:
        """Prompt tokens that have still to be computed here."""
        return max(0, len(self.prompt_ids) - self.num_computed_tokens) if self.is_local else 0

    @property
    def num_output_tokens(self) -> int:
        """Completion tokens that exist, replayed ones included."""
        return max(len(self.output_ids), len(self.replay_ids))

    @property
    def num_tokens(self) -> int:
        """Prompt and decided completion tokens."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def samples_next(self) -> bool:
        """Whether its next row decides a token; if not, that row only replays one."""
        return self.num_computed_tokens == self.num_tokens - 1

    @property
    def num_to_replay(self) -> int:
        """Tokens that are known and whose rows decide nothing."""
        return max(0, self.num_tokens - 1 - self.num_computed_tokens)

    @property
    def is_blocked(self) -> bool:
        """Whether it may not go on until its client has read more."""
        return self.samples_next and not self.window.may_produce(len(self.output_ids))

    @property
    def is_awaiting_mask(self) -> bool:
        """Whether its next row would be computed for nothing: the mask is slow and not there."""
        return self.samples_next and self.constraint is not None and self.constraint.is_awaited

    def rows(self, guesses: Sequence[int] = (), num_more: int = 0) -> list[StepRow]:
        """Return its next decode rows: the first token that is not computed yet, then those behind
        it that are known, or that are guessed to follow.

        Args:
          guesses: only where the first row decides a token.
          num_more: only where it does not: known tokens behind the first.
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
        """Return why it is over with its last decided token, or None if it goes on."""
        position = len(self.output_ids) - 1
        if is_end_token(self.sampling, self.eos_token_ids, position, self.output_ids[position]):
            return EndReason.STOP
        if len(self.output_ids) >= self.sampling.max_tokens or self.num_tokens >= max_model_len:
            return EndReason.LENGTH
        return None

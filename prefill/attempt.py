"""State of one attempt on a prefill worker: its prompt, and how far it is computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from triolet.fair_lru import ANYBODY

if TYPE_CHECKING:
    from engine.batch import Constraint
    from triolet.fair_lru import Keeper
    from triolet.ids import AttemptKey, PeerId
    from triolet.sampling import SamplingParams


@dataclass(slots=True, eq=False)
class PrefillAttempt:
    """A prompt to compute and ship.

    Attributes:
      key: request and attempt number.
      server: server and epoch that asked for it.
      prompt_ids: the prompt.
      packed_ids: the same, packed.
      cache_key: key of its KV in the cache, from salt and adapter.
      sampling: parameters of the first token.
      eos_token_ids: the model's end tokens.
      priority: lower is more important.
      order: increases with each arrival.
      arrived_at: time of arrival.
      num_blocks: blocks of the whole prompt.
      started_at: when it first had a row; None while it waits.
      block_table: its blocks; empty while it waits, and no longer its own once all is exported.
      num_needed_blocks: available blocks that its start would take at present.
      num_computed_tokens: leading tokens with final KV; while it waits, those in the prefix
        cache at present.
      num_cached_tokens: those of them that were not computed for it.
      keeper: tenant that its cached blocks count for.
      constraint: on its completion; None for none.
      adapter: digest of its adapter; empty for the base model.
    """

    key: AttemptKey
    server: PeerId
    prompt_ids: tuple[int, ...]
    packed_ids: bytes
    cache_key: bytes
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    priority: int
    order: int
    arrived_at: float
    num_blocks: int
    started_at: float | None = None
    block_table: list[int] = field(default_factory=list)
    num_needed_blocks: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    keeper: Keeper = ANYBODY
    constraint: Constraint | None = None
    adapter: bytes = b""

    @property
    def num_output_tokens(self) -> int:
        """Number of completion tokens: one, once the prompt is computed."""
        return 1 if self.is_computed else 0

    @property
    def num_remaining_tokens(self) -> int:
        """Prompt tokens still to compute."""
        return len(self.prompt_ids) - self.num_computed_tokens

    @property
    def is_computed(self) -> bool:
        """Return whether only sending is left."""
        return self.num_remaining_tokens == 0

    @property
    def is_started(self) -> bool:
        """Return whether it has blocks for its whole prompt."""
        return self.started_at is not None

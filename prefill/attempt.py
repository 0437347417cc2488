"""One attempt at a request as prefill holds it: its prompt, and how far it is computed.

Plain state with the questions that the scheduler asks of it; knows no frames and no time.
"""

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
      server: the life of the server that asked.
      prompt_ids: the prompt.
      packed_ids: the same, packed.
      cache_key: under which its KV is found again: of salt and adapter.
      sampling: how the first token is chosen.
      eos_token_ids: the model's end tokens.
      priority: lower is more important.
      order: rises with each arrival.
      arrived_at: when it came.
      num_blocks: blocks that the prompt fills.
      started_at: when it first had a row, None while it waits.
      block_table: its blocks, empty while it waits; not its own any more once all is exported.
      num_needed_blocks: what its start takes of the blocks that are available, as things stand.
      num_computed_tokens: leading tokens whose KV is final; while it waits, those that the prefix
        cache has at the moment.
      num_cached_tokens: of these, not computed for it.
      keeper: the tenant for which its KV is kept.
      constraint: what its completion has to be, None for anything.
      adapter: digest of the adapter that computes it; empty for the base alone.
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
        """Completion tokens that exist: the first one, once the prompt is computed."""
        return 1 if self.is_computed else 0

    @property
    def num_remaining_tokens(self) -> int:
        """Prompt tokens still to compute."""
        return len(self.prompt_ids) - self.num_computed_tokens

    @property
    def is_computed(self) -> bool:
        """Whether only shipping is left."""
        return self.num_remaining_tokens == 0

    @property
    def is_started(self) -> bool:
        """Whether it has blocks for all of its prompt."""
        return self.started_at is not None

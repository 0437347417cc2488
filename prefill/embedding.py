"""One attempt at an input that becomes a vector: its tokens, and how far they are computed.

Plain state with the questions that batching asks of it; knows no frames and no time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.pooling import Pool
    from triolet.ids import AttemptKey, PeerId


@dataclass(slots=True, eq=False)
class Embedding:
    """An input to compute.

    Attributes:
      key: request and attempt number.
      server: the life of the server that asked.
      prompt_ids: the input.
      pool: makes the vector.
      priority: lower is more important.
      order: rises with each arrival.
      arrived_at: when it came.
      num_blocks: blocks that the input fills while it is computed.
      started_at: when it first had a row, None while it waits.
      block_table: its blocks, empty while it waits.
      num_computed_tokens: leading tokens whose KV is in the pool.
    """

    key: AttemptKey
    server: PeerId
    prompt_ids: tuple[int, ...]
    pool: Pool
    priority: int
    order: int
    arrived_at: float
    num_blocks: int
    started_at: float | None = None
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0

    @property
    def num_output_tokens(self) -> int:
        """There are none."""
        return 0

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens still to compute."""
        return len(self.prompt_ids) - self.num_computed_tokens

    @property
    def is_started(self) -> bool:
        """Whether it has blocks for all of its tokens."""
        return self.started_at is not None

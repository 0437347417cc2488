"""From one step to the next for inputs that become vectors: which go on, and what came of them.

Knows attempts, blocks and results; does not know how steps are run. An input's KV serves nobody
but itself: it is neither looked up nor kept, because a mean needs the hidden states of all tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.batch import StepRow
from transport.frames import Embedded, EndReason
from transport.lease import LeaseEvent

from .embedding import Embedding
from .embedding_batches import Room, due_at, plan_inputs

if TYPE_CHECKING:
    from triolet.config_embedding import EmbeddingConfig
    from triolet.ids import AttemptKey
    from worker.counters import Counters
    from worker.engine_port import EnginePort
    from worker.outbox import Outbox
    from worker.roster import FailedStep, Roster

    from .attempt import Attempt
    from .embedding_batches import InputChunk


class Embedder:
    """Plans the part of each step that belongs to inputs, and takes in what it gave.

    Args:
      engine: whose blocks are filled.
      roster: who holds a lease.
      outbox: takes the EMBEDDED frames.
      counters: of tokens.
      config: how inputs are batched.
    """

    def __init__(
        self,
        engine: EnginePort,
        roster: Roster[Attempt | Embedding],
        outbox: Outbox,
        counters: Counters,
        config: EmbeddingConfig,
    ) -> None:
        self._engine = engine
        self._roster = roster
        self._outbox = outbox
        self._counters = counters
        self._config = config
        self._chunks: list[InputChunk] = []

    @property
    def waiting(self) -> list[Embedding]:
        """Inputs that are not computed."""
        attempts = self._roster.attempts.values()
        return [attempt for attempt in attempts if isinstance(attempt, Embedding)]

    @property
    def due_at(self) -> float | None:
        """From when on a step may take inputs; None if none is there."""
        return due_at(self.waiting, self._config)

    @property
    def keys(self) -> list[AttemptKey]:
        """Attempts in the running step."""
        return [chunk.embedding.key for chunk in self._chunks]

    @property
    def num_tokens(self) -> int:
        """Of the running step."""
        return sum(chunk.num_tokens for chunk in self._chunks)

    def plan(self, max_tokens: int, now: float, *, is_beside_chat: bool) -> list[StepRow]:
        """Begin the inputs' part of the next step."""
        ledger, waiting = self._engine.ledger, self.waiting
        due = due_at(waiting, self._config)
        if due is None or due > now or max_tokens <= 0:
            return []
        room = Room(max_tokens, ledger.available_blocks, ledger.total_blocks, is_beside_chat)
        self._chunks = plan_inputs(waiting, room, self._config)
        return [self._row(chunk, now) for chunk in self._chunks]

    def complete(self, now: float) -> None:
        """Take in that the step is done: hidden states are in the pools."""
        chunks, self._chunks = self._chunks, []
        for embedding, num_tokens in chunks:
            self._counters.computed_tokens += num_tokens
            if embedding.key not in self._roster.attempts:
                self._counters.late_rows += 1
                continue  # it ended meanwhile
            embedding.num_computed_tokens += num_tokens
            if not embedding.num_remaining_tokens:
                self._finish(embedding, now)

    def fail(self, message: str, failed: FailedStep, now: float) -> None:
        """Take in that the step raised."""
        chunks, self._chunks = self._chunks, []
        for embedding, _ in chunks:
            self._roster.end(embedding.key, EndReason.ERROR, now, message, failed)

    def _row(self, chunk: InputChunk, now: float) -> StepRow:
        embedding, num_tokens = chunk
        if not embedding.is_started:
            embedding.block_table = self._engine.ledger.lease(embedding.key, embedding.num_blocks)
            embedding.started_at = now
            self._roster.leases.step(embedding.key, LeaseEvent.START)
        start = embedding.num_computed_tokens
        return StepRow(
            token_ids=embedding.prompt_ids[start : start + num_tokens],
            start=start,
            block_table=embedding.block_table,
            pool=embedding.pool,
        )

    def _finish(self, embedding: Embedding, now: float) -> None:
        assert embedding.started_at is not None, "computed without having started"
        frame = Embedded(
            *embedding.key,
            vector=embedding.pool.vector(),
            queue_s=embedding.started_at - embedding.arrived_at,
            compute_s=now - embedding.started_at,
        )
        self._outbox.to_server(embedding.server.identity(), frame)
        self._roster.end(embedding.key, EndReason.EMBEDDED, now)

"""Embedding inputs on a prefill worker: their state, the division of a step's tokens between
prompts and inputs, and the choice of the inputs in a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from engine.batch import StepRow
from transport.frames import Embedded, EndReason
from transport.lease import LeaseEvent
from triolet.config import MAX_NUM_SEQS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.pooling import Pool
    from triolet.config import EmbeddingConfig
    from triolet.ids import AttemptKey, PeerId
    from worker.attempt_table import AttemptTable, FailedStep
    from worker.counters import Counters
    from worker.engine_port import EnginePort
    from worker.outbox import Outbox

    from .attempt import PrefillAttempt


@dataclass(slots=True, eq=False)
class Embedding:
    """An input to compute.

    Attributes:
      key: request and attempt number.
      server: server and epoch that asked for it.
      prompt_ids: the input.
      pool: pooling function for the vector.
      priority: lower is more important.
      order: increases with each arrival.
      arrived_at: time of arrival.
      num_blocks: blocks that the input needs while it is computed.
      started_at: when it first had a row; None while it waits.
      block_table: its blocks; empty while it waits.
      num_computed_tokens: leading tokens with KV in the pool.
      adapter: digest of its adapter; empty for the base model.
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
    adapter: bytes = b""

    @property
    def num_output_tokens(self) -> int:
        """Always 0: an input has no completion."""
        return 0

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens still to compute."""
        return len(self.prompt_ids) - self.num_computed_tokens

    @property
    def is_started(self) -> bool:
        """Return whether it has blocks for all of its tokens."""
        return self.started_at is not None


SHARE_BESIDE_CHAT: Final = 8
"""Inputs get one part in this many of a step while prompts of chats wait: these lose an eighth of
their speed, and inputs always make progress."""
OLDEST_SHARE: Final = 4
"""The oldest input gets one part in this many of a batch, as with prompts (worker/chunks.py)."""
MAX_RATIO: Final = 4
"""Within a batch no input has more than this many times the tokens of the shortest."""
SHORT_TOKENS: Final = 64
"""Shorter inputs are batched at any ratio: a step reads all weights anyway."""
POOL_SHARE: Final = 4
"""Inputs get one part in this many of the pool's blocks; a longer one runs alone."""


class InputChunk(NamedTuple):
    """One row of a step.

    Attributes:
      embedding: the request of the input.
      num_tokens: number of its next tokens to compute.
    """

    embedding: Embedding
    num_tokens: int


class StepRoom(NamedTuple):
    """Room for inputs in a step.

    Attributes:
      max_tokens: token budget of the step.
      free_blocks: number of blocks that can be leased now.
      total_blocks: number of blocks in the pool.
      is_beside_chat: whether the step also has rows of chats.
    """

    max_tokens: int
    free_blocks: int
    total_blocks: int
    is_beside_chat: bool


class StepTokens(NamedTuple):
    """Division of a step's tokens.

    Attributes:
      prompts: limit for prompts of chats.
      all: limit for prompts and inputs together.
    """

    prompts: int
    all: int


def part_tokens(narrow: int, wide: int, *, chats_wait: bool, inputs_are_due: bool) -> StepTokens:
    """Divide a step between prompts of chats and inputs.

    Args:
      narrow: tokens of a step while a chat waits.
      wide: tokens of a step with only inputs.
      chats_wait: whether a chat's prompt is not computed yet, even if it cannot have a row now.
      inputs_are_due: whether inputs may have rows.
    """
    if not chats_wait:
        return StepTokens(narrow, max(narrow, wide))
    share = narrow // SHARE_BESIDE_CHAT if inputs_are_due else 0
    return StepTokens(narrow - share, narrow)


def due_at(waiting: Sequence[Embedding], config: EmbeddingConfig) -> float | None:
    """Return the time from which a step may include inputs; None if there are none.

    Args:
      waiting: all inputs that are not computed yet.
      config: how long to wait for more inputs, and the size of a full batch.
    """
    if not waiting:
        return None
    oldest = min(embedding.arrived_at for embedding in waiting)
    num_tokens = sum(embedding.num_remaining_tokens for embedding in waiting)
    is_full = num_tokens >= config.max_batch_tokens or len(waiting) >= MAX_NUM_SEQS
    is_begun = any(embedding.is_started for embedding in waiting)
    return oldest if is_full or is_begun else oldest + config.max_wait_s


def plan_inputs(
    waiting: Sequence[Embedding], room: StepRoom, config: EmbeddingConfig
) -> list[InputChunk]:
    """Choose the inputs of the next step.

    Args:
      waiting: all inputs that are not computed yet.
      room: for inputs in the step.
      config: limit of a batch.

    Returns:
      At most one chunk per input, in total at most the room. An input that would fit into no batch
      may exceed it by one token: otherwise it would wait forever.
    """
    budget = min(room.max_tokens, config.max_batch_tokens)
    if room.is_beside_chat:
        budget = max(1, budget // SHARE_BESIDE_CHAT)
    queue = sorted(waiting, key=_by_urgency)
    if not queue:
        return []
    blocks_left = _blocks_left(waiting, room)
    oldest = min(queue, key=lambda embedding: embedding.order)
    longest = max(MAX_RATIO * queue[0].num_remaining_tokens, SHORT_TOKENS)
    chosen: list[InputChunk] = []
    is_one_by_one = config.max_batch_tokens == 1
    for embedding in [oldest, *(one for one in queue if one is not oldest)]:
        if budget <= 0 or len(chosen) >= MAX_NUM_SEQS or (chosen and is_one_by_one):
            break
        is_oldest = embedding is oldest
        if not is_oldest and embedding.num_remaining_tokens > longest:
            continue
        if not embedding.is_started:
            if embedding.num_blocks > (room.free_blocks if is_oldest else blocks_left):
                continue
            if is_oldest and embedding.num_blocks > blocks_left and _holds_blocks(waiting):
                continue
            blocks_left -= embedding.num_blocks
        most = budget
        if is_one_by_one:
            most = room.max_tokens
        elif is_oldest and len(queue) > 1 and embedding.num_remaining_tokens > longest:
            most = max(1, budget // OLDEST_SHARE)
        num_tokens = min(embedding.num_remaining_tokens, most)
        budget -= num_tokens
        chosen.append(InputChunk(embedding, num_tokens))
    return chosen


def _blocks_left(waiting: Sequence[Embedding], room: StepRoom) -> int:
    held = sum(one.num_blocks for one in waiting if one.is_started)
    return min(room.free_blocks, room.total_blocks // POOL_SHARE - held)


def _holds_blocks(waiting: Sequence[Embedding]) -> bool:
    return any(embedding.is_started for embedding in waiting)


def _by_urgency(embedding: Embedding) -> tuple[int, int, int]:
    return (embedding.priority, embedding.num_remaining_tokens, embedding.order)


class Embedder:
    """Plans the inputs of each step, and processes their results.

    Args:
      engine: with the blocks.
      attempt_table: the attempts with leases.
      outbox: takes the EMBEDDED frames.
      counters: counters of tokens.
      config: how inputs are batched.
    """

    def __init__(
        self,
        engine: EnginePort,
        attempt_table: AttemptTable[PrefillAttempt | Embedding],
        outbox: Outbox,
        counters: Counters,
        config: EmbeddingConfig,
    ) -> None:
        self._engine = engine
        self._attempt_table = attempt_table
        self._outbox = outbox
        self._counters = counters
        self._config = config
        self._chunks: list[InputChunk] = []

    @property
    def waiting(self) -> list[Embedding]:
        """Inputs that are not computed yet."""
        attempts = self._attempt_table.attempts.values()
        return [attempt for attempt in attempts if isinstance(attempt, Embedding)]

    @property
    def due_at(self) -> float | None:
        """Time from which a step may include inputs; None if there are none."""
        return due_at(self.waiting, self._config)

    @property
    def keys(self) -> list[AttemptKey]:
        """Inputs in the running step."""
        return [chunk.embedding.key for chunk in self._chunks]

    @property
    def num_tokens(self) -> int:
        """Tokens of inputs in the running step."""
        return sum(chunk.num_tokens for chunk in self._chunks)

    def plan(self, max_tokens: int, now: float, *, is_beside_chat: bool) -> list[StepRow]:
        """Begin the inputs' part of the next step."""
        ledger, waiting = self._engine.ledger, self.waiting
        due = due_at(waiting, self._config)
        if due is None or due > now or max_tokens <= 0:
            return []
        room = StepRoom(max_tokens, ledger.available_blocks, ledger.total_blocks, is_beside_chat)
        self._chunks = plan_inputs(waiting, room, self._config)
        return [self._row(chunk, now) for chunk in self._chunks]

    def complete(self, now: float) -> None:
        """Process a finished step: hidden states are in the pools."""
        chunks, self._chunks = self._chunks, []
        for embedding, num_tokens in chunks:
            self._counters.computed_tokens += num_tokens
            if embedding.key not in self._attempt_table.attempts:
                self._counters.late_rows += 1
                continue  # it ended during the step
            embedding.num_computed_tokens += num_tokens
            if not embedding.num_remaining_tokens:
                self._finish(embedding, now)

    def fail(self, message: str, failed: FailedStep, now: float) -> None:
        """Process the failure of the step."""
        chunks, self._chunks = self._chunks, []
        for embedding, _ in chunks:
            self._attempt_table.end(embedding.key, EndReason.ERROR, now, message, failed)

    def _row(self, chunk: InputChunk, now: float) -> StepRow:
        embedding, num_tokens = chunk
        if not embedding.is_started:
            embedding.block_table = self._engine.ledger.lease(embedding.key, embedding.num_blocks)
            embedding.started_at = now
            self._attempt_table.leases.step(embedding.key, LeaseEvent.START)
        start = embedding.num_computed_tokens
        return StepRow(
            token_ids=embedding.prompt_ids[start : start + num_tokens],
            start=start,
            block_table=embedding.block_table,
            pool=embedding.pool,
            adapter=embedding.adapter,
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
        self._attempt_table.end(embedding.key, EndReason.EMBEDDED, now)

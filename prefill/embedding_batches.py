"""Which inputs for vectors the next step takes: dynamic batching.

Pure: inputs, room and time in, chunks out. A worker that is idle waits a moment for company, unless
a batch is full. A batch takes the shortest inputs first and none that is much longer than the
others, so that nobody's vector waits for somebody else's long text; the oldest always has a part,
so that short ones starve no long one. Chat prompts come first: while some wait, inputs get a small
share of each step, and never more than a part of the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.config import MAX_NUM_SEQS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triolet.config_embedding import EmbeddingConfig

    from .embedding import Embedding

SHARE_BESIDE_CHAT: Final = 8
"""One part in this many of a step is for inputs while prompts of chats wait: these lose an eighth
of their speed, and inputs always get on."""
OLDEST_SHARE: Final = 4
"""One part in this many of a batch is the oldest input's, as for prompts (worker/chunks.py)."""
MAX_RATIO: Final = 4
"""In one batch no input has more than this many times the tokens of its shortest one."""
SHORT_TOKENS: Final = 64
"""Inputs up to this length go together whatever their ratio: a step reads all weights anyway."""
POOL_SHARE: Final = 4
"""One part in this many of the pool's blocks may be inputs'; a longer one goes alone."""


class InputChunk(NamedTuple):
    """One row of a step.

    Attributes:
      embedding: whose input.
      num_tokens: how many of its next tokens.
    """

    embedding: Embedding
    num_tokens: int


class Room(NamedTuple):
    """What a step has for inputs.

    Attributes:
      max_tokens: of the step.
      free_blocks: that can be leased now.
      total_blocks: of the pool.
      is_beside_chat: the step has rows of chats too.
    """

    max_tokens: int
    free_blocks: int
    total_blocks: int
    is_beside_chat: bool


class StepTokens(NamedTuple):
    """How a step's tokens are parted.

    Attributes:
      prompts: at most so many are of chats' prompts.
      all: at most so many of prompts and inputs together.
    """

    prompts: int
    all: int


def part_tokens(narrow: int, wide: int, *, chats_wait: bool, inputs_are_due: bool) -> StepTokens:
    """Part a step between prompts of chats and inputs.

    Args:
      narrow: tokens of a step for which somebody waits with a chat.
      wide: of one that holds nothing but inputs.
      chats_wait: whether a prompt of a chat is here that is not computed, also if it cannot have a
        row at the moment.
      inputs_are_due: whether inputs may have rows.
    """
    if not chats_wait:
        return StepTokens(narrow, max(narrow, wide))
    share = narrow // SHARE_BESIDE_CHAT if inputs_are_due else 0
    return StepTokens(narrow - share, narrow)


def due_at(waiting: Sequence[Embedding], config: EmbeddingConfig) -> float | None:
    """Return from when on a step may take inputs; None if there is none.

    Args:
      waiting: all inputs that are not computed.
      config: how long to wait for company, and what a full batch is.
    """
    if not waiting:
        return None
    oldest = min(embedding.arrived_at for embedding in waiting)
    num_tokens = sum(embedding.num_remaining_tokens for embedding in waiting)
    is_full = num_tokens >= config.max_batch_tokens or len(waiting) >= MAX_NUM_SEQS
    is_begun = any(embedding.is_started for embedding in waiting)
    return oldest if is_full or is_begun else oldest + config.max_wait_s


def plan_inputs(
    waiting: Sequence[Embedding], room: Room, config: EmbeddingConfig
) -> list[InputChunk]:
    """Choose the inputs of the next step.

    Args:
      waiting: all inputs that are not computed.
      room: what the step has for them.
      config: how much a batch may hold.

    Returns:
      At most one chunk per input. In all at most the room, but for a last one that would not fit
      into any batch: one token over is better than never.
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


def _blocks_left(waiting: Sequence[Embedding], room: Room) -> int:
    held = sum(one.num_blocks for one in waiting if one.is_started)
    return min(room.free_blocks, room.total_blocks // POOL_SHARE - held)


def _holds_blocks(waiting: Sequence[Embedding]) -> bool:
    return any(embedding.is_started for embedding in waiting)


def _by_urgency(embedding: Embedding) -> tuple[int, int, int]:
    return (embedding.priority, embedding.num_remaining_tokens, embedding.order)

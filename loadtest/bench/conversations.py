"""Real conversations at the size of a small model: which prompts share which blocks, and what the
best possible cache of a size would find again.

Knows the form of the Mooncake trace (a JSON line per request; `hash_ids` names each 512-token block
of its prompt by all that stands before and in it) and arithmetic; knows no server. One block of the
trace becomes one block of the pool, so hit rates stay what they were.
"""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

TRACE_BLOCK_TOKENS: Final = 512
FIRST_TOKEN_ID: Final = 300
"""Ids below may be special."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Attributes:
      conversation: names all requests that begin with the same two blocks.
      block_ids: of its prompt, the last one perhaps not full.
      prompt_tokens: scaled.
      output_tokens: scaled.
    """

    conversation: int
    block_ids: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int

    def prompt(self, block_size: int, vocab_size: int) -> list[int]:
        """Return token ids in which equal blocks are equal and others are not."""
        tokens = [t for block in self.block_ids for t in tokens_of(block, block_size, vocab_size)]
        return tokens[: self.prompt_tokens]


@cache
def tokens_of(block_id: int, block_size: int, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens of a block of the trace."""
    rng = random.Random(f"block {block_id}")
    return tuple(rng.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(block_size))


def read_turns(trace: Path, block_size: int, every: int) -> list[Turn]:
    """Return the turns of one conversation in so many, in the order in which they came.

    Whole conversations are taken, so that of each turn the earlier ones are there; with fewer of
    them in between, a smaller pool stands where a larger one stood.
    """
    turns = []
    with trace.open(encoding="utf-8") as lines:
        for line in lines:
            fields = json.loads(line)
            block_ids = tuple(fields["hash_ids"])
            conversation = block_ids[min(1, len(block_ids) - 1)]
            if zlib.crc32(str(conversation).encode()) % every:
                continue
            turns.append(
                Turn(
                    conversation,
                    block_ids,
                    max(1, fields["input_length"] * block_size // TRACE_BLOCK_TOKENS),
                    max(1, fields["output_length"] * block_size // TRACE_BLOCK_TOKENS),
                )
            )
    return turns


def ideal_hit_rate(turns: Iterable[Turn], num_blocks: int, block_size: int) -> float:
    """Return which share of all prompt tokens a cache of `num_blocks` finds if one request comes
    after the other: least recently used blocks give way, the end of a prompt before its beginning,
    and the last token of a prompt is always computed."""
    recent: dict[int, None] = {}
    num_queried = num_hit = 0
    for turn in turns:
        full = turn.block_ids[: turn.prompt_tokens // block_size]
        num_queried += turn.prompt_tokens
        num_hit += block_size * _num_leading(
            recent, turn.block_ids[: (turn.prompt_tokens - 1) // block_size]
        )
        for block in reversed(full):
            recent.pop(block, None)
            recent[block] = None
        while len(recent) > num_blocks:
            del recent[next(iter(recent))]
    return num_hit / num_queried


def most_held_blocks(turns: Iterable[Turn], at_once: int, block_size: int) -> int:
    """Return how many blocks the prompts of that many requests need at most while they run."""
    sizes = sorted(-(-turn.prompt_tokens // block_size) for turn in turns)
    return sum(sizes[-at_once:])


def _num_leading(known: dict[int, None], block_ids: Sequence[int]) -> int:
    for index, block in enumerate(block_ids):
        if block not in known:
            return index
    return len(block_ids)

"""Walks through a compiled grammar, which find out before a request is queued what a worker would
find out after some tens of its tokens: that masks cost too much.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.grammar import GrammarTooCostly

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triolet.grammar import LLMatcher, LLTokenizer

WALKS: Final = ("first", "longest", "any")
"""How each walk chooses its tokens. Long ones make many rows of a parse at once, the first ones, by
their ids, are the short ones of most vocabularies."""
LONGEST_OF: Final = 16
"""Allowed tokens of which the longest is taken."""


class WalkBounds(NamedTuple):
    """What walks may take.

    Attributes:
      num_tokens: of each walk.
      mask_cpu_s: of processor time for one mask; what takes longer is too costly.
      cpu_s: for all walks, which stop there.
    """

    num_tokens: int
    mask_cpu_s: float
    cpu_s: float


def walk(
    tokenizer: LLTokenizer, matcher: LLMatcher, eos_token_ids: Sequence[int], bounds: WalkBounds
) -> None:
    """Follow a grammar through some of its texts, by turns, the same ones each time.

    Args:
      tokenizer: of the matcher.
      matcher: before the first token; not changed.
      eos_token_ids: the model's end tokens, which no walk takes.
      bounds: when to stop.

    Raises:
      GrammarTooCostly: one mask takes too long, or too much of what the library counts.
    """
    began_s = time.thread_time()
    walks = [
        _Walk(tokenizer, matcher.deep_copy(), eos_token_ids, how, random.Random(seed))
        for seed, how in enumerate(WALKS)
    ]
    for position in range(bounds.num_tokens):
        for one in walks:
            token_s = one.go()
            if token_s > bounds.mask_cpu_s:
                raise GrammarTooCostly(f"token {position} takes {token_s * 1000:.0f} ms")
            if time.thread_time() - began_s > bounds.cpu_s:
                return


class _Walk:
    """One of the walks."""

    def __init__(
        self,
        tokenizer: LLTokenizer,
        matcher: LLMatcher,
        eos_token_ids: Sequence[int],
        how: str,
        chance: random.Random,
    ) -> None:
        self._tokenizer = tokenizer
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._how = how
        self._chance = chance
        self._is_over = False

    def go(self) -> float:
        """Go on by a token; return the processor time [s] that it took, 0 behind the end."""
        if self._is_over:
            return 0.0
        began_s = time.thread_time()
        mask = bytearray(self._matcher.compute_bitmask())
        for end in self._eos_token_ids:
            if end < len(mask) * 8:
                mask[end // 8] &= ~(1 << end % 8)
        if not self._matcher.is_error():
            token_id = self._choose(bytes(mask))
            if token_id is not None:
                self._matcher.consume_token(token_id)
            self._is_over = token_id is None or self._matcher.is_stopped()
        if self._matcher.is_error():
            raise GrammarTooCostly(" ".join(self._matcher.get_error().split())[:120])
        return time.thread_time() - began_s

    def _choose(self, mask: bytes) -> int | None:
        match self._how:
            case "first":
                return next_token(mask, 0)
            case "longest":
                some = {self._any(mask) for _ in range(LONGEST_OF)} - {None}
                return max(some, key=self._length, default=None)
            case _:
                return self._any(mask)

    def _any(self, mask: bytes) -> int | None:
        return next_token(mask, self._chance.randrange(len(mask) * 8))

    def _length(self, token_id: int | None) -> tuple[int, int]:
        assert token_id is not None, "only tokens are compared"
        return len(self._tokenizer.decode_bytes([token_id])), token_id


def next_token(mask: bytes, start: int) -> int | None:
    """Return the first token of a mask of bits at or behind `start`, else the first of all; None if
    there is none."""
    place = start // 8
    behind = mask[place] >> start % 8 << start % 8
    if not behind:
        rest = mask[place + 1 :].lstrip(b"\0")
        if not rest:
            rest = mask.lstrip(b"\0")
        if not rest:
            return None
        # Counted from the end: what was cut off stands before it.
        place, behind = len(mask) - len(rest), rest[0]
    return place * 8 + (behind & -behind).bit_length() - 1

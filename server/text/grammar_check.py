"""Compiles a grammar and walks through it, which finds out before a request is queued what a worker
would find out after some tens of its tokens: that masks cost too much. Runs in a text process.
"""

from __future__ import annotations

import random
import time
from enum import IntEnum
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from store.model_dir.bounded import read_text
from triolet.config import GrammarConfig
from triolet.errors import ModelError
from triolet.grammar import (
    GrammarError,
    GrammarTooCostly,
    LLMatcher,
    LLTokenizer,
    build_tokenizer,
    compile_grammar,
)
from triolet.sampling import Grammar, GrammarKind

from .isolated import limit_cpu, run_isolated
from .process import job

if TYPE_CHECKING:
    from collections.abc import Sequence


WALKS: Final = ("first", "longest", "any")
"""How each walk chooses its tokens. Long ones make many rows of a parse at once, the first ones, by
their ids, are the short ones of most vocabularies."""
LONGEST_OF: Final = 16
"""Allowed tokens of which the longest is taken."""


def walk(
    tokenizer: LLTokenizer, matcher: LLMatcher, eos_token_ids: Sequence[int], bounds: GrammarConfig
) -> None:
    """Follow a grammar through some of its texts, by turns, the same ones each time.

    Args:
      tokenizer: of the matcher.
      matcher: before the first token; not changed.
      eos_token_ids: the model's end tokens, which no walk takes.
      bounds: of walks: when to stop.

    Raises:
      GrammarTooCostly: one mask takes too long, or too much of what the library counts.
    """
    began_s = time.thread_time()
    walks = [
        _Walk(tokenizer, matcher.deep_copy(), eos_token_ids, how, random.Random(seed))
        for seed, how in enumerate(WALKS)
    ]
    for position in range(bounds.walk_tokens):
        for one in walks:
            token_s = one.go()
            if token_s > bounds.walk_mask_cpu_s:
                raise GrammarTooCostly(f"token {position} takes {token_s * 1000:.0f} ms")
            if time.thread_time() - began_s > bounds.walk_cpu_s:
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


MAX_ANSWER_BYTES: Final = 4096
MAX_TOKENIZERS: Final = 8
"""That are kept, each of some tens of megabytes: of the models used last."""


class GrammarAnswer(IntEnum):
    """What becomes of a grammar; the first byte of what its child process says."""

    USABLE = 0
    REFUSED = 1
    TOO_COSTLY = 2


@lru_cache(maxsize=MAX_TOKENIZERS)
def tokenizer_of(path: str, life: str, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """Return a model's tokenizer as grammars need it, read once by this process."""
    del life  # tells files apart that came to the same path
    return build_tokenizer(read_text(Path(path)), eos_token_ids)


@job
def check_grammar(
    path: str,
    life: str,
    eos_token_ids: Sequence[int],
    config: dict[str, Any],
    kind: str,
    text: str,
) -> tuple[GrammarAnswer, str]:
    """Compile a grammar and follow it for a while, in a child process that may be ended.

    Args:
      path: of the model's tokenizer.json.
      life: of the model in the server, made up.
      eos_token_ids: the model's end tokens.
      config: a GrammarConfig.
      kind: of the grammar.
      text: the grammar.

    Returns:
      What becomes of it, and a message.
    """
    bounds = msgspec.convert(config, GrammarConfig)
    grammar = Grammar(GrammarKind(kind), text)
    try:
        tokenizer = tokenizer_of(path, life, tuple(eos_token_ids))
    except (GrammarError, ModelError) as error:
        return GrammarAnswer.REFUSED, str(error)
    answer = run_isolated(
        partial(_verdict, tokenizer, grammar, eos_token_ids, bounds),
        cpu_s=bounds.cpu_s,
        memory_bytes=bounds.memory_bytes,
        max_bytes=MAX_ANSWER_BYTES,
    )
    if not answer:
        return GrammarAnswer.TOO_COSTLY, ""
    return GrammarAnswer(answer[0]), answer[1:].decode(errors="replace")


def _verdict(
    tokenizer: LLTokenizer, grammar: Grammar, eos_token_ids: Sequence[int], bounds: GrammarConfig
) -> bytes:
    try:
        matcher = compile_grammar(tokenizer, grammar)
        mask = matcher.compute_bitmask()
        if any(mask) and not matcher.is_error():
            # One mask of the walks may go on when their time is up.
            limit_cpu(bounds.walk_cpu_s + bounds.walk_mask_cpu_s)
            walk(tokenizer, matcher, eos_token_ids, bounds)
    except GrammarTooCostly as error:
        return bytes([GrammarAnswer.TOO_COSTLY]) + f"is too costly to follow: {error}".encode()
    except (GrammarError, MemoryError) as error:
        return bytes([GrammarAnswer.REFUSED]) + str(error).encode()
    is_impossible = matcher.stop_reason() in ("NoExtension", "NoExtensionBias")
    if matcher.is_error() and not is_impossible:
        return bytes([GrammarAnswer.TOO_COSTLY])
    if is_impossible or not any(mask):
        return bytes([GrammarAnswer.REFUSED]) + b"it allows no completion"
    return bytes([GrammarAnswer.USABLE])

"""Compiles a grammar and walks through it before its request is queued, to find masks that are too
costly for workers. Runs in a text process.
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
"""How each walk chooses tokens. Long tokens create many parser rows at once; the first ids are the
short tokens of most vocabularies."""
LONGEST_OF: Final = 16
"""Number of allowed tokens to take the longest from."""


def walk(
    tokenizer: LLTokenizer, matcher: LLMatcher, eos_token_ids: Sequence[int], bounds: GrammarConfig
) -> None:
    """Follow a grammar through sample texts, the same ones each time, in alternating walks.

    Args:
      tokenizer: the matcher's tokenizer.
      matcher: matcher in its initial state; not modified.
      eos_token_ids: the model's end tokens, which no walk takes.
      bounds: limits of the walks.

    Raises:
      GrammarTooCostly: a mask takes too long, or exceeds a limit of the library.
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
    """One walk through a grammar."""

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
        """Advance by one token; return the CPU time [s] it took, 0 after the end."""
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
    """Return the first token in a bit mask at or after `start`, else the first of all; None if the
    mask is empty."""
    place = start // 8
    behind = mask[place] >> start % 8 << start % 8
    if not behind:
        rest = mask[place + 1 :].lstrip(b"\0")
        if not rest:
            rest = mask.lstrip(b"\0")
        if not rest:
            return None
        # Counted from the end, because the mask was cut at its start.
        place, behind = len(mask) - len(rest), rest[0]
    return place * 8 + (behind & -behind).bit_length() - 1


MAX_ANSWER_BYTES: Final = 4096
MAX_TOKENIZERS: Final = 8
"""Maximum number of cached tokenizers, each of some tens of megabytes; the least recent is
dropped."""


class GrammarAnswer(IntEnum):
    """The result of a check; the first byte of the child process's output."""

    USABLE = 0
    REFUSED = 1
    TOO_COSTLY = 2


@lru_cache(maxsize=MAX_TOKENIZERS)
def tokenizer_of(path: str, life: str, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """Return a model's tokenizer for grammars, cached in this process."""
    del life  # part of the cache key: another model may reuse the path
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
    """Compile a grammar and follow it for a while, in a child process with limits.

    Args:
      path: path of the model's tokenizer.json.
      life: random id of the model in the server.
      eos_token_ids: the model's end tokens.
      config: a GrammarConfig's fields.
      kind: the grammar's kind.
      text: the grammar.

    Returns:
      The result and a message.
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
            # One mask of a walk may run past the walks' time limit.
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

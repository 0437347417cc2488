"""What completions have to be: grammars compiled, and followed token by token.

A matcher is a function of (grammar, tokens so far); what it remembers only saves time, so that an
attempt that begins again elsewhere, with its tokens replayed, goes on exactly. Nothing here runs on
the thread that decides nor on the device's: grammars are compiled in one thread, so that none holds
up a step, and masks are computed in another, while the device computes.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import numpy as np
import structlog

from triolet.grammar import GrammarError, build_tokenizer, compile_grammar

from .batch import Mask

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from triolet.grammar import LLMatcher, LLTokenizer
    from triolet.sampling import Grammar

log = structlog.get_logger()

MAX_COMPILED: Final = 64
"""Grammars that are kept compiled for the next request: clients send the same ones again."""


class Constraints:
    """The grammars of one worker.

    Args:
      tokenizer_path: the model's tokenizer.json; missing or unusable, nothing can be constrained.
      vocab_size: ids of the model are below this.
      eos_token_ids: the model's own end tokens.
    """

    def __init__(
        self, tokenizer_path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._tokenizer_path = tokenizer_path
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._compiling = ThreadPoolExecutor(1, "grammars")
        self._masking = ThreadPoolExecutor(1, "masks")
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._tokenizer: Future[LLTokenizer] | None = None

    def prepare(self) -> None:
        """Begin to read the tokenizer, so that the first request does not wait for it, and start
        both threads, so that an audit finds as many after it as before."""
        if self._tokenizer is None and self._tokenizer_path.exists():
            self._tokenizer = self._compiling.submit(self._read_tokenizer)
            self._masking.submit(int)

    def constrain(self, grammar: Grammar) -> GrammarConstraint:
        """Return what keeps one sequence within a grammar, which is compiled meanwhile."""
        self.prepare()
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = self._compiling.submit(self._compile, grammar)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return GrammarConstraint(compiled, self._masking, self._vocab_size)

    def _read_tokenizer(self) -> LLTokenizer:
        text = self._tokenizer_path.read_text(encoding="utf-8")
        return build_tokenizer(text, self._eos_token_ids, self._vocab_size)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if self._tokenizer is None:
            raise GrammarError(f"{self._tokenizer_path} is missing")
        return compile_grammar(self._tokenizer.result(), grammar)


class GrammarConstraint:
    """One sequence's place in its grammar (engine.batch.Constraint).

    Args:
      compiled: the grammar's matcher, at its beginning; not to be moved.
      masking: the thread in which everything else happens.
      vocab_size: length of masks.
    """

    def __init__(
        self, compiled: Future[LLMatcher], masking: ThreadPoolExecutor, vocab_size: int
    ) -> None:
        self._compiled = compiled
        self._masking = masking
        self._vocab_size = vocab_size
        self._matcher: LLMatcher | None = None
        self._followed: list[int] = []

    def begin(self, output_ids: Sequence[int]) -> Future[Mask | None]:
        """Begin to find out what may follow; the tokens are read at once."""
        return self._masking.submit(self._mask, list(output_ids))

    def _mask(self, output_ids: list[int]) -> Mask | None:
        try:
            matcher = self._follow(output_ids)
        except (GrammarError, OSError) as error:
            log.warning("grammar_unusable", error=str(error))
            return None
        if matcher is None:
            return None
        packed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            log.warning("grammar_too_costly", reason=matcher.stop_reason())
            self._matcher = None
            return None
        bits = np.unpackbits(packed, bitorder="little").astype(np.bool_)
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        count = min(len(bits), self._vocab_size)
        allowed[:count] = bits[:count]
        may_end = bool(matcher.is_accepting())
        return Mask(allowed, may_end) if may_end or allowed.any() else None

    def _follow(self, output_ids: list[int]) -> LLMatcher | None:
        """Return the matcher behind these tokens; None if the grammar does not allow them."""
        matcher = self._matcher
        if matcher is None:
            matcher, self._followed = self._compiled.result().deep_copy(), []
        num_common = _num_common(self._followed, output_ids)
        num_wrong = len(self._followed) - num_common
        # Guesses that did not hold.
        if num_wrong and not matcher.rollback(num_wrong):
            matcher, num_common = self._compiled.result().deep_copy(), 0
        ahead = output_ids[num_common:]
        num_taken = matcher.try_consume_tokens(ahead) if ahead else 0
        self._matcher, self._followed = matcher, output_ids[: num_common + num_taken]
        if matcher.is_error():
            self._matcher = None
            return None
        return matcher if num_taken == len(ahead) else None


def _num_common(first: list[int], second: list[int]) -> int:
    """Return how many leading tokens are the same."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next(i for i in range(shorter) if first[i] != second[i])

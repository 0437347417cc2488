"""Compile grammars with llguidance into matchers, which return the tokens that may come next.

The only file that uses llguidance. The server compiles a client's grammar first, in a process that
may be killed. Workers compile it later with the same limits, so both get the same result.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from llguidance import LLExecutor, LLParserLimits
from llguidance import LLMatcher as LLMatcher
from llguidance import LLTokenizer as LLTokenizer

from .sampling import JSON_WHITESPACE, GrammarKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .sampling import Grammar

LIMITS: Final = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,  # 20 ms
    step_lexer_fuel=100_000,  # 7 ms, for one token
    step_max_items=5_000,
    max_lexer_states=20_000,  # about 40 MB
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""What one grammar may cost, in the library's units. These count work, not time: a sequence ends at
the same token on every worker.

`step_max_items`: a row of n items costs up to n² comparisons, so time is not linear in it. With
50,000 an ambiguous grammar of 80 bytes took 0.8 s for one mask; 5,000 end it after about 10 tokens,
at 2 ms. Measured needs, four walks of 60 tokens each: random schemas (loadtest/schemas.py) 100 with
a vocabulary of 2,048 tokens and 200 with one of 65,000; recursive ones, SQL and Python statements
up to 2,000; `anyOf` of 150 objects 5,000; only objects of more than 100 optional properties more.
`step_lexer_fuel`: real formats and patterns take up to 50,000."""
PARAMETERS_OF_JSON: Final = "x-guidance"


class GrammarError(Exception):
    """A grammar cannot be used; the message says why."""


class GrammarTooCostly(GrammarError):
    """A grammar takes too long to compile or to evaluate."""


def build_tokenizer(
    tokenizer_json: str, eos_token_ids: Sequence[int], vocab_size: int | None = None
) -> LLTokenizer:
    """Return a model's vocabulary in the form that matchers need. Takes up to a second.

    Args:
      tokenizer_json: content of that file.
      eos_token_ids: the model's end tokens, allowed where a grammar may end.
      vocab_size: vocabulary size of the model, if it has more ids than its tokenizer.

    Raises:
      GrammarError: the library does not support this kind of tokenizer.
    """
    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except (ValueError, TypeError, RuntimeError) as error:
        raise GrammarError(f"the model's tokenizer cannot be used: {str(error)[:200]}") from error


class Follower:
    """Advances a matcher by one token without blocking the other threads of the process.

    `try_consume_tokens` holds the interpreter's lock, in a costly place as long as a mask takes: up
    to 10 ms. The library releases the lock only when it advances several matchers at once, so we
    add one that has already failed, which costs nothing.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._executor = LLExecutor(num_threads=1)
        self._failed = LLMatcher(tokenizer, "", log_level=0)

    def follow(self, matcher: LLMatcher, token_id: int) -> None:
        """Advance past a token that the matcher's last mask allows."""
        self._executor.consume_token_par([(matcher, token_id), (self._failed, token_id)])


def compile_grammar(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Compile a grammar into a matcher before its first token.

    Raises:
      GrammarError: the grammar is invalid; the message says why in one line.
    """
    try:
        source = _source(grammar)
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error)[:200]) from error
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarError(" ".join(matcher.get_error().split())[:200])
    return matcher


def _source(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            schema = json.loads(grammar.text)
            if isinstance(schema, dict):
                # Clients do not decide how JSON is written, and `lenient` would silently ignore
                # what the library does not support.
                schema.pop(PARAMETERS_OF_JSON, None)
            else:
                schema = {"allOf": [schema]}
            return LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_pattern": JSON_WHITESPACE}
            )
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)

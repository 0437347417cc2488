"""Sampling parameters of a request, with their bounds.

A sampled token depends only on (seed, position, logits), so that a retry on another worker
continues exactly. The seed is therefore always set here, at random if the client gave none. The API
and the frame parser check the bounds.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKEN_IDS = 64
MAX_MARKER_TOKENS = 16
"""Maximum tokens of a reasoning marker. The longest in use, harmony's, has six."""
MAX_CLOSINGS = 4
MAX_GRAMMAR_CHARS = 64 * 1024
"""Clients' grammars have a tighter limit; all tools of a request make one grammar."""
JSON_WHITESPACE = " ?"
"""Whitespace allowed between JSON tokens in a grammar, as a regular expression. It costs tokens,
and a completion with unlimited blanks need not end."""
MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_FACTOR = 1e6
MIN_PENALTY = 0.01
"""Smallest repetition penalty: a smaller divisor could make a logit infinite."""
"""Far above every useful temperature, penalty or bias; excludes infinity and NaN."""


def new_seed() -> int:
    """Return a random seed for a request without one."""
    return secrets.randbelow(MAX_SEED)


class GrammarKind(StrEnum):
    """The language of a grammar."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on a completion. Compiled by triolet/grammar.py.

    Attributes:
      kind: language of `text`.
      text: a JSON Schema, a regular expression for the whole completion, or a Lark grammar.
    """

    kind: GrammarKind
    text: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


MarkerIds = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0)], ...],
    msgspec.Meta(min_length=1, max_length=MAX_MARKER_TOKENS),
]


@dataclass(frozen=True, slots=True)
class ReasoningTokens:
    """Where a completion's reasoning ends and its answer begins, as a function of its tokens alone.

    Attributes:
      closings: markers; the first that occurs ends the reasoning.
      forced: tokens that end it once the budget is spent; they end with a closing.
      opening: token that begins it; a completion that does not start with it is all answer. None if
        the prompt ends within reasoning.
      budget: most tokens of reasoning, without markers; None for no limit.
      is_in_grammar: the grammar covers the whole completion including reasoning, and there is no
        budget.
    """

    closings: Annotated[tuple[MarkerIds, ...], msgspec.Meta(min_length=1, max_length=MAX_CLOSINGS)]
    forced: MarkerIds
    opening: Annotated[int, msgspec.Meta(ge=0)] | None = None
    budget: Annotated[int, msgspec.Meta(ge=0)] | None = None
    is_in_grammar: bool = False

    @property
    def first(self) -> int:
        """Index of the first reasoning token in a completion that has any."""
        return 0 if self.opening is None else 1

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All token ids in the markers."""
        opening = () if self.opening is None else (self.opening,)
        return (*opening, *self.forced, *(i for closing in self.closings for i in closing))

    def begins_with(self, token_ids: Sequence[int]) -> bool:
        """Return whether a completion begins with reasoning."""
        return self.opening is None or (bool(token_ids) and token_ids[0] == self.opening)

    def closing_behind(self, token_ids: Sequence[int], begin: int = 0) -> tuple[int, int] | None:
        """Return the begin and end of the first closing at or after `begin`."""
        found = [
            place
            for closing in self.closings
            if (place := _place(token_ids, closing, max(begin, self.first))) is not None
        ]
        return min(found, default=None)

    def closes(self, token_ids: Sequence[int]) -> bool:
        """Return whether a completion ends with a closing."""
        return any(
            len(token_ids) >= self.first + len(closing)
            and tuple(token_ids[-len(closing) :]) == closing
            for closing in self.closings
        )

    def forced_next(self, token_ids: Sequence[int]) -> int | None:
        """Return the only token that may follow the reasoning so far; None if any may.

        Args:
          token_ids: token ids of a completion that is still within its reasoning.
        """
        if self.budget is None or len(token_ids) < self.first + self.budget:
            return None
        end = self.first + self.budget
        rest = self._begun_closing(token_ids[self.first : end]) or self.forced
        num_done = len(token_ids) - end
        return rest[num_done] if num_done < len(rest) else None

    def num_reasoning(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens of a completion are reasoning, without markers."""
        if not self.begins_with(token_ids):
            return 0
        closing = self.closing_behind(token_ids)
        end = len(token_ids) if closing is None else closing[0]
        num_tokens = end - self.first
        return num_tokens if self.budget is None else min(num_tokens, self.budget)

    def _begun_closing(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the rest of a closing that the last tokens have begun."""
        for closing in self.closings:
            for length in range(min(len(closing) - 1, len(token_ids)), 0, -1):
                if tuple(token_ids[-length:]) == closing[:length]:
                    return closing[length:]
        return ()


def _place(token_ids: Sequence[int], marker: tuple[int, ...], begin: int) -> tuple[int, int] | None:
    """Return the begin and end of a marker's first occurrence."""
    while True:
        try:
            begin = token_ids.index(marker[0], begin)
        except ValueError:
            return None
        end = begin + len(marker)
        if tuple(token_ids[begin:end]) == marker:
            return begin, end
        begin += 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Everything that determines the next token and the end of the sequence, except stop strings.

    Attributes:
      max_tokens: most completion tokens, at least 1.
      min_tokens: no end-of-sequence and no stop token before this many tokens.
      temperature: 0 is greedy.
      top_p: nucleus mass in (0, 1]; 1 is off.
      top_k: 0 is off.
      min_p: share of the best token's probability, in [0, 1]; 0 is off.
      presence_penalty: subtracted once for a token that the completion has, [-2, 2].
      frequency_penalty: subtracted per occurrence in the completion, [-2, 2].
      repetition_penalty: divides (multiplies, if negative) the logits of tokens in prompt or
        completion; 1 is off.
      logit_bias: (token id, bias) pairs, added to the logits.
      seed: 63 bits; with the position it keys the counter-based generator.
      stop_token_ids: end the sequence; the token itself is not shown.
      ignore_eos: the model's end tokens do not end the sequence.
      logprobs: None for none, else the number of alternatives to report (0…20).
      grammar: constraint on the completion; None for none. The sequence ends where the grammar
      ends,
        even with `ignore_eos`, and before `min_tokens` if nothing else may follow.
      reasoning: what precedes the answer; the grammar applies only to the answer. None for nothing.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 16
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    temperature: Annotated[float, msgspec.Meta(ge=0, le=MAX_FACTOR)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_K)] = 0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(ge=MIN_PENALTY, le=MAX_FACTOR)] = 1.0
    logit_bias: Annotated[
        tuple[tuple[int, Annotated[float, msgspec.Meta(ge=-MAX_FACTOR, le=MAX_FACTOR)]], ...],
        msgspec.Meta(max_length=MAX_LOGIT_BIAS),
    ] = ()
    seed: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEED)] = field(default_factory=new_seed)
    stop_token_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    grammar: Grammar | None = None
    reasoning: ReasoningTokens | None = None

    @property
    def is_constrained(self) -> bool:
        """Whether earlier tokens restrict the next one."""
        reasoning = self.reasoning
        return self.grammar is not None or (reasoning is not None and reasoning.budget is not None)

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def end_token_ids(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    """Return the ids that end a sequence under these parameters."""
    ignores_eos = params.ignore_eos and params.grammar is None
    return frozenset(params.stop_token_ids + (() if ignores_eos else eos_token_ids))


def first_end(params: SamplingParams) -> int:
    """Return the first completion position at which an end token ends the sequence.

    Before `min_tokens` the sampler chooses none, unless the grammar allows nothing else.
    """
    return params.min_tokens if params.grammar is None else 0


def is_end_token(
    params: SamplingParams, eos_token_ids: tuple[int, ...], position: int, token_id: int
) -> bool:
    """Return whether this token at this completion position ends the sequence with `stop`.

    The sampler chooses none too early; the check is repeated because server and decode decide
    independently and must agree.
    """
    return position >= first_end(params) and token_id in end_token_ids(params, eos_token_ids)

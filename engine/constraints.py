"""Constrained decoding: compile grammars, follow them token by token, and compute token masks.

A matcher is a function of (grammar, tokens so far), and its state is only a cache. A retry on
another worker that replays the tokens therefore continues exactly. Grammars are compiled in one
thread and masks are computed in others (mask_lanes.py), so neither the event loop nor the device
thread waits for them. Two bounds limit the cost: limits of the library (triolet/grammar.py), which
end a sequence at the same token on every machine, and processor time, after which a sequence fails.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import structlog

from store.model_dir.bounded import read_text
from triolet.config import MaskConfig
from triolet.grammar import (
    Follower,
    GrammarError,
    GrammarTooCostly,
    build_tokenizer,
    compile_grammar,
)
from triolet.sampling import MAX_MARKER_TOKENS

from .batch import AllBut, Barred, FollowedBy, Mask
from .mask_lanes import Lane, Lanes, thread_clock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from triolet.grammar import LLMatcher, LLTokenizer
    from triolet.sampling import Grammar, ReasoningTokens, SamplingParams

    from .batch import Constraint, PendingMask

log = structlog.get_logger()

MAX_COMPILED: Final = 64
"""Compiled grammars that are cached: clients repeat the same ones."""
READ_AFTER_S: Final = 1.0
"""Delay from a worker's start until it reads the tokenizer, which only grammars need. Reading takes
50 ms of a core while the first request may be waiting. An earlier grammar starts it at once."""
REPLAYED_TOKENS: Final = 16
"""Tokens followed between two readings of the clock."""


class Constraints:
    """The grammars of one worker.

    Args:
      tokenizer_path: the model's tokenizer.json; if it is missing or unusable, grammars fail.
      vocab_size: size of the model's vocabulary.
      eos_token_ids: the model's end tokens.
      config: bounds.
      new_clock: returns the calling thread's clock of processor time.
    """

    def __init__(
        self,
        tokenizer_path: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        config: MaskConfig | None = None,
        new_clock: Callable[[], Callable[[], float]] = thread_clock,
    ) -> None:
        self._tokenizer_path = tokenizer_path
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._compiling = ThreadPoolExecutor(1, "grammars")
        self._config = MaskConfig() if config is None else config
        self._new_clock = new_clock
        self._lanes = Lanes(self._config, new_clock)
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._tokenizer: Future[LLTokenizer] | None = None
        self._follower: Future[Follower] = Future()
        self._is_wanted = threading.Event()

    def prepare(self) -> None:
        """Schedule reading the tokenizer, so that no request waits for it, and start all threads,
        so that an audit counts the same number before and after the first grammar."""
        if self._tokenizer is None and self._tokenizer_path.exists():
            tokenizer = self._tokenizer = self._compiling.submit(self._read_tokenizer)
            self._follower = self._compiling.submit(lambda: Follower(tokenizer.result()))
            self._lanes.prepare()

    def constrain(self, grammar: Grammar) -> GrammarConstraint:
        """Return a constraint for one sequence, and start compiling its grammar."""
        self.prepare()
        self._is_wanted.set()
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = self._compiling.submit(self._compile, grammar)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return GrammarConstraint(
            compiled, self._follower, self._lanes, self._vocab_size, self._config
        )

    def constraint_of(self, sampling: SamplingParams) -> Constraint | None:
        """Return the constraint for a sequence's grammar and reasoning budget, or None."""
        answer = None if sampling.grammar is None else self.constrain(sampling.grammar)
        reasoning = sampling.reasoning
        if reasoning is None or not sampling.is_constrained:
            return answer
        if reasoning.is_in_grammar and answer is not None:
            return answer
        return ReasoningConstraint(reasoning, answer, self._vocab_size, self._eos_token_ids)

    def _read_tokenizer(self) -> LLTokenizer:
        self._is_wanted.wait(READ_AFTER_S)
        text = read_text(self._tokenizer_path)
        return build_tokenizer(text, self._eos_token_ids, self._vocab_size)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if self._tokenizer is None:
            raise GrammarError(f"{self._tokenizer_path} is missing")
        tokenizer = self._tokenizer.result()
        clock = self._new_clock()
        began_s = clock()
        matcher = compile_grammar(tokenizer, grammar)
        if clock() - began_s > self._config.compile_cpu_s:
            raise GrammarTooCostly(f"it did not compile within {self._config.compile_cpu_s} s")
        return matcher


class _Begun(NamedTuple):
    """A requested mask.

    Attributes:
      output_ids: the completion that the mask follows.
      mask: the result.
      lane: the lane that computes it.
      generation: the lane's generation at the request.
    """

    output_ids: list[int]
    mask: Future[Mask | Barred]
    lane: Lane
    generation: int

    @property
    def is_good(self) -> bool:
        """Whether the mask is ready or still being computed."""
        if self.mask.done():
            return self.mask.result() is not Barred.LATE
        return self.generation == self.lane.generation


class _Computed(NamedTuple):
    """The last mask of a sequence.

    Attributes:
      num_tokens: number of completion tokens before it.
      mask: the mask.
      cpu_s: processor time of the mask and of following the tokens before it.
    """

    num_tokens: int
    mask: Mask
    cpu_s: float


class GrammarConstraint:
    """One sequence's position in its grammar (engine.batch.Constraint).

    Args:
      compiled: the grammar's matcher at its beginning; copied, never advanced.
      follower: advances matchers; available once a grammar is compiled.
      lanes: threads that compute masks.
      vocab_size: length of masks.
      config: bounds.

    Attributes:
      is_slow: whether a mask took so long that other rows should not wait for the next ones.
    """

    def __init__(
        self,
        compiled: Future[LLMatcher],
        follower: Future[Follower],
        lanes: Lanes,
        vocab_size: int,
        config: MaskConfig,
    ) -> None:
        self._compiled = compiled
        self._follower = follower
        self._lanes = lanes
        self._vocab_size = vocab_size
        self._config = config
        self._matcher: LLMatcher | None = None
        self._followed: list[int] = []
        self._last: _Computed | None = None
        # A replaced thread may still use the matcher when its successor starts.
        self._turn = threading.Lock()
        self._spent_s = 0.0
        self.is_slow = False
        self._is_condemned = False
        self._begun: dict[int, _Begun] = {}

    @property
    def is_awaited(self) -> bool:
        """Whether a slow mask is not there yet."""
        return self.is_slow and not all(begun.mask.done() for begun in self._begun.values())

    def begin(self, output_ids: Sequence[int]) -> Future[Mask | Barred]:
        """Begin to find out what may follow; the tokens are read at once."""
        token_ids = list(output_ids)
        # Earlier tokens are final, unless this row is a guess: the row before it may still wait for
        # its mask and request it again with the next step.
        if not isinstance(output_ids, FollowedBy):
            self._begun = {n: begun for n, begun in self._begun.items() if n >= len(token_ids)}
        begun = self._begun.get(len(token_ids))
        if begun is None or begun.output_ids != token_ids or not begun.is_good:
            begun = self._begun[len(token_ids)] = self._begin(token_ids)
        return begun.mask

    def late(self) -> Barred:
        """Return what becomes of a row without a mask in time."""
        self._lanes.quick.relieve()
        self._lanes.slow.relieve()
        return Barred.TOO_COSTLY if self._is_condemned else Barred.LATE

    def condemn(self) -> None:
        """Compute no more masks: one takes longer than any may."""
        self._is_condemned = True

    def compute(self, output_ids: list[int], clock: Callable[[], float]) -> Mask | Barred:
        """Return the mask after some tokens. Called on a lane's thread."""
        with self._turn:
            if self._is_condemned:
                return Barred.TOO_COSTLY
            began_s = clock()
            mask = self._mask(output_ids, lambda: clock() - began_s)
            mask_s = clock() - began_s
            self._spent_s += mask_s
            if isinstance(mask, Mask):
                self._last = _Computed(len(output_ids), mask, mask_s)
        self.is_slow |= mask_s > self._config.slow_mask_cpu_s
        allowed_s = self._config.burst_cpu_s + self._config.token_cpu_s * len(output_ids)
        if mask_s > self._config.mask_cpu_s or self._spent_s > allowed_s:
            self.condemn()
            return self._too_costly(f"{mask_s:.3f} s, {self._spent_s:.3f} s in all")
        return mask

    def _begin(self, token_ids: list[int]) -> _Begun:
        lane = self._lanes.slow if self.is_slow else self._lanes.quick
        if self._compiled.done():
            return _Begun(token_ids, lane.submit(self, token_ids), lane, lane.generation)
        # It must not wait inside a lane, where it would block others.
        mask: Future[Mask | Barred] = Future()
        self._compiled.add_done_callback(lambda _: self._pass_on(lane, token_ids, mask))
        return _Begun(token_ids, mask, lane, lane.generation)

    def _pass_on(self, lane: Lane, token_ids: list[int], mask: Future[Mask | Barred]) -> None:
        lane.submit(self, token_ids).add_done_callback(partial(_copy, mask))

    def _mask(self, output_ids: list[int], spent_s: Callable[[], float]) -> Mask | Barred:
        try:
            matcher = self._follow(output_ids, spent_s)
        except GrammarTooCostly as error:
            return self._too_costly(str(error))
        except (GrammarError, OSError) as error:
            log.warning("grammar_unusable", error=str(error))
            return Barred.STUCK
        if isinstance(matcher, Barred):
            return matcher
        packed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            return self._too_costly(matcher.get_error())
        bits = np.unpackbits(packed, bitorder="little").astype(np.bool_)
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        count = min(len(bits), self._vocab_size)
        allowed[:count] = bits[:count]
        may_end = bool(matcher.is_accepting())
        return Mask(allowed, may_end) if may_end or allowed.any() else Barred.STUCK

    def _follow(self, output_ids: list[int], spent_s: Callable[[], float]) -> LLMatcher | Barred:
        """Return the matcher advanced past these tokens."""
        matcher = self._matcher
        if matcher is None:
            matcher, self._followed, self._last = self._compiled.result().deep_copy(), [], None
        num_common = _num_common(self._followed, output_ids)
        num_wrong = len(self._followed) - num_common
        # Rejected guesses.
        if num_wrong and not matcher.rollback(num_wrong):
            matcher, num_common = self._compiled.result().deep_copy(), 0
        if num_wrong:
            self._last = None
        self._matcher, self._followed = matcher, output_ids[:num_common]
        while len(self._followed) < len(output_ids):
            ahead = output_ids[len(self._followed) :][:REPLAYED_TOKENS]
            num_taken = self._take_one(matcher, ahead) or matcher.try_consume_tokens(ahead)
            self._followed += ahead[:num_taken]
            if matcher.is_error():
                return self._too_costly(matcher.get_error())
            if num_taken == 0:
                return Barred.STUCK
            if spent_s() > self._config.replay_cpu_s:
                return Barred.LATE
        return matcher

    def _take_one(self, matcher: LLMatcher, ahead: list[int]) -> int:
        """Follow a single token, if the mask before it took long and allows it, without holding
        the interpreter's lock; return how many were followed."""
        last, token_id = self._last, ahead[0]
        if not self.is_slow or len(ahead) > 1:
            return 0
        if last is None or last.num_tokens != len(self._followed):
            return 0
        if not last.mask.allowed[token_id]:
            return 0
        began_at = time.monotonic()
        self._follower.result().follow(matcher, token_id)
        # It runs in the library's thread. The mask before it, whose search includes this token,
        # says what it can take of a processor at most.
        self._spent_s += min(time.monotonic() - began_at, last.cpu_s)
        return 1

    def _too_costly(self, reason: str) -> Barred:
        # A limit of the library ends this row only: after a wrong guess it says nothing about the
        # right tokens.
        log.warning("grammar_too_costly", reason=" ".join(reason.split())[:200])
        self._matcher = None
        return Barred.TOO_COSTLY


class ReasoningConstraint:
    """One sequence's position in its reasoning and then in its answer's grammar.

    Reasoning is limited by its budget only. If the answer has a grammar, an answer must follow. The
    position is a function of the tokens, so a retry on another worker continues exactly.

    Args:
      reasoning: markers and budget of reasoning.
      answer: constraint of the answer; None allows anything.
      vocab_size: length of masks.
      eos_token_ids: the model's end tokens.
    """

    def __init__(
        self,
        reasoning: ReasoningTokens,
        answer: GrammarConstraint | None,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._reasoning = reasoning
        self._answer = answer
        self._vocab_size = vocab_size
        # Within reasoning anything may follow, but no end if an answer has to.
        ends = tuple(i for i in eos_token_ids if i < vocab_size)
        self._unended = None if answer is None else AllBut(ends)
        # Decided tokens without a closing, so that a long reasoning is not searched for each.
        self._num_searched = 0
        self._answer_at: int | None = None

    @property
    def is_slow(self) -> bool:
        """Whether its masks take so long that other rows should not wait for them."""
        return self._answer is not None and self._answer.is_slow

    @property
    def is_awaited(self) -> bool:
        """Whether a slow mask is not there yet."""
        return self._answer is not None and self._answer.is_awaited

    def begin(self, output_ids: Sequence[int]) -> PendingMask:
        """Begin to find out what may follow the completion so far."""
        reasoning = self._reasoning
        if not output_ids and reasoning.opening is not None:
            return self._at_start(reasoning.opening)
        answer_at = self._find_answer(output_ids)
        if answer_at is not None:
            return self._of_answer(output_ids, answer_at)
        forced = reasoning.forced_next(output_ids)
        if forced is not None:
            return _known(self._only(forced))
        return _known(self._unended)

    def late(self) -> Barred:
        """Return the outcome of a row without a mask in time."""
        return Barred.LATE if self._answer is None else self._answer.late()

    def _find_answer(self, output_ids: Sequence[int]) -> int | None:
        """Return the index of the answer's first token; None within reasoning."""
        if self._answer_at is not None:
            return self._answer_at
        if not self._reasoning.begins_with(output_ids):
            found: int | None = 0
        else:
            closing = self._reasoning.closing_behind(output_ids, self._num_searched)
            found = None if closing is None else closing[1]
        # Guessed tokens may be rejected later.
        if not isinstance(output_ids, FollowedBy) and output_ids:
            self._answer_at = found
            # The last tokens may be the start of a closing marker.
            self._num_searched = max(0, len(output_ids) - MAX_MARKER_TOKENS)
        return found

    def _at_start(self, opening: int) -> PendingMask:
        """Return the mask of the first tokens: the opening marker of reasoning, or an answer."""
        if self._reasoning.budget == 0:
            if self._answer is None:
                return _known(AllBut((opening,)))
            return self._of_answer([])
        if self._answer is None:
            return _known(None)
        either: Future[Mask | Barred] = Future()
        self._answer.begin([]).add_done_callback(partial(_copy_with, either, opening))
        return either

    def _of_answer(self, output_ids: Sequence[int], answer_at: int = 0) -> PendingMask:
        token_ids: Sequence[int] = output_ids[answer_at:]
        if isinstance(output_ids, FollowedBy):
            token_ids = FollowedBy(token_ids, ())
        return _known(None) if self._answer is None else self._answer.begin(token_ids)

    def _only(self, token_id: int) -> Mask:
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        allowed[token_id] = True
        return Mask(allowed, may_end=False)


def _known(mask: Mask | AllBut | None) -> Future[Mask | AllBut | None]:
    """Return a completed future."""
    future: Future[Mask | AllBut | None] = Future()
    future.set_result(mask)
    return future


def _copy_with(into: Future[Mask | Barred], token_id: int, source: Future[Mask | Barred]) -> None:
    """Copy another future's result and allow one more token."""
    if source.exception() is None and isinstance(mask := source.result(), Mask):
        allowed = mask.allowed.copy()
        allowed[token_id] = True
        into.set_result(Mask(allowed, mask.may_end))
    else:
        _copy(into, source)


def _copy(into: Future[Mask | Barred], source: Future[Mask | Barred]) -> None:
    """Copy another future's result."""
    error = source.exception()
    if error is None:
        into.set_result(source.result())
    else:
        into.set_exception(error)


def _num_common(first: list[int], second: list[int]) -> int:
    """Return the length of the common prefix."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next(i for i in range(shorter) if first[i] != second[i])

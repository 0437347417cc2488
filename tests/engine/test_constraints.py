"""Tests of grammar-constrained decoding: token masks follow the grammar, also after rejected
guesses and replays, and the sampler obeys them."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.batch import Barred, FollowedBy, Mask, SampleSpec
from engine.constraints import REPLAYED_TOKENS, Constraints, GrammarConstraint
from engine.sampler import sample
from loadtest.schemas import AMBIGUOUS
from triolet.config import MaskConfig
from triolet.sampling import Grammar, GrammarKind, SamplingParams, is_end_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triolet.grammar import Follower, LLMatcher

DEMO = Path(__file__).parents[2] / "triolet" / "demo"
VOCAB_SIZE = 2048
EOS = (1,)
PATIENCE_S = 60.0
"""For what takes a fraction of a second on a machine that has nothing else to do."""
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
SCHEMA = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string"}, "tags": {"type": "array"}},
            "required": ["name", "tags"],
            "additionalProperties": False,
        }
    ),
)
TEXT = '{"name": "Åse\\n", "tags": [1, {"a": null}, "x y z"]}'
FORWARDS = Grammar(GrammarKind.REGEX, "ab+")


@pytest.fixture(scope="module")
def constraints() -> Constraints:
    return Constraints(DEMO / "tokenizer.json", VOCAB_SIZE, EOS)


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def mask_after(constraints: Constraints, grammar: Grammar, ids: list[int]) -> Mask | Barred:
    """Return the mask of a fresh matcher."""
    constraint = constraints.constrain(grammar)
    assert constraint is not None
    return constraint.begin(ids).result()


def same(first: Mask | Barred, second: Mask | Barred) -> bool:
    if isinstance(first, Barred) or isinstance(second, Barred):
        return first is second
    return first.may_end == second.may_end and bool((first.allowed == second.allowed).all())


def test_a_valid_text_is_allowed_token_by_token_and_may_end_only_at_its_end(
    constraints: Constraints,
) -> None:
    constraint = constraints.constrain(SCHEMA)
    assert constraint is not None
    ids = ids_of(TEXT)
    for position, token_id in enumerate(ids):
        mask = constraint.begin(ids[:position]).result()
        assert isinstance(mask, Mask)
        assert mask.allowed[token_id]
        assert not mask.may_end
    last = constraint.begin(ids).result()
    assert isinstance(last, Mask)
    assert last.may_end


def test_wrong_guesses_leave_nothing_behind(constraints: Constraints) -> None:
    constraint = constraints.constrain(SCHEMA)
    assert constraint is not None
    ids = ids_of(TEXT)
    chance = np.random.default_rng(5)
    for position in range(0, len(ids), 3):
        guesses = ids[position : position + 4]
        if chance.random() < 0.5:
            guesses[int(chance.integers(len(guesses)))] = int(chance.integers(VOCAB_SIZE))
        for count in range(len(guesses) + 1):
            known = ids[:position] + guesses[:count]
            found = constraint.begin(known).result()
            assert same(found, mask_after(constraints, SCHEMA, known)), known


def test_a_sequence_that_begins_again_goes_on_with_the_same_masks(
    constraints: Constraints,
) -> None:
    constraint = constraints.constrain(SCHEMA)
    assert constraint is not None
    ids = ids_of(TEXT)
    for position in range(len(ids)):
        followed = constraint.begin(ids[:position]).result()
        assert same(followed, mask_after(constraints, SCHEMA, ids[:position]))


def test_what_the_grammar_does_not_allow_is_stuck_and_spoils_no_other(
    constraints: Constraints,
) -> None:
    constraint = constraints.constrain(FORWARDS)
    other = constraints.constrain(FORWARDS)
    assert constraint is not None
    assert other is not None
    assert constraint.begin(ids_of("zz")).result() is Barred.STUCK
    assert same(other.begin([]).result(), constraint.begin([]).result())


def test_a_directory_without_tokenizer_constrains_nothing(tmp_path: Path) -> None:
    constraint = Constraints(tmp_path / "tokenizer.json", VOCAB_SIZE, EOS).constrain(FORWARDS)
    assert constraint.begin([]).result() is Barred.STUCK


def spec(
    constraints: Constraints, text: str, grammar: Grammar = FORWARDS, **changes: object
) -> SampleSpec:
    params = SamplingParams(temperature=0.0, grammar=grammar, **changes)  # type: ignore[arg-type]
    ids = ids_of(text)
    return SampleSpec(params, len(ids), (), ids, EOS, constraints.constrain(grammar))


def logits(*rows: dict[int, float]) -> torch.Tensor:
    values = torch.zeros(len(rows), VOCAB_SIZE)
    for values_of_row, row in zip(values, rows, strict=True):
        for token_id, value in row.items():
            values_of_row[token_id] = value
    return values


def test_the_best_token_that_is_allowed_is_chosen_beside_rows_that_may_say_anything(
    constraints: Constraints,
) -> None:
    a, b, z = (ids_of(letter)[0] for letter in "abz")
    best = {z: 9.0, a: 1.0, b: 2.0}
    free = SampleSpec(SamplingParams(temperature=0.0), 0, (), (), EOS)
    specs = [free, spec(constraints, ""), free, spec(constraints, "ab")]
    chosen = sample(logits(*[best] * 4), specs)
    assert [one.token_id for one in chosen] == [z, a, z, b]


def test_bias_does_not_lift_what_is_forbidden(constraints: Constraints) -> None:
    a, z = (ids_of(letter)[0] for letter in "az")
    [chosen] = sample(
        logits({a: 1.0}), [spec(constraints, "", logit_bias=((z, 100.0), (a, -100.0)))]
    )
    assert chosen.token_id in {a, ids_of("ab")[0]}


def test_reported_logprobs_are_the_models_own(constraints: Constraints) -> None:
    a, z = (ids_of(letter)[0] for letter in "az")
    free = SampleSpec(SamplingParams(temperature=0.0, logprobs=2), 0, (), (), EOS)
    bound, unbound = sample(
        logits({z: 9.0, a: 8.0}, {z: 9.0, a: 8.0}),
        [spec(constraints, "", logprobs=2), free],
    )
    assert (bound.token_id, unbound.token_id) == (a, z)
    assert bound.top == unbound.top
    assert bound.logprob == bound.top[1][1]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_where_a_grammar_ends_the_sequence_ends(constraints: Constraints, ignore_eos: bool) -> None:
    grammar = Grammar(GrammarKind.REGEX, "ab")
    at_end = spec(constraints, "ab", grammar, ignore_eos=ignore_eos, min_tokens=50)
    [chosen] = sample(logits({ids_of("z")[0]: 9.0}), [at_end])
    assert chosen.token_id in EOS
    assert is_end_token(at_end.params, EOS, at_end.position, chosen.token_id)


def test_where_it_may_go_on_it_does_until_min_tokens(constraints: Constraints) -> None:
    b = ids_of("b")[0]
    hurried = [spec(constraints, "ab", min_tokens=5), spec(constraints, "ab", min_tokens=1)]
    chosen = sample(logits(*[{EOS[0]: 9.0, b: 1.0}] * 2), hurried)
    assert [one.token_id for one in chosen] == [b, EOS[0]]


def test_a_row_whose_grammar_leaves_nothing_says_so_alone(constraints: Constraints) -> None:
    z = ids_of("z")[0]
    free = SampleSpec(SamplingParams(temperature=0.0), 0, (), (), EOS)
    stuck, other = sample(logits({z: 9.0}, {z: 9.0}), [spec(constraints, "z"), free])
    assert stuck.barred is Barred.STUCK
    assert (other.token_id, other.barred) == (z, None)


class Clock:
    """A processor clock that the test advances."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.now_s = 0.0
        self._step_s = step_s

    def __call__(self) -> float:
        self.now_s += self._step_s
        return self.now_s


def opened(clock: Clock | None = None, **bounds: float) -> Constraints:
    """Return constraints. Without `clock` they measure a processor time of 0."""
    clock = Clock() if clock is None else clock
    config = MaskConfig(**bounds)  # type: ignore[arg-type]
    return Constraints(DEMO / "tokenizer.json", VOCAB_SIZE, EOS, config, lambda: clock)


class Held:
    """A matcher that computes its next mask when the test releases it."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.has_begun = threading.Event()
        self.let_go = threading.Event()

    def deep_copy(self) -> Held:
        return self

    def compute_bitmask(self) -> bytes:
        self.has_begun.set()
        assert self.let_go.wait(PATIENCE_S)
        return bytes(self._matcher.compute_bitmask())

    def __getattr__(self, name: str) -> object:
        return getattr(self._matcher, name)


def hold_next_mask(constraint: GrammarConstraint) -> Held:
    """Make a constraint's masks wait from now on."""
    held = Held(constraint._compiled.result().deep_copy())
    constraint._compiled = Future()
    constraint._compiled.set_result(held)  # type: ignore[arg-type]
    constraint._matcher = None
    return held


def test_a_mask_that_takes_too_long_ends_its_sequence_and_holds_up_no_other() -> None:
    clock = Clock()
    constraints = opened(clock)
    other = constraints.constrain(FORWARDS)
    expected = other.begin([]).result()
    costly = constraints.constrain(FORWARDS)
    assert isinstance(costly.begin([]).result(), Mask)
    held = hold_next_mask(costly)
    begun = costly.begin(ids_of("a"))
    assert held.has_begun.wait(PATIENCE_S)
    behind = other.begin(ids_of("a"))
    clock.now_s += MaskConfig().mask_cpu_s
    assert costly.late() is Barred.LATE, "it has taken as long as it may, and no longer"
    clock.now_s += 0.001
    assert costly.late() is Barred.TOO_COSTLY
    # Masks queued behind it were requested again from another thread.
    again = other.begin(ids_of("a"))
    assert isinstance(again.result(), Mask)
    assert same(other.begin([]).result(), expected)
    held.let_go.set()
    assert begun.result() is Barred.TOO_COSTLY
    assert (behind is again, behind.result()) == (False, Barred.LATE)
    assert costly.begin(ids_of("a")).result() is Barred.TOO_COSTLY


def test_a_sequence_has_so_much_time_for_all_its_masks() -> None:
    ids = ids_of(TEXT)

    def masks(clock: Clock) -> list[Mask | Barred]:
        constraint = opened(clock, mask_cpu_s=9.0, replay_cpu_s=9.0).constrain(SCHEMA)
        return [constraint.begin(ids[:position]).result() for position in range(len(ids))]

    assert Barred.TOO_COSTLY not in masks(Clock())
    # A mask takes two or more clock readings, which exceeds a token's budget.
    spent = masks(Clock(step_s=MaskConfig().burst_cpu_s / 8))
    first = spent.index(Barred.TOO_COSTLY)
    assert first > 1
    assert set(spent[first:]) == {Barred.TOO_COSTLY}


def test_a_grammar_that_takes_too_long_to_compile_is_too_costly() -> None:
    slow = Clock(step_s=MaskConfig().compile_cpu_s + 0.001)
    assert opened(slow).constrain(SCHEMA).begin([]).result() is Barred.TOO_COSTLY


def test_a_bound_of_the_library_ends_the_row_alone() -> None:
    constraint = opened().constrain(Grammar(GrammarKind.LARK, f"start: s\n{AMBIGUOUS}"))
    a = ids_of("a")
    assert isinstance(constraint.begin(a).result(), Mask)
    guessed = constraint.begin(a * 30).result()
    assert guessed is Barred.TOO_COSTLY
    assert isinstance(constraint.begin(a * 2).result(), Mask), "behind what a wrong guess was"


def test_a_long_replay_is_followed_by_turns() -> None:
    turn = Clock(step_s=MaskConfig().replay_cpu_s + 0.001)
    constraint = opened(turn, mask_cpu_s=9.0, burst_cpu_s=9.0).constrain(SCHEMA)
    constraint.begin([]).result()
    ids = ids_of(TEXT)
    found: list[Mask | Barred] = []
    while not found or found[-1] is Barred.LATE:
        found.append(constraint.begin(ids[:-1]).result())
    assert len(found) == -(-len(ids[:-1]) // REPLAYED_TOKENS) + 1
    assert same(found[-1], opened().constrain(SCHEMA).begin(ids[:-1]).result())


class Never(NamedTuple):
    """A constraint that never has its mask ready."""

    verdict: Barred
    is_slow: bool = False
    is_awaited: bool = False

    def begin(self, output_ids: Sequence[int]) -> Future[Mask | Barred]:
        return Future()

    def late(self) -> Barred:
        return self.verdict


@pytest.mark.parametrize("verdict", [Barred.LATE, Barred.TOO_COSTLY])
def test_a_row_whose_mask_does_not_come_is_left_out_alone(verdict: Barred) -> None:
    z = ids_of("z")[0]
    params = SamplingParams(temperature=0.0, grammar=FORWARDS)
    free = SampleSpec(SamplingParams(temperature=0.0), 0, (), (), EOS)
    for is_slow, waits in ((False, (0.0, 3600.0)), (True, (3600.0, 0.0))):
        bound = SampleSpec(params, 0, (), (), EOS, Never(verdict, is_slow))
        chosen = sample(logits(*[{z: 9.0}] * 3), [free, bound, free], None, *waits)
        assert [one.barred for one in chosen] == [None, verdict, None]
        assert [chosen[0].token_id, chosen[2].token_id] == [z, z]


def test_a_sequence_is_slow_from_its_first_slow_mask_on() -> None:
    clock = Clock(step_s=MaskConfig().slow_mask_cpu_s)
    constraint = opened(clock).constrain(FORWARDS)
    assert not constraint.is_slow
    assert isinstance(constraint.begin([]).result(), Mask)
    assert (constraint.is_slow, constraint.is_awaited) == (False, False)
    assert isinstance(constraint.begin(ids_of("a")).result(), Mask)
    assert (constraint.is_slow, constraint.is_awaited) == (True, False)


def test_a_slow_mask_is_awaited_until_it_is_there() -> None:
    clock = Clock(step_s=MaskConfig().slow_mask_cpu_s + 0.001)
    constraint = opened(clock).constrain(FORWARDS)
    constraint.begin([]).result()
    held = hold_next_mask(constraint)
    begun = constraint.begin(ids_of("a"))
    assert constraint.is_awaited
    held.let_go.set()
    assert isinstance(begun.result(), Mask)
    assert not constraint.is_awaited


def test_a_row_that_waits_keeps_its_mask_while_a_guess_behind_it_asks() -> None:
    constraint = opened().constrain(FORWARDS)
    decided = ids_of("a")
    begun, guessed = constraint.begin(decided), constraint.begin(FollowedBy(decided, decided))
    assert constraint.begin(decided) is begun
    assert constraint.begin(FollowedBy(decided, decided)) is guessed
    constraint.begin([*decided, *decided])
    assert constraint.begin(decided) is not begun, "what is decided is forgotten"


def test_with_as_many_stragglers_as_may_be_a_thread_is_not_replaced() -> None:
    clock = Clock()
    constraints = opened(clock, max_stragglers=0)
    costly, other = constraints.constrain(FORWARDS), constraints.constrain(FORWARDS)
    assert isinstance(costly.begin([]).result(), Mask)
    held = hold_next_mask(costly)
    begun, behind = costly.begin(ids_of("a")), other.begin([])
    assert held.has_begun.wait(PATIENCE_S)
    clock.now_s += MaskConfig().mask_cpu_s + 0.001
    assert costly.late() is Barred.TOO_COSTLY
    held.let_go.set()
    assert begun.result() is Barred.TOO_COSTLY
    assert isinstance(behind.result(), Mask), "it waited for its turn"


class Watched:
    """A matcher that counts tokens followed under the interpreter's lock."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.locked: list[list[int]] = []

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        self.locked.append(token_ids)
        return int(self.matcher.try_consume_tokens(token_ids))

    def __getattr__(self, name: str) -> object:
        return getattr(self.matcher, name)


class FollowerOfWatched:
    """A real follower, for watched matchers."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def follow(self, watched: Watched, token_id: int) -> None:
        self._follower.follow(watched.matcher, token_id)


def test_a_slow_sequence_follows_allowed_tokens_without_the_interpreters_lock() -> None:
    # Each clock reading costs more than a quick mask.
    clock = Clock(step_s=MaskConfig().slow_mask_cpu_s + 0.001)
    constraint = opened(clock, burst_cpu_s=9.0).constrain(SCHEMA)
    assert isinstance(constraint.begin([]).result(), Mask)
    assert constraint._matcher is not None
    watched = Watched(constraint._matcher)
    follower: Future[FollowerOfWatched] = Future()
    follower.set_result(FollowerOfWatched(constraint._follower.result()))
    constraint._matcher, constraint._follower = watched, follower  # type: ignore[assignment]
    ids = ids_of(TEXT)
    for length in range(1, 12):
        mask = constraint.begin(ids[:length]).result()
        assert same(mask, mask_after(opened(), SCHEMA, ids[:length]))
    assert watched.locked == []
    # A forbidden token, such as a wrong guess, leaves the matcher usable.
    assert isinstance(mask, Mask)
    forbidden = int(np.flatnonzero(~mask.allowed)[0])
    assert constraint.begin([*ids[:11], forbidden]).result() is Barred.STUCK
    assert watched.locked == [[forbidden]]
    assert isinstance(constraint.begin(ids[:12]).result(), Mask)

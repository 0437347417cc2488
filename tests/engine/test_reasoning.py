"""Tests of reasoning in constrained decoding: the budget limits only the reasoning, and the grammar
applies only to the answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
from tokenizers import Tokenizer

from engine.batch import AllBut, Barred, FollowedBy, Mask, SampleSpec, check_request, is_plain
from engine.constraints import Constraints
from engine.sampler import sample
from triolet.errors import RequestError
from triolet.sampling import Grammar, GrammarKind, ReasoningTokens, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.batch import Constraint

DEMO = Path(__file__).parents[2] / "triolet" / "demo"
VOCAB_SIZE = 2048
EOS = 1
OPEN, CLOSE = 2040, 2041
THINK = ReasoningTokens(closings=((CLOSE,),), forced=(CLOSE,), opening=OPEN)
INSIDE = replace(THINK, opening=None)
START, CHANNEL, MESSAGE, END, ANALYSIS, FINAL, COMMENTARY = range(2000, 2007)
HARMONY = ReasoningTokens(
    closings=((CHANNEL, FINAL, MESSAGE), (CHANNEL, COMMENTARY)),
    forced=(END, START, CHANNEL, FINAL, MESSAGE),
)
FORWARDS = Grammar(GrammarKind.REGEX, "ab+")
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
A, B, Z = (TOKENIZER.encode(letter, add_special_tokens=False).ids[0] for letter in "abz")


@pytest.fixture(scope="module")
def constraints() -> Constraints:
    return Constraints(DEMO / "tokenizer.json", VOCAB_SIZE, (EOS,))


def params(reasoning: ReasoningTokens, *, has_grammar: bool = True) -> SamplingParams:
    grammar = FORWARDS if has_grammar else None
    return SamplingParams(temperature=0.0, grammar=grammar, reasoning=reasoning)


def constraint_of(constraints: Constraints, sampling: SamplingParams) -> Constraint:
    constraint = constraints.constraint_of(sampling)
    assert constraint is not None
    return constraint


def allowed(constraint: Constraint, ids: Sequence[int]) -> set[int] | None:
    """Return which of a few tokens may follow; None if there is no mask."""
    mask = constraint.begin(ids).result()
    if mask is None:
        return None
    shown = (EOS, OPEN, CLOSE, A, B, Z)
    if isinstance(mask, AllBut):
        return set(shown) - set(mask.token_ids)
    assert isinstance(mask, Mask)
    assert not (mask.allowed[EOS] and not mask.may_end)
    return {i for i in shown if mask.allowed[i]}


def test_the_grammar_begins_behind_the_closing(constraints: Constraints) -> None:
    constraint = constraint_of(constraints, params(INSIDE))
    free = {OPEN, CLOSE, A, B, Z}
    assert allowed(constraint, []) == free, "no end: an answer has to follow"
    assert allowed(constraint, [Z, Z, B]) == free
    assert allowed(constraint, [Z, CLOSE]) == {A}
    assert allowed(constraint, [Z, CLOSE, A]) == {B}
    assert allowed(constraint, [Z, CLOSE, A, B]) == {EOS, B}


def test_a_completion_may_begin_with_reasoning_or_with_its_answer(constraints: Constraints) -> None:
    assert allowed(constraint_of(constraints, params(THINK)), []) == {OPEN, A}
    constraint = constraint_of(constraints, params(THINK))
    assert allowed(constraint, [A]) == {B}, "there is no reasoning"
    constraint = constraint_of(constraints, params(THINK))
    assert allowed(constraint, [OPEN]) == {OPEN, CLOSE, A, B, Z}
    assert allowed(constraint, [OPEN, Z, CLOSE]) == {A}


@pytest.mark.parametrize("reasoning", [THINK, INSIDE])
def test_an_attempt_that_begins_again_anywhere_goes_on_exactly(
    constraints: Constraints, reasoning: ReasoningTokens
) -> None:
    sampling = params(replace(reasoning, budget=5))
    ids = [OPEN] if reasoning.opening else []
    ids += [Z, A, Z, B, Z, CLOSE, A, B, B]
    whole = constraint_of(constraints, sampling)
    for length in range(len(ids)):
        expected = allowed(whole, ids[:length])
        again = constraint_of(constraints, sampling)
        assert allowed(again, ids[:length]) == expected
        assert expected is not None
        assert ids[length] in expected


def test_a_budget_forces_the_closing_and_then_the_answer(constraints: Constraints) -> None:
    constraint = constraint_of(constraints, params(replace(THINK, budget=2)))
    assert allowed(constraint, [OPEN, Z]) == {OPEN, CLOSE, A, B, Z}
    assert allowed(constraint, [OPEN, Z, Z]) == {CLOSE}
    assert allowed(constraint, [OPEN, Z, Z, CLOSE]) == {A}
    free = constraint_of(constraints, params(replace(THINK, budget=2), has_grammar=False))
    assert allowed(free, []) is None
    assert allowed(free, [OPEN, Z]) is None
    assert allowed(free, [OPEN, Z, Z]) == {CLOSE}
    assert allowed(free, [OPEN, Z, Z, CLOSE]) is None


def test_without_a_budget_there_is_no_reasoning(constraints: Constraints) -> None:
    none = replace(THINK, budget=0)
    assert allowed(constraint_of(constraints, params(none)), []) == {A}
    free = constraint_of(constraints, params(none, has_grammar=False))
    assert allowed(free, []) == {EOS, CLOSE, A, B, Z}
    assert allowed(free, [Z]) is None
    opened = constraint_of(constraints, params(replace(INSIDE, budget=0)))
    assert allowed(opened, []) == {CLOSE}


def test_a_wrong_guess_of_the_closing_decides_nothing(constraints: Constraints) -> None:
    constraint = constraint_of(constraints, params(INSIDE))
    decided = [Z] * 40
    assert allowed(constraint, FollowedBy(decided, [CLOSE])) == {A}
    assert allowed(constraint, decided) == {OPEN, CLOSE, A, B, Z}
    assert allowed(constraint, FollowedBy([*decided, Z], [CLOSE, A])) == {B}
    assert allowed(constraint, [*decided, Z, CLOSE]) == {A}


def test_the_sampler_follows(constraints: Constraints) -> None:
    sampling = params(replace(INSIDE, budget=3))
    constraint = constraint_of(constraints, sampling)
    ids: list[int] = []
    while len(ids) < 7:
        logits = torch.zeros(4, VOCAB_SIZE)
        logits[:, EOS], logits[:, Z] = 9.0, 8.0
        spec = SampleSpec(sampling, len(ids), (), list(ids), (EOS,), constraint)
        (chosen,) = sample(logits, [spec])
        assert chosen.barred is None
        ids.append(chosen.token_id)
    assert ids == [Z, Z, Z, CLOSE, A, B, EOS]


def test_a_marker_of_several_tokens_is_forced_and_found() -> None:
    budgeted = replace(HARMONY, budget=4)
    thinking = [CHANNEL, ANALYSIS, MESSAGE, Z]
    for done in range(len(HARMONY.forced)):
        ids = thinking + list(HARMONY.forced[:done])
        assert budgeted.closing_behind(ids) is None
        assert budgeted.forced_next(ids) == HARMONY.forced[done]
    ids = thinking + list(HARMONY.forced)
    assert budgeted.closing_behind(ids) == (6, 9)
    assert budgeted.num_reasoning([*ids, A, B]) == 4


def test_a_closing_that_has_begun_is_ended_rather_than_begun_again() -> None:
    budgeted = replace(HARMONY, budget=4)
    ids = [Z, Z, CHANNEL, FINAL]
    assert budgeted.forced_next(ids) == MESSAGE
    assert budgeted.closing_behind([*ids, MESSAGE]) == (2, 5)
    assert HARMONY.closing_behind([CHANNEL, COMMENTARY, Z]) == (0, 2)


def test_reasoning_is_counted_without_its_markers() -> None:
    assert THINK.num_reasoning([]) == 0
    assert THINK.num_reasoning([A, CLOSE, B]) == 0
    assert THINK.num_reasoning([OPEN, A, B]) == 2, "cut within it"
    assert THINK.num_reasoning([OPEN, A, B, CLOSE, A]) == 2
    assert INSIDE.num_reasoning([A, B, Z, CLOSE, CLOSE, A]) == 3


def test_only_what_binds_tokens_costs_the_fast_path() -> None:
    free = SamplingParams(reasoning=THINK)
    assert is_plain(free, 0)
    assert not is_plain(replace(free, reasoning=replace(THINK, budget=9)), 0)


def test_a_stuck_answer_is_said_to_be_stuck(constraints: Constraints) -> None:
    constraint = constraint_of(constraints, params(INSIDE))
    assert constraint.begin([CLOSE, Z]).result() is Barred.STUCK


def test_markers_that_the_model_does_not_have_are_refused() -> None:
    check_request(VOCAB_SIZE, (1,), params(THINK))
    with pytest.raises(RequestError, match="name token 2041"):
        check_request(CLOSE, (1,), params(THINK))


@pytest.mark.parametrize(
    "wrong",
    [
        {"closings": [], "forced": [1]},
        {"closings": [[]], "forced": [1]},
        {"closings": [[1]], "forced": []},
        {"closings": [[1]], "forced": [1], "budget": -1},
        {"closings": [[1]] * 9, "forced": [1]},
        {"closings": [[1] * 99], "forced": [1]},
        {"closings": [[-1]], "forced": [1]},
        {"closings": [[1]], "forced": [1], "opening": -1},
    ],
)
def test_what_comes_over_the_wire_is_bounded(wrong: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"reasoning": wrong}, SamplingParams)

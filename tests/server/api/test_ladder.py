"""Tests of the ladder behind `model: auto`: each rule for choosing a model, one at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.ladder import NEAREST, AskedModel, Choice, Reason, Rung, Size, choose
from transport.control_protocol import ModelState
from triolet.config import WakePolicy
from triolet.errors import RequestError

SMALL, MIDDLE, LARGE = Rung("small", 100), Rung("middle", 200), Rung("large", 400)
LADDER = (SMALL, MIDDLE, LARGE)
IF_NEEDED, ALWAYS = WakePolicy.IF_NEEDED, WakePolicy.ALWAYS


def chosen(asked: AskedModel, *rungs: Rung, wake: WakePolicy = IF_NEEDED) -> tuple[str, Reason]:
    return tuple(choose(rungs or LADDER, asked, wake))  # type: ignore[return-value]


def of_size(prompt: int, completion: int | None = None, most: int | None = None) -> AskedModel:
    """Return a request with the same number of tokens on each model."""
    size = Size(prompt, completion, most)
    return AskedModel(unasked_tokens=50, sizes={rung.model: size for rung in LADDER})


def asleep(rung: Rung, state: ModelState = ModelState.SLEEPING) -> Rung:
    return replace(rung, state=state)


@pytest.mark.parametrize(
    ("asked", "model"),
    [
        (of_size(60, 40), "small"),
        (of_size(61, 40), "middle"),
        (of_size(60, 341), None),
        (of_size(161, 40), "large"),
        (of_size(50), "small"),
        (of_size(51), "middle"),  # 50 tokens are assumed for the completion
        (of_size(91, None, 9), "small"),  # limited to 9
        (of_size(92, None, 9), "middle"),
        (of_size(399), "large"),  # a short completion is better than none
        (of_size(400), None),
    ],
)
def test_prompt_and_completion_fit(asked: AskedModel, model: str | None) -> None:
    if model is None:
        with pytest.raises(RequestError) as refused:
            chosen(asked)
        assert refused.value.code == "context_length_exceeded"
        assert "400 tokens, of large" in refused.value.message
        return
    reason = Reason.SMALLEST if model == "small" else Reason.CONTEXT
    assert chosen(asked) == (model, reason)


BY_TOKENIZER = {"small": Size(150, 10), "middle": Size(195, 10)}
TIGHT = AskedModel(unasked_tokens=500, sizes={"small": Size(80), "large": Size(80)})
NO_TOOLS = (replace(SMALL, takes_tools=False), MIDDLE)
NO_FORMS = (replace(SMALL, takes_forms=False), MIDDLE)
TOOLS, FORM = AskedModel(has_tools=True), AskedModel(has_form=True)
SLEEPY = ModelState.SLEEPING, ModelState.STAGED, ModelState.DRAINING, ModelState.LOADING
RULES: list[tuple[str, AskedModel, tuple[Rung, ...], tuple[str, Reason]]] = [
    ("the smallest that takes all", AskedModel(), LADDER, ("small", Reason.SMALLEST)),
    ("and has room", of_size(10, 10), LADDER, ("small", Reason.SMALLEST)),
    (
        "each by its own tokenizer",
        AskedModel(sizes=BY_TOKENIZER),
        LADDER,
        ("large", Reason.CONTEXT),
    ),
    (
        "where it has room by that",
        AskedModel(sizes=BY_TOKENIZER | {"middle": Size(190, 10)}),
        LADDER,
        ("middle", Reason.CONTEXT),
    ),
    (
        "the smallest with any room where none has it for the usual completion",
        TIGHT,
        (SMALL, replace(LARGE, context_tokens=90)),
        ("small", Reason.SMALLEST),
    ),
    ("tools", TOOLS, NO_TOOLS, ("middle", Reason.TOOLS)),
    ("a form where tools are not taken", FORM, NO_TOOLS, ("small", Reason.SMALLEST)),
    ("a form", FORM, NO_FORMS, ("middle", Reason.STRUCTURED_OUTPUT)),
    ("tools where forms are not taken", TOOLS, NO_FORMS, ("small", Reason.SMALLEST)),
    *(
        (
            f"one awake spares one that is {state.value} the load",
            AskedModel(),
            (asleep(SMALL, state), MIDDLE, LARGE),
            ("middle", Reason.ASLEEP),
        )
        for state in SLEEPY
    ),
    (
        "one that loads already spares another the load",
        AskedModel(),
        (asleep(SMALL), asleep(MIDDLE, ModelState.LOADING), asleep(LARGE)),
        ("middle", Reason.ASLEEP),
    ),
    (
        "one is woken where no other fits",
        of_size(300),
        (SMALL, MIDDLE, asleep(LARGE)),
        ("large", Reason.WOKEN),
    ),
    ("or none is awake", AskedModel(), tuple(map(asleep, LADDER)), ("small", Reason.WOKEN)),
]


@pytest.mark.parametrize(
    ("asked", "rungs", "choice"), [r[1:] for r in RULES], ids=[r[0] for r in RULES]
)
def test_which_rung_answers_and_why(
    asked: AskedModel, rungs: tuple[Rung, ...], choice: tuple[str, Reason]
) -> None:
    assert chosen(asked, *rungs) == choice


@pytest.mark.parametrize(
    ("asked", "rungs", "choice"),
    [
        (AskedModel(), (asleep(SMALL), MIDDLE), ("small", Reason.SMALLEST)),
        (of_size(110), (SMALL, asleep(MIDDLE), LARGE), ("middle", Reason.CONTEXT)),
    ],
)
def test_a_rung_is_woken_by_policy(
    asked: AskedModel, rungs: tuple[Rung, ...], choice: tuple[str, Reason]
) -> None:
    assert chosen(asked, *rungs, wake=ALWAYS) == choice


@pytest.mark.parametrize(
    ("asked", "words", "param"),
    [
        (AskedModel(has_tools=True), "(small, large) supports tools;", "tools"),
        (AskedModel(has_form=True), "supports structured output;", "response_format"),
        (AskedModel(has_tools=True, has_form=True), "supports tools and structured", "tools"),
    ],
)
def test_what_no_rung_takes_is_refused_by_name(asked: AskedModel, words: str, param: str) -> None:
    rungs = [replace(rung, takes_tools=False, takes_forms=False) for rung in (SMALL, LARGE)]
    with pytest.raises(RequestError) as refused:
        choose(rungs, asked, IF_NEEDED)
    assert words in refused.value.message
    assert (refused.value.status, refused.value.param) == (400, param)


def test_two_rungs_that_take_one_of_two_take_not_both() -> None:
    rungs = (replace(SMALL, takes_tools=False), replace(LARGE, takes_forms=False))
    with pytest.raises(RequestError, match="supports tools and structured"):
        choose(rungs, AskedModel(has_tools=True, has_form=True), IF_NEEDED)


@pytest.mark.parametrize("wake", WakePolicy)
def test_a_rung_without_files_comes_last(wake: WakePolicy) -> None:
    gone = asleep(SMALL, ModelState.ABSENT)
    assert chosen(AskedModel(), gone, asleep(MIDDLE), wake=wake)[0] == "middle"
    assert chosen(AskedModel(), gone, wake=wake)[0] == "small"


@pytest.mark.parametrize("wake", WakePolicy)
def test_a_rung_that_cannot_be_woken_is_no_better_than_one_without_files(wake: WakePolicy) -> None:
    stuck = replace(asleep(SMALL), can_be_woken=False)
    assert chosen(AskedModel(), stuck, MIDDLE, wake=wake)[0] == "middle"
    assert chosen(AskedModel(), stuck, asleep(LARGE), wake=wake)[0] == "large"
    awake = replace(SMALL, can_be_woken=False)
    assert chosen(AskedModel(), awake, MIDDLE, wake=wake) == ("small", Reason.SMALLEST)


def test_every_state_has_its_place() -> None:
    assert set(NEAREST) == set(ModelState)


RUNGS = st.lists(
    st.builds(
        Rung,
        model=st.sampled_from("abcdef"),
        context_tokens=st.integers(2, 20),
        takes_tools=st.booleans(),
        takes_forms=st.booleans(),
        state=st.sampled_from(ModelState),
    ),
    min_size=1,
    unique_by=lambda rung: rung.model,
)


@given(
    rungs=RUNGS,
    has_tools=st.booleans(),
    has_form=st.booleans(),
    size=st.builds(Size, st.integers(1, 20), st.none() | st.integers(1, 20)),
    wake=st.sampled_from(WakePolicy),
)
def test_what_is_chosen_takes_the_request_and_only_what_none_takes_is_refused(
    rungs: list[Rung], has_tools: bool, has_form: bool, size: Size, wake: WakePolicy
) -> None:
    asked = AskedModel(has_tools, has_form, 5, {rung.model: size for rung in rungs})
    able = {
        rung.model
        for rung in rungs
        if rung.takes_tools >= has_tools
        and rung.takes_forms >= has_form
        and size.tokens(1) <= rung.context_tokens
    }
    try:
        choice: Choice | None = choose(rungs, asked, wake)
    except RequestError:
        choice = None
    assert (choice is None) == (not able)
    assert choice is None or choice.model in able

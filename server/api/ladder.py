"""Which model of a ladder answers a request that leaves the model open. Pure.

Of the rungs that take what the request asks for the smallest one answers; one that would have to be
woken comes after those that are awake, unless the settings say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.config import WakePolicy
from triolet.control_protocol import ModelState
from triolet.errors import invalid_request

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from triolet.errors import RequestError


class Reason(StrEnum):
    """Why a rung was chosen."""

    SMALLEST = "smallest"
    """It is the first one."""
    CONTEXT = "context"
    """The one below has too little room for prompt and completion."""
    TOOLS = "tools"
    """The one below is declared to take no tools."""
    STRUCTURED_OUTPUT = "structured_output"
    """The one below is declared to keep to no form."""
    ASLEEP = "asleep"
    """The one below fits, and would have to be woken."""
    WOKEN = "woken"
    """No rung that fits is awake."""
    KEPT = "kept"
    """An answer with the request's key was begun on it."""


_AWAKE, _COMING, _ASLEEP, _GONE = range(4)
NEAREST: Final[dict[ModelState, int]] = {
    ModelState.SERVING: _AWAKE,
    ModelState.WARM: _AWAKE,
    ModelState.LOADING: _COMING,
    ModelState.SLEEPING: _ASLEEP,
    ModelState.STAGED: _ASLEEP,
    ModelState.DRAINING: _ASLEEP,
    ModelState.ABSENT: _GONE,
}
"""How far a rung is, the nearest first: one that is coming already costs no load."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One model of a ladder.

    Attributes:
      model: its name.
      context_tokens: for prompt and completion together.
      takes_tools: as declared.
      takes_forms: likewise, of structured output.
      state: how far it is from answering.
      can_be_woken: where it is asleep, its workers come when they are asked for.
    """

    model: str
    context_tokens: int
    takes_tools: bool = True
    takes_forms: bool = True
    state: ModelState = ModelState.SERVING
    can_be_woken: bool = True

    @property
    def distance(self) -> int:
        """How far it is from answering, 0 for not at all."""
        found = NEAREST[self.state]
        return _GONE if found == _ASLEEP and not self.can_be_woken else found


class Size(NamedTuple):
    """What a request needs room for on one model.

    Attributes:
      prompt_tokens: of its longest prompt, by that model's tokenizer.
      completion_tokens: that it asks for; None if it does not say.
      most_unasked: tokens of a completion that it gets in that case; None for as many as fit.
    """

    prompt_tokens: int
    completion_tokens: int | None = None
    most_unasked: int | None = None

    def tokens(self, unasked_tokens: int) -> int:
        """Return prompt and completion together, with so much for one that is not asked for."""
        asked = self.completion_tokens
        if asked is None:
            most = self.most_unasked
            asked = unasked_tokens if most is None else min(unasked_tokens, most)
        return self.prompt_tokens + asked


@dataclass(frozen=True, slots=True)
class AskedModel:
    """What a request asks for.

    Attributes:
      has_tools: it offers tools.
      has_form: its answer has to have a form.
      unasked_tokens: room for a completion whose length it does not say.
      sizes: by model, of those that have been asked so far; the others are taken to have room.
    """

    has_tools: bool = False
    has_form: bool = False
    unasked_tokens: int = 1
    sizes: Mapping[str, Size] = field(default_factory=dict)


class Choice(NamedTuple):
    """A decision.

    Attributes:
      model: the chosen one's name.
      reason: why not a smaller one.
    """

    model: str
    reason: Reason


def choose(rungs: Sequence[Rung], asked: AskedModel, wake: WakePolicy) -> Choice:
    """Return the rung that answers.

    Args:
      rungs: the smallest first; at least one.
      asked: what has to fit.
      wake: when a rung that is asleep is taken.

    Raises:
      RequestError: 400, no rung takes what is asked for, or has room.
    """
    lacks = [_lack(rung, asked, asked.unasked_tokens) for rung in rungs]
    if None not in lacks:
        # A short completion is better than none.
        lacks = [_lack(rung, asked, 1) for rung in rungs]
    places = [place for place, lack in enumerate(lacks) if lack is None]
    if not places:
        raise _refusal(rungs, asked)

    def distance(place: int) -> int:
        found = rungs[place].distance
        return found if wake is WakePolicy.IF_NEEDED or found == _GONE else _AWAKE

    chosen = min(places, key=lambda place: (distance(place), place))
    if distance(chosen) == _ASLEEP:
        reason = Reason.WOKEN
    elif chosen == 0:
        reason = Reason.SMALLEST
    else:
        reason = lacks[chosen - 1] or Reason.ASLEEP
    return Choice(rungs[chosen].model, reason)


def candidates(rungs: Sequence[Rung], asked: AskedModel) -> set[str]:
    """Return the models that may still be chosen and answer, as far as sizes are known."""
    return {
        rung.model for rung in rungs if rung.distance != _GONE and _lack(rung, asked, 1) is None
    }


def _lack(rung: Rung, asked: AskedModel, unasked_tokens: int) -> Reason | None:
    """Return what a rung does not take; None if it takes all."""
    if asked.has_tools and not rung.takes_tools:
        return Reason.TOOLS
    if asked.has_form and not rung.takes_forms:
        return Reason.STRUCTURED_OUTPUT
    size = asked.sizes.get(rung.model)
    if size is not None and size.tokens(unasked_tokens) > rung.context_tokens:
        return Reason.CONTEXT
    return None


def _refusal(rungs: Sequence[Rung], asked: AskedModel) -> RequestError:
    """Return the error for what no rung takes."""
    names = ", ".join(rung.model for rung in rungs)
    of_any_size = replace(asked, sizes={})
    able = [rung for rung in rungs if _lack(rung, of_any_size, 1) is None]
    if not able:
        wanted = [("tools", asked.has_tools), ("an answer of a certain form", asked.has_form)]
        what = " and ".join(word for word, is_asked in wanted if is_asked)
        return invalid_request(
            f"none of the models that may answer ({names}) takes {what}; name a model that does",
            "tools" if asked.has_tools else "response_format",
        )
    widest = max(able, key=lambda rung: rung.context_tokens)
    size = asked.sizes[widest.model]
    completion = size.completion_tokens
    and_asked = "" if completion is None else f" and {completion} for the completion"
    return invalid_request(
        f"the longest context of the models that may answer is {widest.context_tokens} tokens, of "
        f"{widest.model}; the request has {size.prompt_tokens} in the prompt{and_asked}. Shorten "
        "the prompt or ask for fewer tokens",
        "model",
        code="context_length_exceeded",
    )

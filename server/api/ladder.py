"""Chooses the model of a ladder for a request with `model: auto`. Pure.

The smallest model that can take the request is chosen. Sleeping models come after running ones
unless the settings say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from transport.control_protocol import ModelState
from triolet.config import WakePolicy
from triolet.errors import invalid_request

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from triolet.errors import RequestError


class Reason(StrEnum):
    """Why a model was chosen."""

    SMALLEST = "smallest"
    """It is the first one."""
    CONTEXT = "context"
    """The one below has too short a context for prompt and completion."""
    TOOLS = "tools"
    """The one below is declared without tools."""
    STRUCTURED_OUTPUT = "structured_output"
    """The one below is declared without structured output."""
    ASLEEP = "asleep"
    """The one below fits, but is asleep."""
    WOKEN = "woken"
    """All models that fit are asleep."""
    KEPT = "kept"
    """An answer with the request's idempotency key was started on it."""


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
"""Distance of each state from serving, nearest first: a model that is waking needs no new load."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One model of a ladder.

    Attributes:
      model: its name.
      context_tokens: maximum number of prompt and completion tokens together.
      takes_tools: whether it is declared to support tools.
      takes_forms: whether it is declared to support structured output.
      state: its state.
      can_be_woken: whether requests wake it if it is asleep.
    """

    model: str
    context_tokens: int
    takes_tools: bool = True
    takes_forms: bool = True
    state: ModelState = ModelState.SERVING
    can_be_woken: bool = True

    @property
    def distance(self) -> int:
        """Its distance from serving; 0 if it serves."""
        found = NEAREST[self.state]
        return _GONE if found == _ASLEEP and not self.can_be_woken else found


class Size(NamedTuple):
    """The size of a request on one model.

    Attributes:
      prompt_tokens: length of its longest prompt with the model's tokenizer.
      completion_tokens: its completion limit; None if not given.
      most_unasked: the completion limit used if not given; None for as many tokens as fit.
    """

    prompt_tokens: int
    completion_tokens: int | None = None
    most_unasked: int | None = None

    def tokens(self, unasked_tokens: int) -> int:
        """Return the total tokens, assuming `unasked_tokens` for a completion without a limit."""
        asked = self.completion_tokens
        if asked is None:
            most = self.most_unasked
            asked = unasked_tokens if most is None else min(unasked_tokens, most)
        return self.prompt_tokens + asked


@dataclass(frozen=True, slots=True)
class AskedModel:
    """A request for `auto`.

    Attributes:
      has_tools: whether it offers tools.
      has_form: whether its answer must have a format.
      unasked_tokens: tokens to assume for a completion without a limit.
      sizes: its size, by model, as far as known; other models are assumed to have room.
    """

    has_tools: bool = False
    has_form: bool = False
    unasked_tokens: int = 1
    sizes: Mapping[str, Size] = field(default_factory=dict)


class Choice(NamedTuple):
    """A decision.

    Attributes:
      model: name of the chosen model.
      reason: why not a smaller one.
    """

    model: str
    reason: Reason


def choose(rungs: Sequence[Rung], asked: AskedModel, wake: WakePolicy) -> Choice:
    """Choose the model that answers.

    Args:
      rungs: the models, smallest first; at least one.
      asked: the request.
      wake: when to choose a model that is asleep.

    Raises:
      RequestError: 400, no model can take the request.
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
    """Return the models that may still be chosen, as far as sizes are known."""
    return {
        rung.model for rung in rungs if rung.distance != _GONE and _lack(rung, asked, 1) is None
    }


def _lack(rung: Rung, asked: AskedModel, unasked_tokens: int) -> Reason | None:
    """Return what the request needs and a model lacks; None if nothing."""
    if asked.has_tools and not rung.takes_tools:
        return Reason.TOOLS
    if asked.has_form and not rung.takes_forms:
        return Reason.STRUCTURED_OUTPUT
    size = asked.sizes.get(rung.model)
    if size is not None and size.tokens(unasked_tokens) > rung.context_tokens:
        return Reason.CONTEXT
    return None


def _refusal(rungs: Sequence[Rung], asked: AskedModel) -> RequestError:
    """Return the error for a request that no model can take."""
    names = ", ".join(rung.model for rung in rungs)
    of_any_size = replace(asked, sizes={})
    able = [rung for rung in rungs if _lack(rung, of_any_size, 1) is None]
    if not able:
        wanted = [("tools", asked.has_tools), ("structured output", asked.has_form)]
        what = " and ".join(word for word, is_asked in wanted if is_asked)
        return invalid_request(
            f"none of the models that may answer ({names}) supports {what}; name a model that does",
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

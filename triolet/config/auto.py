"""Settings of `model: auto`: which models a request may be given to, and what each is declared to
take."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta

from ..errors import SettingError
from .limits import Count, require

AUTO: Final = "auto"
"""The name by which a request leaves the model open."""
MAX_RUNGS: Final = 16
"""Models of one ladder: a request is tokenised once for each one that turns out too short."""

GIVE_LADDER: Final = 'give ladder = ["SMALL", "LARGE"]: names of models, the smallest first'


class WakePolicy(StrEnum):
    """When a model without workers is woken for a request that leaves the model open."""

    IF_NEEDED = "if_needed"
    """Where no model fits that is awake."""
    ALWAYS = "always"
    """Where it is the smallest that fits."""


IF_NEEDED: Final = WakePolicy.IF_NEEDED
DEFAULT_COMPLETION_TOKENS: Final = 256


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What one model of a ladder is declared to take."""

    model: str
    """Its name."""
    context_tokens: Annotated[int, Meta(ge=2)] | None = None
    """Prompt and completion together; None for all of the model's own context. Less keeps long
    requests from a model that answers them badly."""
    tools: bool = True
    """Whether it gets requests with tools."""
    structured_output: bool = True
    """Whether it gets requests that ask for a form, such as `response_format`."""


@dataclass(frozen=True, slots=True)
class AutoConfig:
    """Which model answers a request for the model `auto`."""

    ladder: tuple[str, ...] | None = None
    """Names of models, the smallest first: the first that fits answers. None: `auto` is off."""
    wake: WakePolicy = IF_NEEDED
    """When a model without workers is woken. A load takes seconds, and the memory of others."""
    completion_tokens: Count = DEFAULT_COMPLETION_TOKENS
    """Room for the completion of a request that does not say how long it may be. A request for
    which no model has so much is given to the smallest with room for its prompt."""
    limits: tuple[ModelLimits, ...] = ()
    """What models are declared to take; one that is not in here takes everything."""

    def __post_init__(self) -> None:
        if self.ladder is None:
            is_set = {
                "wake": self.wake is not IF_NEEDED,
                "completion_tokens": self.completion_tokens != DEFAULT_COMPLETION_TOKENS,
                "limits": bool(self.limits),
            }
            if given := [name for name, one in is_set.items() if one]:
                raise SettingError(f"ladder is missing beside {', '.join(given)}; {GIVE_LADDER}")
            return
        require_ladder(self.ladder, "ladder")
        named = [one.model for one in self.limits]
        twice = sorted({name for name in named if named.count(name) > 1})
        if twice:
            raise SettingError(f"limits has {', '.join(twice)} twice; each model has one table")

    def limits_of(self, model: str) -> ModelLimits:
        """Return what a model is declared to take."""
        return next((one for one in self.limits if one.model == model), ModelLimits(model))


def require_ladder(ladder: tuple[str, ...], what: str) -> None:
    """Look whether a ladder is one, whatever models there are.

    Args:
      ladder: names of models.
      what: it is called, in the error.

    Raises:
      SettingError: it is empty, too long, or has a model twice.
    """
    allowed = f"1 to {MAX_RUNGS} names of different models, the smallest first"
    is_ladder = 0 < len(ladder) <= MAX_RUNGS and len(set(ladder)) == len(ladder)
    require(is_ladder, what, list(ladder), allowed)

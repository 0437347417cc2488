"""Settings of `model: auto`: the models to choose from, and the requests that each one takes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta

from ..errors import SettingError
from .limits import Count, require

AUTO: Final = "auto"
"""The model name with which a request leaves the choice to the server."""
MAX_RUNGS: Final = 16
"""Models of one ladder. A request is tokenised again for each one with a context too short."""

GIVE_LADDER: Final = 'give ladder = ["SMALL", "LARGE"]: names of models, smallest first'


class WakePolicy(StrEnum):
    """When to wake a model without workers for a request for `auto`."""

    IF_NEEDED = "if_needed"
    """If no model that is awake fits."""
    ALWAYS = "always"
    """If it is the smallest model that fits."""


IF_NEEDED: Final = WakePolicy.IF_NEEDED
DEFAULT_COMPLETION_TOKENS: Final = 256


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What one model of a ladder takes."""

    model: str
    """Name of the model."""
    context_tokens: Annotated[int, Meta(ge=2)] | None = None
    """Prompt and completion together; None for the model's whole context. A lower limit keeps long
    requests from a model that answers them badly."""
    tools: bool = True
    """Whether it gets requests with tools."""
    structured_output: bool = True
    """Whether it gets requests for structured output, such as `response_format`."""


@dataclass(frozen=True, slots=True)
class AutoConfig:
    """How to choose the model for a request for `auto`."""

    ladder: tuple[str, ...] | None = None
    """Names of models, smallest first: the first that fits answers. None turns `auto` off."""
    wake: WakePolicy = IF_NEEDED
    """When to wake a model without workers. Loading takes seconds and other models' memory."""
    completion_tokens: Count = DEFAULT_COMPLETION_TOKENS
    """Room reserved for the completion of a request without a limit. If no model has this much, the
    smallest with room for the prompt is chosen."""
    limits: tuple[ModelLimits, ...] = ()
    """Limits of single models; a model that is not listed takes every request."""

    def __post_init__(self) -> None:
        if self.ladder is None:
            is_set = {
                "wake": self.wake is not IF_NEEDED,
                "completion_tokens": self.completion_tokens != DEFAULT_COMPLETION_TOKENS,
                "limits": bool(self.limits),
            }
            if given := [name for name, one in is_set.items() if one]:
                raise SettingError(f"{', '.join(given)} needs a ladder too; {GIVE_LADDER}")
            return
        require_ladder(self.ladder, "ladder")
        named = [one.model for one in self.limits]
        twice = sorted({name for name in named if named.count(name) > 1})
        if twice:
            raise SettingError(f"limits lists {', '.join(twice)} twice; allowed: once each")

    def limits_of(self, model: str) -> ModelLimits:
        """Return the limits of a model."""
        return next((one for one in self.limits if one.model == model), ModelLimits(model))


def require_ladder(ladder: tuple[str, ...], what: str) -> None:
    """Check the form of a ladder, whatever models there are.

    Args:
      ladder: names of models.
      what: its name in the error.

    Raises:
      SettingError: it is empty, too long, or names a model twice.
    """
    allowed = f"1 to {MAX_RUNGS} names of different models, smallest first"
    is_ladder = 0 < len(ladder) <= MAX_RUNGS and len(set(ladder)) == len(ladder)
    require(is_ladder, what, list(ladder), allowed)

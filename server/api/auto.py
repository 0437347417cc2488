"""`model: auto`: plans a request on the model that its tenant's ladder gives it to.

The decision is `ladder.choose`; what a request needs is known from its plan on the model that would
be chosen, so that a prompt is tokenised once more only where a model turns out too short for it.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from quart import has_request_context

from triolet.config import AUTO
from triolet.errors import RequestError, invalid_request

from ..contract.generation import AutoChoice
from ..tenants.tenancy import current_tenant
from .body import show_version
from .constraints import asks_for_form
from .fields import ConstraintFields, ToolFields
from .generate import (
    check_fields,
    check_fields_for,
    check_is_open,
    chosen_version,
    least,
    refuse_early,
)
from .ladder import AskedModel, Choice, Reason, Rung, Size, candidates, choose
from .resuming import kept_model
from .served_models import state_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from .generate import GenerationPlan
    from .schemas import GenerationFields
    from .served_models import ServedModel
    from .services import Services

T = TypeVar("T")


def is_auto(name: str | None, services: Services) -> bool:
    """Whether a request leaves the model open."""
    return name == AUTO and services.config.auto.ladder is not None


def current_ladder(services: Services) -> tuple[ServedModel, ...]:
    """Return the models that may answer the current tenant's requests for `auto`, the smallest
    first."""
    names = current_tenant().auto or services.config.auto.ladder
    assert names is not None
    return tuple(chosen_version(name, services) for name in names)


async def plan_request(
    fields: GenerationFields,
    services: Services,
    plan_on: Callable[[ServedModel], Awaitable[GenerationPlan]],
) -> GenerationPlan:
    """Return what is to be generated for a request, on the model that it names or is given to.

    Args:
      fields: what it asks for.
      services: what it works with.
      plan_on: returns what is to be generated on a model.

    Raises:
      RequestError: it is refused; 400 also where no model of the ladder takes it.
    """
    if not is_auto(fields.model, services):
        model = check_fields(fields, services)
        refuse_early(fields, model)
        return await plan_on(model)

    choice, plan = await _decide(fields, services, plan_on, _size, refuses_early=True)
    services.metrics.auto.chosen(choice.model, choice.reason)
    room = max(1, context_on(plan.model, services) - _size(plan).prompt_tokens)
    return replace(
        plan,
        default_max_tokens=least(plan.default_max_tokens, room),
        auto=AutoChoice(choice.reason, current_ladder(services)[-1].name),
    )


def _size(plan: GenerationPlan) -> Size:
    most_unasked = least(plan.default_max_tokens, current_tenant().plan.max_output_tokens)
    return Size(max(map(len, plan.prompts)), plan.max_tokens, most_unasked)


async def count_prompt(
    fields: GenerationFields,
    services: Services,
    count_on: Callable[[ServedModel], Awaitable[tuple[int, ...]]],
) -> tuple[int, ...]:
    """Return the prompt of a request that is only counted, on the model that would answer it.

    Raises:
      RequestError: as `plan_request`.
    """
    if not is_auto(fields.model, services):
        return await count_on(check_fields(fields, services))
    _, ids = await _decide(
        fields, services, count_on, lambda ids: Size(len(ids)), refuses_early=False
    )
    return ids


async def _decide(
    fields: GenerationFields,
    services: Services,
    try_on: Callable[[ServedModel], Awaitable[T]],
    size_of: Callable[[T], Size],
    *,
    refuses_early: bool,
) -> tuple[Choice, T]:
    """Return the choice, and what trying the request on the chosen model gave.

    Args:
      fields: what is asked for.
      services: what it works with.
      try_on: tries it on a model.
      size_of: what that model needs room for.
      refuses_early: refuse it before its prompt is tokenised where every model that may answer it
        would refuse it whatever the prompt is.
    """
    check_is_open(services)
    _refuse_token_ids(fields)
    kept = kept_model(services) if has_request_context() else None
    if kept is not None:
        return Choice(kept, Reason.KEPT), await _tried(kept, fields, services, try_on)
    rungs = [_rung(model, services) for model in current_ladder(services)]
    config = services.config.auto
    contexts = {rung.model: rung.context_tokens for rung in rungs}
    tried: dict[str, T] = {}
    sizes: dict[str, Size] = {}
    too_long: dict[str, RequestError] = {}
    asked = AskedModel(_has_tools(fields), _has_form(fields), config.completion_tokens, sizes)
    while True:
        try:
            choice = choose(rungs, asked, config.wake)
        except RequestError as error:
            show_version("")  # of one that was tried
            widest = max(rungs, key=attrgetter("context_tokens"))
            raise too_long.get(widest.model, error) from None
        if choice.model in tried:
            # Another one may have been tried last.
            show_version(chosen_version(choice.model, services).digest)
            return choice, tried[choice.model]
        others = candidates(rungs, asked) - {choice.model}
        try:
            found = await _tried(
                choice.model, fields, services, try_on, others if refuses_early else None
            )
        except RequestError as error:
            if error.code != "context_length_exceeded":
                raise
            # By its bytes alone: it has no number of tokens, but more than there is room for. The
            # model's context may have changed since; with a smaller one it would be tried again.
            too_long[choice.model] = error
            sizes[choice.model] = Size(contexts[choice.model])
            continue
        tried[choice.model], sizes[choice.model] = found, size_of(found)


async def _tried(
    name: str,
    fields: GenerationFields,
    services: Services,
    try_on: Callable[[ServedModel], Awaitable[T]],
    others: Iterable[str] | None = None,
) -> T:
    """Return what trying a request on a model gives.

    Args:
      name: of the model.
      fields: what is asked for.
      services: what it works with.
      try_on: tries it on a model.
      others: names of models that may answer too, where it may be refused early; None where not.
    """
    model = chosen_version(name, services)
    show_version(model.digest)  # also of a refusal
    check_fields_for(fields, model, services)
    if others is not None:
        refuse_early(fields, model, [chosen_version(one, services) for one in sorted(others)])
    return await try_on(model)


def context_on(model: ServedModel, services: Services) -> int:
    """Return how many tokens a model takes of requests that leave it open."""
    declared = services.config.auto.limits_of(model.name).context_tokens
    most = model.fleet.max_model_len
    return most if declared is None else min(declared, most)


def widest_context(fields: GenerationFields, services: Services) -> int:
    """Return the longest context of the models that may answer a request; 0 for one that names its
    model."""
    if not is_auto(fields.model, services):
        return 0
    rungs = [_rung(model, services) for model in current_ladder(services)]
    able = candidates(rungs, AskedModel(_has_tools(fields), _has_form(fields)))
    return max((rung.context_tokens for rung in rungs if rung.model in able), default=0)


def _rung(model: ServedModel, services: Services) -> Rung:
    """Return a model as the choice sees it."""
    status = model.fleet.status()
    limits, context_tokens = services.config.auto.limits_of(model.name), context_on(model, services)
    return Rung(
        model.name,
        context_tokens,
        limits.tools,
        limits.structured_output,
        state_of(status),
        can_be_woken=status.is_coming,
    )


def _has_tools(fields: GenerationFields) -> bool:
    is_asked = isinstance(fields, ToolFields) and bool(fields.tools)
    return is_asked and getattr(fields, "tool_choice", None) != "none"


def _has_form(fields: GenerationFields) -> bool:
    return isinstance(fields, ConstraintFields) and asks_for_form(fields)


def _refuse_token_ids(fields: GenerationFields) -> None:
    """Refuse what means another text on each model.

    Raises:
      RequestError: 400.
    """
    prompts = getattr(fields, "prompt", ())
    has_ids = {
        "prompt": any(not isinstance(prompt, str) for prompt in prompts),
        "logit_bias": bool(fields.logit_bias),
        "stop_token_ids": bool(fields.stop_token_ids),
    }
    for param, is_asked in has_ids.items():
        if is_asked:
            raise invalid_request(
                f"names tokens, which are others on each model that {AUTO!r} may choose; name a "
                "model",
                param,
            )

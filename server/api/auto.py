"""`model: auto`: plans a request on a model chosen from its tenant's ladder.

`ladder.choose` decides. It needs the size of the request, which comes from planning it on the
candidate model; the prompt is tokenized again only if a model turns out to be too small.
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
    least,
    refuse_early,
)
from .ladder import AskedModel, Choice, Reason, Rung, Size, candidates, choose
from .resuming import kept_model
from .served_models import state_of
from .versions import check_names_no_version, chosen_version

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from .generate import GenerationPlan
    from .schemas import GenerationFields
    from .served_models import ServedModel
    from .services import Services

T = TypeVar("T")


def is_auto(name: str | None, services: Services) -> bool:
    """Whether a request leaves the choice of the model to the server."""
    return name == AUTO and services.config.auto.ladder is not None


def current_ladder(services: Services) -> tuple[ServedModel, ...]:
    """Return the models that may answer the current tenant's `auto` requests, smallest first.

    Raises:
      RequestError: 400, the request names a version.
    """
    check_names_no_version()
    names = current_tenant().auto or services.config.auto.ladder
    assert names is not None
    return tuple(chosen_version(name, services) for name in names)


async def plan_request(
    fields: GenerationFields,
    services: Services,
    plan_on: Callable[[ServedModel], Awaitable[GenerationPlan]],
) -> GenerationPlan:
    """Plan a request on the model that it names or that `auto` chooses.

    Args:
      fields: the request.
      services: the server's parts.
      plan_on: returns the plan on a model.

    Raises:
      RequestError: the request is refused; 400 if no model of the ladder can take it.
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
    """Return the prompt of a count request, on the model that would answer it.

    Raises:
      RequestError: see `plan_request`.
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
    """Choose a model; return the choice and the result of `try_on` for that model.

    Args:
      fields: the request.
      services: the server's parts.
      try_on: plans or counts the request on a model.
      size_of: returns the size of a result.
      refuses_early: whether to refuse before tokenizing if all possible models would refuse any
        prompt.
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
            show_version("")  # clear the version of a tried model
            widest = max(rungs, key=attrgetter("context_tokens"))
            raise too_long.get(widest.model, error) from None
        if choice.model in tried:
            # The last model tried may be another one.
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
            # Refused by its size in bytes, without a token count. The model's context may have
            # changed since; with a smaller one the request would be tried again.
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
    """Return the result of `try_on` for a model.

    Args:
      name: the model's name.
      fields: the request.
      services: the server's parts.
      try_on: plans or counts the request on a model.
      others: names of models that may answer instead, if the request may be refused early; None if
        it may not.
    """
    model = chosen_version(name, services)
    show_version(model.digest)  # refusals show it too
    check_fields_for(fields, model, services)
    if others is not None:
        refuse_early(fields, model, [chosen_version(one, services) for one in sorted(others)])
    return await try_on(model)


def context_on(model: ServedModel, services: Services) -> int:
    """Return a model's context length for `auto` requests."""
    declared = services.config.auto.limits_of(model.name).context_tokens
    most = model.fleet.max_model_len
    return most if declared is None else min(declared, most)


def widest_context(fields: GenerationFields, services: Services) -> int:
    """Return the longest context of the models that may answer an `auto` request; 0 for a request
    that names its model."""
    if not is_auto(fields.model, services):
        return 0
    rungs = [_rung(model, services) for model in current_ladder(services)]
    able = candidates(rungs, AskedModel(_has_tools(fields), _has_form(fields)))
    return max((rung.context_tokens for rung in rungs if rung.model in able), default=0)


def _rung(model: ServedModel, services: Services) -> Rung:
    """Return a model as a rung of the ladder."""
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
    """Refuse token ids, which mean different text on each model.

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
                f"contains token ids, which differ between the models that {AUTO!r} may choose; "
                "name a model",
                param,
            )

"""How long a request may be: what the model and its tenant's plan allow. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from triolet.errors import invalid_request

if TYPE_CHECKING:
    from pydantic import BaseModel

    from triolet.errors import RequestError
    from triolet.tenants import Plan


class Context(NamedTuple):
    """Most tokens of prompt and completion together.

    Attributes:
      tokens: so many.
      whose: who says so, for errors.
    """

    tokens: int
    whose: str


def context_of(max_model_len: int, plan: Plan) -> Context:
    """Return what the model and a plan allow."""
    most = plan.max_context_tokens
    if most is None or most >= max_model_len:
        return Context(max_model_len, "the model's context")
    return Context(most, f"the context of the plan {plan.name}")


def least(one: int | None, other: int | None) -> int | None:
    """Return the tighter of two bounds; None is none."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def check_output(fields: BaseModel, plan: Plan) -> None:
    """Raise the RequestError for a completion that a plan does not allow."""
    for name in ("max_tokens", "max_completion_tokens"):
        wanted, most = getattr(fields, name, None), plan.max_output_tokens
        if wanted is not None and most is not None and wanted > most:
            raise invalid_request(
                f"the plan {plan.name} allows {most} tokens for a completion; the request asks for "
                f"{wanted}",
                name,
            )


def check_input(num_tokens: int, plan: Plan, what: str, param: str) -> None:
    """Raise the RequestError for an input without a completion that a plan does not allow."""
    most = plan.max_context_tokens
    if most is not None and num_tokens > most:
        raise invalid_request(
            f"{what} has {num_tokens} tokens; the plan {plan.name} allows {most}",
            param,
            code="context_length_exceeded",
        )


def completion_budget(
    prompt_tokens: int, wanted: int | None, default: int | None, context: Context, param: str
) -> int:
    """Return how many tokens a completion may have.

    Args:
      prompt_tokens: length of the prompt.
      wanted: what the client asked for; must fit.
      default: what it gets otherwise, as far as that fits; None for as many as fit.
      context: what it has to fit into.
      param: the field an error names.

    Raises:
      RequestError: 400 context_length_exceeded.
    """
    room = context.tokens - prompt_tokens
    if room < 1 or (wanted is not None and wanted > room):
        raise _too_long(prompt_tokens, wanted, context, param)
    if wanted is not None:
        return wanted
    return room if default is None else min(default, room)


def _too_long(prompt_tokens: int, wanted: int | None, context: Context, param: str) -> RequestError:
    asked = "" if wanted is None else f" and {wanted} for the completion"
    return invalid_request(
        f"{context.whose} is {context.tokens} tokens; the request has {prompt_tokens} in the "
        f"prompt{asked}. Shorten the prompt or ask for fewer tokens",
        param,
        code="context_length_exceeded",
    )

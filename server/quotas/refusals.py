"""What a tenant is told whose limit is met. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triolet.errors import RequestError, invalid_request

from .amounts import Limit

if TYPE_CHECKING:
    from triolet.tenants import Plan

    from .amounts import Verdict


def refusal(plan: Plan, limit: Limit, wait_s: float) -> RequestError:
    """Return the error for a limit that is met: 429.

    Args:
      plan: whose limit it is.
      limit: which.
      wait_s: after which it is not met any more.
    """
    code, retry_after_s = "rate_limit_exceeded", wait_s if wait_s > 0 else None
    match limit:
        case Limit.BUDGET:
            # No wait that a client makes is long enough.
            code, retry_after_s = "insufficient_quota", None
            what = f"the budget of the plan {plan.name} for this month (UTC) is spent"
        case Limit.CONCURRENT:
            what = f"the plan {plan.name} allows {plan.max_concurrent} requests at once"
        case Limit.REQUESTS:
            what = f"the plan {plan.name} allows {plan.requests_per_minute:g} requests a minute"
        case Limit.TOKENS:
            what = f"the plan {plan.name} allows {plan.tokens_per_minute:g} tokens a minute"
    return RequestError(what, status=429, code=code, retry_after_s=retry_after_s)


def refused(plan: Plan, verdict: Verdict, concurrent_retry_s: float) -> RequestError | None:
    """Return the error that a verdict is to its client; None if it may go on."""
    if verdict.refused_by is None:
        return None
    wait_s = concurrent_retry_s if verdict.refused_by is Limit.CONCURRENT else verdict.wait_s
    return refusal(plan, verdict.refused_by, wait_s)


def too_large(plan: Plan, prompt_tokens: int) -> RequestError:
    """Return the error for a prompt for which no wait is long enough: 400."""
    return invalid_request(
        f"the plan {plan.name} allows {plan.tokens_per_minute:g} tokens a minute; the prompt alone "
        f"has {prompt_tokens}",
        code="context_length_exceeded",
    )

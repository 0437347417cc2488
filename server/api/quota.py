"""Limits of tenants at the edge: what is let in, and what its client is told of what is left.

A request's ticket is taken before its body is read, and ends where its tokens are reserved. The
accounts are server/tenants'.
"""

from __future__ import annotations

import math
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from triolet.errors import RequestError

from ..tenants.amounts import Account, limits_of
from ..tenants.buckets import MINUTE_S
from ..tenants.quotas import Asked
from ..tenants.tenancy import current_tenant
from .claims import renew_tenant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..contract.generation import GenerationRequest
    from ..tenants.quotas import NoReservation, Quotas, Reservation
    from .request_scope import Entry, RequestScope
    from .services import Services

_ENTRY: Final[ContextVar[Entry | None]] = ContextVar("entry", default=None)
"""Of the request that the running task serves, until it is queued."""


def enter_request(entry: Entry) -> None:
    """Let the running task serve a request that has come in."""
    _ENTRY.set(entry)


def enter_answer(services: Services, live: RequestScope) -> None:
    """Take a WebSocket message's ticket; it has been read already.

    Raises:
      RequestError: 429.
    """
    live.entry.ticket = services.quotas.enter(current_tenant(), uses_tokens=True, is_charged=True)
    live.entry.begin_work()
    _ENTRY.set(live.entry)


async def reserved(
    requests: Sequence[GenerationRequest], services: Services
) -> Reservation | NoReservation:
    """Take what some completions will probably use. A prompt counts once, whatever is made of it.

    Args:
      requests: one for each completion; none where nothing is to be begun.
      services: who keeps the accounts.

    Raises:
      RequestError: 429 or 400; nothing was taken.
    """
    asked = [
        Asked(one.request_id, 0 if one.origin_id else len(one.prompt_ids), one.sampling.max_tokens)
        for one in requests
    ]
    return await reserve_for(asked, services)


async def reserve_for(asked: Sequence[Asked], services: Services) -> Reservation | NoReservation:
    """Do the same for anything.

    Raises:
      RequestError: 429 or 400; 401 or 403 if the tenant may ask no more.
    """
    reservation = await services.quotas.reserve(current_tenant(), asked)
    try:
        renew_tenant(services.tenancy)  # it may have been disabled meanwhile
    except RequestError:
        reservation.give_back()
        raise
    if (entry := _ENTRY.get()) is not None:
        entry.queue()
    return reservation


def rate_headers(quotas: Quotas) -> dict[str, str]:
    """Return what an answer says of its tenant's limits; nothing where there are none."""
    tenant = current_tenant()
    whole = limits_of(tenant.plan)
    limits = quotas.store.enforced(whole)
    if not tenant.name or (limits.requests is None and limits.tokens is None):
        return {}
    account = quotas.store.last_seen(tenant.name, whole)
    if account is None:
        account = Account(limits.requests or 0.0, limits.tokens or 0.0, 0, 0, 0)
    headers = {}
    for name, limit, left in (
        ("requests", limits.requests, account.requests),
        ("tokens", limits.tokens, account.tokens),
    ):
        if limit is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(math.floor(limit))
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(left)))
            headers[f"x-ratelimit-reset-{name}"] = _shown((limit - left) * MINUTE_S / limit)
    return headers


def _shown(seconds: float) -> str:
    """Return a duration in the API's form: 120ms, 7.5s, 6m0s."""
    milliseconds = math.ceil(max(0.0, seconds) * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"

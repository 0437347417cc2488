"""The version of a model that the current request gets, where a route names several."""

from __future__ import annotations

from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Final

from quart import has_request_context

from triolet.config import AUTO
from triolet.config.routes import MIN_CAPPED, NUM_BUCKETS, user_hash
from triolet.errors import RequestError, invalid_request
from triolet.tenants.plans import TenantRole

from ..contract.generation import AssignedVersion
from ..tenants.tenancy import current_tenant
from .body import ASKED_VERSION_HEADER, current_scope, show_version
from .errors import echo, http_error

if TYPE_CHECKING:
    from triolet.config.routes import Route

    from ..rollouts.conversations import Conversation
    from .request_scope import RequestScope
    from .served_models import ServedModel
    from .services import Services

_MESSAGE: Final[ContextVar[RequestScope | None]] = ContextVar("message", default=None)
"""The scope of the WebSocket message that the running task answers."""


def enter_message(live: RequestScope) -> None:
    """Set the WebSocket message that the running task answers."""
    _MESSAGE.set(live)


def named_model(name: str | None, services: Services) -> ServedModel:
    """Return the model that the current request names; show its version in the headers.

    Raises:
      RequestError: see `chosen_version`; 400, the name is `auto`.
    """
    if name == AUTO and services.config.auto.ladder is not None:
        raise invalid_request(
            f"{AUTO!r} chooses a model for completions only; name one that GET /v1/models lists",
            "model",
        )
    model = chosen_version(name, services)
    show_version(model.digest)
    return model


def chosen_version(name: str | None, services: Services) -> ServedModel:
    """Return the model with this name. For a route, choose the current request's version.

    Raises:
      RequestError: 404, the model does not exist, or its route does not have the version that the
        request names; 403, the request may not name one.
    """
    model = services.models.named(name)
    live = _live_scope() if model.public_name else None
    if live is None:
        return model
    if model.name not in live.versions:
        choose = partial(_choose, model, live, services)
        found = live.versions[model.name] = services.models.version_for(model, choose)
        assigned = live.assigned.get(model.public_name)
        if assigned is not None and assigned.version != found.version:
            # The version lacks the adapter that the request names, so another one answers.
            del live.assigned[model.public_name]
    return live.versions[model.name]


def assigned_version(model: ServedModel) -> AssignedVersion | None:
    """Return the version that a route assigned to the current request; None if the request is no
    evidence about versions."""
    live = _live_scope() if model.public_name else None
    return None if live is None else live.assigned.get(model.public_name)


def check_names_no_version() -> None:
    """Raise RequestError (400) if the current request names a version but no model."""
    live = _live_scope()
    if live is not None and live.conversation is not None and live.conversation.named:
        raise invalid_request(
            f"names a version of one model: name that model instead of {AUTO!r}",
            ASKED_VERSION_HEADER,
        )


def note_refused(live: RequestScope, error: RequestError, services: Services) -> None:
    """Record a request that failed before it was submitted as evidence about its version.

    Batch lines return until the server has room for them. A request for `auto` counts if only one
    model of its ladder has a route: the others are tried, too.
    """
    is_put_off = live.owner is not None and error.status >= 500
    if len(live.assigned) == 1 and not live.has_work and not is_put_off:
        [assigned] = live.assigned.values()
        services.metrics.rollouts.refused(assigned, error.status)


def _live_scope() -> RequestScope | None:
    return current_scope() if has_request_context() else _MESSAGE.get()


def _choose(model: ServedModel, live: RequestScope, services: Services, route: Route) -> str:
    """Choose a version, and record it as evidence unless something else than the user decided."""
    talk, tenant, now_s = live.conversation, current_tenant().name, services.wall()
    public = model.public_name
    if talk is None:
        return route.stable
    if talk.named:
        return _asked(model, talk, services, route)
    before = talk.assigned.get(public)
    if before is None or not route.may_stay(before.version, tenant, now_s):
        user = user_hash(tenant, talk.user if services.config.routes.key == "user" else "")
        version = route.version_for(tenant, str(user % NUM_BUCKETS), now_s)
        before = talk.assigned[public] = AssignedVersion(public, version, user, now_s)
    if before.version != route.stable and _is_capped(route, tenant, services):
        return route.stable
    if tenant not in route.excluded_tenants:
        live.assigned[public] = before
    return before.version


def _is_capped(route: Route, tenant: str, services: Services) -> bool:
    """Return whether one request more would exceed a bound of the versions that are not stable."""
    if (caps := route.caps) is None:
        return False
    others = route.shares.keys() - {route.stable}
    fleets = [one.fleet for one in services.models if one.version in others]
    count = 1 + sum(fleet.in_flight() for fleet in fleets)
    if caps.streams is not None and count > caps.streams:
        return True
    if not tenant or count < MIN_CAPPED or caps.tenant_share == 1.0:
        return False
    return 1 + sum(fleet.in_flight(tenant) for fleet in fleets) > caps.tenant_share * count


def _asked(model: ServedModel, talk: Conversation, services: Services, route: Route) -> str:
    """Return the version that an operator names, by its name or digest."""
    if services.tenancy.is_open and not talk.is_from_here:
        raise http_error(
            403,
            f"without tenants, {ASKED_VERSION_HEADER} is available only from the server's own "
            "machine",
            ASKED_VERSION_HEADER,
        )
    if current_tenant().role is not TenantRole.OPERATOR:
        raise http_error(
            403,
            f"{ASKED_VERSION_HEADER} needs the key of a tenant whose role is operator",
            ASKED_VERSION_HEADER,
        )
    of_route = [one for one in services.models if one.version in route.shares]
    if model.adapter is not None:
        of_route = [
            one for one in of_route if model.name in [own.name for own in one.with_adapters]
        ]
    found = (one.version for one in of_route if talk.named in (one.version, one.digest))
    version = next(found, None)
    if version is None:
        names = ", ".join(one.version for one in of_route)
        raise RequestError(
            f"{model.name} has no version {echo(talk.named)}; it has {names}",
            status=404,
            code="model_not_found",
            param=ASKED_VERSION_HEADER,
        )
    return version

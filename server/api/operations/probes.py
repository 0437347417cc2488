"""Handlers of health checks, version, load and metrics. They answer from memory; load and metrics
are summed over all servers on the port."""

from __future__ import annotations

from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING, Final

import msgspec
from quart import Response, request

from triolet.config import LocalPrefill
from triolet.errors import draining, no_worker
from triolet.ids import Role

from ...metrics.exposition import in_turns, merging
from ...scheduling.presence import ASLEEP
from ..errors import http_error
from ..generate import json_response
from ..served_models import state_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ...scheduling.status import FleetStatus, WorkerStatus
    from ..served_models import ServedModel
    from ..services import Services

VERSION: Final = installed_version("triolet")
ANOTHER_MODEL: Final = "another_model"
"""State of a live worker that gets no requests because no other worker has its model."""
OWN_METRICS: Final = "/metrics/own"
OWN_LOAD: Final = "/load/own"
"""The path that servers on one port query on one another."""
SCALED: Final = ("model", "role", "zone")
PROMETHEUS_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


def live(services: Services) -> Response:
    """Report that the process runs and its event loop responds."""
    model = services.models.first.name
    return json_response({"status": "live", "model": model, "version": VERSION})


def ready(services: Services) -> Response:
    """Report whether workers are available for at least one model. Other models may sleep until
    requested, and a server that is not ready would get no such request. Once ready, the server
    stays ready while a model wakes, because its requests wait."""
    if services.state.is_draining:
        raise draining()
    statuses = {model: model.fleet.status() for model in services.models}
    known = statuses.values()
    is_coming = services.state.was_ready and any(status.is_coming for status in known)
    if not (any(status.is_ready for status in known) or _all_sleep(known) or is_coming):
        raise no_worker(_missing_of_all(statuses, services))
    services.state.was_ready = True
    # By name, so that a replaced worker shows whether the new one is used.
    workers: dict[str, str] = {}
    for status in statuses.values():
        own = {
            one.name: one.state if _is_used(one, status.workers, services) else ANOTHER_MODEL
            for one in status.workers
            if one.capacity is not None
        }
        # One that serves two versions is alive only if both of its links are.
        workers |= {name: at for name, at in own.items() if workers.get(name, "alive") == "alive"}
    limits = "" if services.tenancy.is_open else _limits(services)
    troubles = [said for status in statuses.values() for said in _troubles(status.workers)]
    models = [
        {"name": model.version, "state": state_of(status).value}
        for model, status in statuses.items()
    ]
    return json_response(
        {"status": "ready", "model": services.models.first.name, "version": VERSION}
        | {"workers": workers}
        | ({"models": models} if len(models) > 1 else {})
        | ({"limits": limits} if limits else {})
        | ({"troubles": troubles} if troubles else {})
    )


def _all_sleep(statuses: Collection[FleetStatus]) -> bool:
    """Whether no model has workers or is loading, and at least one wakes on request."""
    is_any_loaded = any(status.told not in ASLEEP for status in statuses)
    return not is_any_loaded and any(status.is_coming for status in statuses)


def _missing_of_all(statuses: Mapping[ServedModel, FleetStatus], services: Services) -> str:
    """Return what every model lacks, with names if there are several."""
    said = {model.version: _missing(status, services) for model, status in statuses.items()}
    if len(said) == 1:
        [only] = said.values()
        return only
    return "no model is served; " + "; ".join(f"{name}: {lack}" for name, lack in said.items())


def _missing(status: FleetStatus, services: Services) -> str:
    """Return which workers a model lacks, and why if known."""
    roles = {worker.role.value for worker in status.workers if worker.state == "alive"}
    missing = sorted({role.value for role in _needed(services)} - roles)
    known = "".join(f"; {said}" for said in _troubles(status.workers))
    return f"no live worker for {' and '.join(missing) or 'a request'}{known}"


def _troubles(workers: Sequence[WorkerStatus]) -> list[str]:
    """Return known problems that keep workers from being used."""
    return [
        f"{worker.role} at {worker.address} {worker.trouble}"
        for worker in workers
        if worker.trouble
    ]


def _limits(services: Services) -> str:
    """Return how far tenant limits are shared. The server is ready also without Redis."""
    if not services.config.tenants.quotas.is_shared:
        return "own"
    return "shared" if services.quotas.store.is_well else "local"


def _needed(services: Services) -> set[Role]:
    """Return the roles needed to serve any request."""
    may_compute_there = services.config.routing.local_prefill is not LocalPrefill.OFF
    return {Role.DECODE} if may_compute_there else {Role.PREFILL, Role.DECODE}


def _is_used(worker: WorkerStatus, workers: Sequence[WorkerStatus], services: Services) -> bool:
    """Whether requests go to a worker: it has a partner of the other role, or it needs none because
    decode workers compute prompts themselves."""
    others = [other for other in workers if other is not worker]
    is_alone = worker.role in _needed(services) and not any(
        _is_paired(other, others) for other in others if other.role is Role.PREFILL
    )
    return _is_paired(worker, workers) or (len(_needed(services)) == 1 and is_alone)


def _is_paired(worker: WorkerStatus, workers: Sequence[WorkerStatus]) -> bool:
    """Whether the fleet has a worker of the other role with the same model."""
    return any(
        other.role is not worker.role and other.fingerprint == worker.fingerprint
        for other in workers
        if other.capacity is not None and other.state != "dead"
    )


def scale(services: Services) -> Response:
    """Return desired and observed numbers of processes, of all places or of the model, role and
    zone in the query.

    Raises:
      RequestError: no number is set; an autoscaler must not read that as 0.
    """
    asked = {name: request.args[name] for name in SCALED if name in request.args}
    rows = [
        place._asdict() | {"desired": desired, "observed": alive}
        for place, (desired, alive) in services.metrics.places().items()
    ]
    rows = [row for row in rows if all(row[name] == text for name, text in asked.items())]
    desired = [row["desired"] for row in rows if row["desired"] is not None]
    if asked and not desired:
        raise http_error(404, "no number is set for this model, role and zone; use `triolet scale`")
    total = sum(desired) if desired else None
    return json_response({"desired": total, "workers": rows})


async def own_metrics(services: Services) -> Response:
    """Return this process's metrics in the Prometheus text format."""
    return Response(await services.metrics.scrape(), content_type=PROMETHEUS_TEXT)


async def metrics(services: Services) -> Response:
    """Return metrics in the Prometheus text format, summed over all servers on this port."""
    peers = services.peers
    if peers is None:
        return await own_metrics(services)
    others = await peers.ask(OWN_METRICS)
    own = (await services.metrics.scrape()).decode()
    texts = {name: None if body is None else body.decode() for name, body in others.items()}
    merged = await in_turns(merging({peers.own_name: own} | texts))
    return Response(merged, content_type=PROMETHEUS_TEXT)


def version(services: Services) -> Response:
    """Return the Triolet version and the served model."""
    return json_response({"version": VERSION, "model": services.models.first.name})


def own_load(services: Services) -> Response:
    """Return the load of this process."""
    return json_response(_load(*_counted(services)))


async def load(services: Services) -> Response:
    """Return the load of all servers on this port."""
    queued, running = _counted(services)
    if services.peers is not None:
        for body in (await services.peers.ask(OWN_LOAD)).values():
            if body is not None:
                other = msgspec.json.decode(body, type=dict[str, int])
                queued, running = queued + other["queued"], running + other["running"]
    return json_response(_load(queued, running))


def _counted(services: Services) -> tuple[int, int]:
    """Return the number of waiting and running requests here, for all models."""
    statuses = [model.fleet.status() for model in services.models]
    return sum(status.queued for status in statuses), sum(status.running for status in statuses)


def _load(queued: int, running: int) -> dict[str, int]:
    return {"server_load": queued + running, "queued": queued, "running": running}

"""Handlers of /fleet/* and /admin/slo: audit, status, history, usage, rollouts and objectives,
combined over all servers on one port.

An audit shows request ids and queries every worker, so without tenants it is served only to this
machine, never through a proxy.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio
from msgspec.structs import replace
from quart import Response, request

from triolet.audit import FleetAudit, whole_audit
from triolet.errors import RequestError
from triolet.invariants import check_invariants
from triolet.units import NANOS

from ...metrics.history import add_row, grown, model_figures, objective_figures
from ...peers.peers import ALONE
from ...slo.report import rows_of, slo_report
from ...tenants.accounts import limits_of
from ...tenants.tenancy import current_tenant
from ..body import current_scope, is_from_here
from ..errors import http_error
from ..generate import json_response
from ..served_models import state_of
from .probes import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from triolet.tenants.plans import Tenant

    from ...scheduling.status import FleetStatus, WorkerStatus
    from ..served_models import ServedModel
    from ..services import Services


OWN_AUDIT: Final = "/fleet/audit/own"
"""The path that servers on one port query on one another."""


async def own_audit(services: Services) -> Response:
    """Return this server's audit."""
    return _document(await _audit(services))


async def fleet_audit(services: Services) -> Response:
    """Return violations and the audits of all servers on this port and of every worker."""
    audit = await _audit(services)
    if services.peers is not None:
        others = (await services.peers.ask(OWN_AUDIT)).values()
        siblings = tuple(FleetAudit.from_json(body) for body in others if body is not None)
        audit = replace(audit, siblings=siblings)
    return _document(audit)


def check_is_from_here(services: Services) -> None:
    """Raise 403 unless the request comes from this machine. With tenants, an operator's key was
    checked instead."""
    if not services.tenancy.is_open:
        return
    if not is_from_here(current_scope().connection, request.headers):
        raise http_error(
            403,
            f"{request.path} is available only from the server's own machine",
        )


async def _audit(services: Services) -> FleetAudit:
    """Return the audit of all models.

    Raises:
      RequestError: too many audits are running.
    """
    check_is_from_here(services)
    models = list(services.models)  # the table may change while this runs
    found: dict[str, FleetAudit] = {}
    refused: list[RequestError] = []

    async def ask(model: ServedModel) -> None:
        is_first = model is models[0]
        # Connections belong to the whole server, so count them once.
        connections = services.count_connections() if is_first else 0
        try:
            found[model.version] = await model.fleet.audit(connections)
        except RequestError as error:
            refused.append(error)

    async with trio.open_nursery() as nursery:
        for model in models:
            nursery.start_soon(ask, model)
    if refused:
        raise refused[0]
    if len(found) == 1:
        return found[models[0].version]
    own_name = ALONE if services.peers is None else services.peers.own_name
    return whole_audit(own_name, [found[model.version] for model in models])


def _document(audit: FleetAudit) -> Response:
    document = {"violations": check_invariants(audit), **msgspec.structs.asdict(audit)}
    return json_response(document)


PATH: Final = "/fleet/status"
OWN_STATUS: Final = "/fleet/status/own"
"""The path that servers on one port query on one another."""
ADDED: Final = ("queued", "running", "connections", "servers", "promises")
WORST: Final = ("brownout", "ttft_error_s")
GROUPS: Final = ("queued_by_class", "rejected_by_code", "errors_by_status")
UNAVAILABLE: Final = "503"


def own_status(services: Services) -> Response:
    """Return the status that this server process sees."""
    check_is_from_here(services)
    return json_response(_status(services))


async def fleet_status(services: Services) -> Response:
    """Return the status of all servers on this port. They share the workers."""
    check_is_from_here(services)
    status = _status(services)
    if services.peers is not None:
        for body in (await services.peers.ask(OWN_STATUS)).values():
            other = {} if body is None else msgspec.json.decode(body)
            if other.get("version") == VERSION:  # during an upgrade the fields differ
                _add(status, other)
    return json_response(status)


def _status(services: Services) -> dict[str, Any]:
    statuses = {model: model.fleet.status() for model in services.models}
    queued_by_class: Counter[str] = Counter()
    for status in statuses.values():
        queued_by_class.update(status.queued_by_class)
    overloads = [status.overload for status in statuses.values()]
    return {
        "model": services.models.first.name,
        "version": VERSION,
        "at_s": trio.current_time(),
        "is_draining": services.state.is_draining,
        "servers": 1,
        "queued": sum(status.queued for status in statuses.values()),
        "running": sum(status.running for status in statuses.values()),
        "connections": services.count_connections(),
        "brownout": max(one.brownout for one in overloads),
        "promises": sum(one.expected_returns for one in overloads),
        "ttft_error_s": max(one.error_s for one in overloads),
        **grown(services.metrics),
        "recent": services.history.since_then(),
        "queued_by_class": dict(queued_by_class),
        "rejected_by_code": _by_first(services.metrics.figures()["requests_rejected"]),
        "errors_by_status": _errors(services),
        "models": [_model(model, status, services) for model, status in statuses.items()],
        "workers": [
            _worker(worker) | {"model": model.version}
            for model, status in statuses.items()
            for worker in status.workers
        ],
        "tenants": asdict(services.tenancy.report),
    }


def _model(model: ServedModel, status: FleetStatus, services: Services) -> dict[str, Any]:
    """Return a model's state, queue and capabilities."""
    sizes = [worker.capacity for worker in status.workers if worker.capacity is not None]
    return {
        "name": model.version,
        "aliases": list(model.names[1:]),
        "digest": model.digest or None,
        "state": state_of(status).value,
        "queued": status.queued,
        "running": status.running,
        "workers": [worker.name for worker in status.workers],
        "weights_bytes": model.card.size_bytes,
        "kv_bytes": sum(one.num_blocks * one.bytes_per_block for one in sizes),
        "max_model_len": status.max_model_len,
        **services.metrics.tokens_of(model.version),
        "worker_seconds": services.metrics.worker_seconds_of(model.version),
    }


def _errors(services: Services) -> dict[str, float]:
    """Return the number of requests that ended in an error, by status. The queue's own 503s are
    counted by their reasons instead."""
    http = services.metrics.http
    counted = {**http.errors()}
    others = counted.pop(UNAVAILABLE, 0.0) - http.errors_of_queue(UNAVAILABLE)
    return counted | ({UNAVAILABLE: others} if others else {})


def _by_first(counts: Mapping[str, float]) -> dict[str, float]:
    """Sum counts over all labels but the first."""
    total: dict[str, float] = {}
    for labels, count in counts.items():
        first = labels.partition(",")[0]
        total[first] = total.get(first, 0.0) + count
    return total


def _worker(worker: WorkerStatus) -> dict[str, Any]:
    load, capacity = worker.load, worker.capacity
    return {
        "name": worker.name,
        "role": worker.role.value,
        "state": worker.state,
        "breaker": worker.breaker,
        "share": round(worker.share, 3),
        "trouble": worker.trouble,
        "labels": dict(worker.labels),
        "blocks": {
            "used": load.leased_blocks,
            "cached": load.cached_blocks,
            "free": load.free_blocks,
            "all": 0 if capacity is None else capacity.num_blocks,
        },
        "sequences": {
            "running": load.running,
            "paused": load.paused,
            "waiting": load.waiting,
        },
        "step_s": load.step_s,
        "busy_s": load.busy_s,
        "computed_tokens": load.computed_tokens,
    }


def _add(status: dict[str, Any], other: dict[str, Any]) -> None:
    """Add another server's status."""
    for name in ADDED:
        status[name] += other[name]
    for name in WORST:
        status[name] = max(status[name], other[name])
    _add_grown(status, other)
    _add_grown(status["recent"], other["recent"])
    status["recent"]["seconds"] = max(status["recent"]["seconds"], other["recent"]["seconds"])
    # All servers read one file, but one may have noticed a problem with it later.
    status["tenants"]["problem"] = status["tenants"]["problem"] or other["tenants"]["problem"]
    for group in GROUPS:
        for name, value in other[group].items():
            status[group][name] = status[group].get(name, 0) + value
    others = {model["name"]: model for model in other.get("models", ())}  # empty: an older release
    for model in status["models"]:
        for name in ("queued", "running", "prompt_tokens", "completion_tokens"):
            model[name] += others.get(model["name"], {}).get(name, 0)


def _add_grown(status: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in other["counters"].items():
        status["counters"][name] += value
    for name, histogram in other["latencies"].items():
        own = status["latencies"][name]
        own["totals"] = [a + b for a, b in zip(own["totals"], histogram["totals"], strict=True)]


FLEET_USAGE: Final = "/fleet/usage"
"""Usage of all tenants, for operators."""
OWN_USAGE: Final = "/fleet/usage/own"
"""The path that servers on one port query on one another."""
DIVIDED: Final = {
    "limits": ("requests_per_minute", "tokens_per_minute", "max_concurrent"),
    "remaining": ("requests", "tokens"),
}
"""Limits that are divided among several servers."""
WRITTEN: Final = ("tokens", "spent")
"""Totals that servers read from their shared file: the largest is the newest."""


async def own_usage(services: Services) -> Response:
    """Return the current tenant's usage."""
    tenant = current_tenant()
    usage = await _usage(tenant, services)
    if not usage["is_shared"]:
        # Names consist of letters, digits, dots, - and _, so they need no escaping.
        for others in await _asked_of_peers(f"{OWN_USAGE}?tenant={tenant.name}", services):
            _add_usage(usage, others.get(tenant.name))
    return json_response({"object": "usage", **usage})


async def fleet_usage(services: Services) -> Response:
    """Return the usage of all tenants, for operators."""
    found = await _usages(services.tenancy.all_tenants, services)
    if not all(usage["is_shared"] for usage in found):
        for others in await _asked_of_peers(OWN_USAGE, services):
            for usage in found:
                _add_usage(usage, others.get(usage["tenant"]))
    return json_response({"object": "list", "data": found})


async def server_usage(services: Services) -> Response:
    """Return what this server alone counted, of all tenants or of one."""
    name = request.args.get("tenant")
    tenants = [one for one in services.tenancy.all_tenants if name is None or one.name == name]
    return json_response({"object": "list", "data": await _usages(tenants, services)})


async def _usages(tenants: Iterable[Tenant], services: Services) -> list[dict[str, Any]]:
    found = []
    for tenant in tenants:
        found.append(await _usage(tenant, services))
        await trio.lowlevel.checkpoint()
    return found


async def _usage(tenant: Tenant, services: Services) -> dict[str, Any]:
    store, plan, limits = services.quotas.store, tenant.plan, limits_of(tenant.plan)
    account = await store.account(tenant.name, limits)
    enforced = store.enforced(limits)
    is_shared = services.config.tenants.quotas.is_shared and store.is_well
    return {
        "tenant": tenant.name,
        "plan": plan.name,
        "limits": {
            "requests_per_minute": enforced.requests,
            "tokens_per_minute": enforced.tokens,
            "max_concurrent": enforced.concurrent,
            "budget": plan.budget,
        },
        "remaining": {
            "requests": None if limits.requests is None else math.floor(account.requests),
            "tokens": None if limits.tokens is None else math.floor(account.tokens),
        },
        "in_flight": account.in_flight,
        "this_month": {"tokens": account.used_tokens, "spent": account.spent / NANOS},
        "is_shared": is_shared,
        "servers": {"counted": store.num_servers if is_shared else 1, "all": store.num_servers},
    }


async def _asked_of_peers(target: str, services: Services) -> list[dict[str, dict[str, Any]]]:
    """Return the usage reported by each peer, by tenant."""
    if services.peers is None:
        return []
    bodies = (await services.peers.ask(target)).values()
    lists = [msgspec.json.decode(body)["data"] for body in bodies if body is not None]
    return [{usage["tenant"]: usage for usage in one} for one in lists]


def _add_usage(usage: dict[str, Any], other: Mapping[str, Any] | None) -> None:
    """Add another server's part. A server reports no counts that are shared at the moment."""
    if other is None or usage["is_shared"] or other["is_shared"]:
        return
    for group, names in DIVIDED.items():
        for name in names:
            values = (usage[group][name], other[group][name])
            usage[group][name] = None if None in values else sum(values)
    usage["in_flight"] += other["in_flight"]
    for name in WRITTEN:
        usage["this_month"][name] = max(usage["this_month"][name], other["this_month"][name])
    usage["servers"]["counted"] += 1


SLO: Final = "/admin/slo"
OWN_SLO: Final = "/admin/slo/own"
"""The path that servers on one port query on one another."""


def own_slo(services: Services) -> Response:
    """Return this server process's counts of the objectives."""
    return json_response(_counted_slos(services))


async def fleet_slo(services: Services) -> Response:
    """Return burn rates and error budgets, computed from the counts of all servers on this port."""
    found = [_counted_slos(services)]
    if services.peers is not None:
        bodies = (await services.peers.ask(OWN_SLO)).values()
        found += [msgspec.json.decode(body) for body in bodies if body is not None]
    objectives = [one.objective for one in services.metrics.slos.counters]
    rows = [row for one in found for row in one["rows"]]
    observed_s = max(one["observed_s"] for one in found)
    report = slo_report(objectives, rows, observed_s)
    return json_response(report | {"servers": len(found)})


def _counted_slos(services: Services) -> dict[str, Any]:
    meter = services.metrics.slos
    now = meter.clock()
    return {"observed_s": now - meter.began_at, "rows": rows_of(meter.counters, now)}


HISTORY: Final = "/fleet/history"
OWN_HISTORY: Final = "/fleet/history/own"
"""The path that servers on one port query on one another."""


async def own_history(services: Services) -> Response:
    """Return the rows of this server process."""
    check_is_from_here(services)
    return json_response(_own_rows(services))


async def fleet_history(services: Services) -> Response:
    """Return the last hour's figures of all servers on this port, one list per figure."""
    check_is_from_here(services)
    found = [_own_rows(services)]
    if services.peers is not None:
        bodies = (await services.peers.ask(OWN_HISTORY)).values()
        others = [msgspec.json.decode(body) for body in bodies if body is not None]
        found += [one for one in others if one["version"] == VERSION]  # rows of servers may differ
    slots = sorted({int(slot) for one in found for slot in one["rows"]})
    sample_s = services.config.sample_s
    objectives = [one.objective for one in services.metrics.slos.counters]
    observed_s = max(one["observed_s"] for one in found)
    shown: dict[str, dict[str, Any]] = {"all": {}, "models": {}, "tenants": {}, "objectives": {}}
    # Servers send histograms, so that quantiles cover the requests of all servers.
    for place, slot in enumerate(slots):
        row: dict[str, Any] = {"models": {}, "tenants": {}, "objectives": {}}
        for one in found:
            add_row(row, one["rows"].get(str(slot), {}))
        then_s = observed_s - (slots[-1] - slot) * sample_s
        whole = [sum(numbers) for numbers in zip(*row["models"].values(), strict=True)]
        points = {
            "all": {"": model_figures(whole)} if whole else {},
            "models": {name: model_figures(one) for name, one in row["models"].items()},
            "tenants": {name: {"tokens_per_s": one[0]} for name, one in row["tenants"].items()},
            "objectives": {
                one.name: objective_figures(one, row["objectives"][one.name], then_s)
                for one in objectives
                if one.name in row["objectives"]
            },
        }
        for kind, of_kind in points.items():
            for name, figures in of_kind.items():
                of_name = shown[kind].setdefault(name, {})
                for figure, value in figures.items():
                    line = of_name.setdefault(figure, [None] * len(slots))
                    line[place] = None if value is None else round(value, 4)
        await trio.lowlevel.checkpoint()  # token counters come first
    return json_response(
        {
            "object": "fleet_history",
            "sample_s": sample_s,
            "servers": len(found),
            "at_s": [slot * sample_s for slot in slots],
            **shown,
            "all": shown["all"].get("", {}),
        }
    )


ROLLOUTS: Final = "/fleet/rollouts"


def fleet_rollouts(services: Services) -> Response:
    """Return the latest rollout of each model, as control last told of it. All servers have the
    same, but for how long their route is valid."""
    check_is_from_here(services)
    valid_s, zone = services.route_valid_s(), services.config.zone
    shown = [
        msgspec.structs.asdict(one)
        | {"share": one.share, "route_valid_s": valid_s[one.model] if one.has_route(zone) else None}
        for one in services.metrics.rollouts.views
    ]
    return json_response({"object": "list", "data": shown})


def _own_rows(services: Services) -> dict[str, Any]:
    slos = services.metrics.slos
    rows = {
        str(slot): {
            kind: {name: list(numbers) for name, numbers in of_kind.items()}
            for kind, of_kind in row.items()
        }
        for slot, row in services.history.rows.items()
    }
    return {"version": VERSION, "observed_s": slos.clock() - slos.began_at, "rows": rows}

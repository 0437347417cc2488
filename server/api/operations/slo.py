"""Handlers of the service level objectives, combined over all servers on one port."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from ...slo.report import rows_of, slo_report
from ..generate import json_response

if TYPE_CHECKING:
    from quart import Response

    from ..services import Services

PATH: Final = "/admin/slo"
OWN_SLO: Final = "/admin/slo/own"
"""The path that servers on one port query on one another."""


def own_slo(services: Services) -> Response:
    """Return the counts of this server process."""
    return json_response(_counted(services))


async def fleet_slo(services: Services) -> Response:
    """Return burn rates and budgets from the counts of all servers on this port."""
    found = [_counted(services)]
    if services.peers is not None:
        bodies = (await services.peers.ask(OWN_SLO)).values()
        found += [msgspec.json.decode(body) for body in bodies if body is not None]
    objectives = [one.objective for one in services.metrics.slos.counters]
    rows = [row for one in found for row in one["rows"]]
    observed_s = max(one["observed_s"] for one in found)
    report = slo_report(objectives, rows, observed_s)
    return json_response(report | {"servers": len(found)})


def _counted(services: Services) -> dict[str, Any]:
    meter = services.metrics.slos
    now = meter.clock()
    return {"observed_s": now - meter.began_at, "rows": rows_of(meter.counters, now)}

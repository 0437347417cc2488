"""Handlers of the last hour's figures, combined over all servers on one port. Servers send rows
with histograms, so quantiles come from the requests of all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from ...metrics.history import add_row, model_figures, objective_figures
from ..generate import json_response
from .fleet_status import check_is_from_here
from .probes import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quart import Response

    from ..services import Services

HISTORY: Final = "/fleet/history"
OWN_HISTORY: Final = "/fleet/history/own"
"""The path that servers on one port query on one another."""


async def own_history(services: Services) -> Response:
    """Return the rows of this server process."""
    check_is_from_here(services)
    return json_response(_own(services))


async def fleet_history(services: Services) -> Response:
    """Return the last hour's figures of all servers on this port, as one list for each."""
    check_is_from_here(services)
    found = [_own(services)]
    if services.peers is not None:
        bodies = (await services.peers.ask(OWN_HISTORY)).values()
        others = [msgspec.json.decode(body) for body in bodies if body is not None]
        found += [one for one in others if one["version"] == VERSION]  # others may have other rows
    slots = sorted({int(slot) for one in found for slot in one["rows"]})
    sample_s = services.config.sample_s
    objectives = [one.objective for one in services.metrics.slos.counters]
    observed_s = max(one["observed_s"] for one in found)
    shown: dict[str, dict[str, Any]] = {"all": {}, "models": {}, "tenants": {}, "objectives": {}}
    for place, slot in enumerate(slots):
        row: dict[str, Any] = {"models": {}, "tenants": {}, "objectives": {}}
        for one in found:
            add_row(row, one["rows"].get(str(slot), {}))
        then_s = observed_s - (slots[-1] - slot) * sample_s
        models = row["models"].values()
        points = {
            "all": {"": model_figures(_sum(models))} if models else {},
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
        await trio.lowlevel.checkpoint()  # tokens go first
    document = {"object": "fleet_history", "sample_s": sample_s, "servers": len(found)}
    at_s = [slot * sample_s for slot in slots]
    return json_response(document | {"at_s": at_s} | shown | {"all": shown["all"].get("", {})})


def _sum(rows: Iterable[Sequence[float]]) -> list[float]:
    return [sum(numbers) for numbers in zip(*rows, strict=True)]


def _own(services: Services) -> dict[str, Any]:
    slos = services.metrics.slos
    rows = {
        str(slot): {
            kind: {name: list(numbers) for name, numbers in of_kind.items()}
            for kind, of_kind in row.items()
        }
        for slot, row in services.history.rows.items()
    }
    return {"version": VERSION, "observed_s": slos.clock() - slos.began_at, "rows": rows}

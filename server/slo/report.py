"""The report of GET /admin/slo: burn rates, error budgets and whether rollouts are frozen, from the
counts of all servers on one port. Pure: counts in, JSON out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

from triolet.slo.burn_alerts import DEPLOYMENT, PAGES, PAIRS, SPANS_S

from .event_windows import EventCounts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from triolet.slo.burn_alerts import BurnAlert
    from triolet.slo.objectives import ServiceObjective

    from .meter import ObjectiveCounter

BUDGET: Final = "budget"
"""Name of the error budget's window, beside those of SPANS_S."""
CountRow: TypeAlias = tuple[str, str, str, str, int, int]
"""Objective, model, digest, window, good and total events. No model means all versions."""
WindowCounts: TypeAlias = "Mapping[str, EventCounts]"


def rows_of(counters: Iterable[ObjectiveCounter], now: float) -> list[CountRow]:
    """Return the counts of this server."""
    rows: list[CountRow] = []
    for counter in counters:
        name = counter.objective.name
        for window, span_s in (*SPANS_S.items(), (BUDGET, counter.objective.window_s)):
            rows.append((name, "", "", window, *counter.windows.over(span_s, now)))
        for (model, digest), windows in counter.versions.items():
            for window in (DEPLOYMENT.long, DEPLOYMENT.short):
                rows.append((name, model, digest, window, *windows.over(SPANS_S[window], now)))
    return rows


def slo_report(
    objectives: Iterable[ServiceObjective], rows: Iterable[Sequence[Any]], observed_s: float
) -> dict[str, Any]:
    """Return the state of all objectives.

    Args:
      objectives: the objectives.
      rows: the rows of all servers.
      observed_s: time for which the longest-running server has counted.
    """
    counts: dict[tuple[str, str, str], dict[str, EventCounts]] = {}
    for name, model, digest, window, good, total in rows:
        of_version = counts.setdefault((name, model, digest), {})
        before = of_version.get(window, EventCounts())
        of_version[window] = EventCounts(before.good + good, before.total + total)
    shown = [_shown(one, counts, observed_s) for one in objectives]
    spent = [one["name"] for one in shown if one["freezes"] and one["budget"]["is_spent"]]
    reason = f"the error budget of {' and '.join(spent)} is spent" if spent else ""
    return {
        "object": "slo_report",
        "observed_s": observed_s,
        "is_frozen": bool(spent),
        "reason": reason,
        "objectives": shown,
    }


def _shown(
    objective: ServiceObjective,
    counts: Mapping[tuple[str, str, str], WindowCounts],
    observed_s: float,
) -> dict[str, Any]:
    whole = counts.get((objective.name, "", ""), {})
    minutes = objective.window_s / 60 * objective.budget
    remaining = minutes_left(objective, whole.get(BUDGET, EventCounts()), observed_s)
    return {
        "name": objective.name,
        "description": objective.description,
        "indicator": objective.indicator,
        "target": objective.target,
        "threshold_s": objective.threshold_s,
        "window_s": objective.window_s,
        "freezes": objective.freezes,
        "budget": {
            "minutes": round(minutes, 3),
            "remaining_minutes": round(remaining, 3),
            "is_spent": remaining <= 0,
        },
        "events": {window: found._asdict() for window, found in whole.items()},
        "burn_rates": {window: burn_rate(objective, found) for window, found in whole.items()},
        "pairs": [
            {"severity": pair.severity, "long": pair.long, "short": pair.short}
            | {"limit": pair.rate_for(objective.window_s), "fires": fires(pair, objective, whole)}
            for pair in PAIRS
        ],
        "alerts": sorted({pair.severity for pair in PAIRS if fires(pair, objective, whole)}),
        "versions": [
            {
                "model": model,
                "version": digest,
                "events": {window: found._asdict() for window, found in of_version.items()},
                "burn_rates": {
                    window: burn_rate(objective, found) for window, found in of_version.items()
                },
                "is_burning": fires(DEPLOYMENT, objective, of_version),
            }
            for (name, model, digest), of_version in counts.items()
            if name == objective.name and model
        ],
    }


def firing_pages(counters: Iterable[ObjectiveCounter], now: float) -> list[str]:
    """Return the objectives with a page alert that fires even without the events of candidates that
    were rolled back."""
    found = []
    for counter in counters:
        counts = _without_rolled_back(counter, now)
        if any(fires(pair, counter.objective, counts) for pair in PAGES):
            found.append(counter.objective.name)
    return found


def _without_rolled_back(counter: ObjectiveCounter, now: float) -> dict[str, EventCounts]:
    found = {}
    for window in {window for pair in PAGES for window in (pair.long, pair.short)}:
        good, total = counter.windows.over(SPANS_S[window], now)
        gone = [one.over(SPANS_S[window], now) for one in counter.rolled_back]
        good, total = good - sum(one.good for one in gone), total - sum(one.total for one in gone)
        found[window] = EventCounts(good, total)
    return found


def minutes_left(objective: ServiceObjective, found: EventCounts, observed_s: float) -> float:
    """Return the remaining error budget. Time that was not observed counts as good, so a server
    that has just started has its whole budget."""
    spent_s = (found.bad_share or 0.0) * min(observed_s, objective.window_s)
    return (objective.window_s * objective.budget - spent_s) / 60


def burn_rate(objective: ServiceObjective, found: EventCounts) -> float | None:
    """Return the burn rate: how many times too fast the budget is spent; None without events."""
    return None if found.bad_share is None else found.bad_share / objective.budget


def fires(pair: BurnAlert, objective: ServiceObjective, whole: WindowCounts) -> bool:
    """Return whether an alert fires: both of its windows burn too fast."""
    both = [whole.get(window, EventCounts()) for window in (pair.long, pair.short)]
    limit = pair.rate_for(objective.window_s)
    is_burning = all((burn_rate(objective, found) or 0.0) > limit for found in both)
    return is_burning and both[0].bad >= pair.min_bad

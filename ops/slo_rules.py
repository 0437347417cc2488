"""`triolet slo rules`: writes Prometheus recording and alert rules for the objectives, with the
names and labels of sloth, so that its public dashboards work."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import yaml

from triolet.config import DAY_S
from triolet.slo.burn_alerts import DEPLOYMENT, PAIRS, SPANS_S
from triolet.slo.objectives import read_objectives

if TYPE_CHECKING:
    from triolet.config import ObjectivesConfig
    from triolet.slo.objectives import ServiceObjective

RUNBOOK: Final = "docs/operations/alerts.md#"
BY_VERSION: Final = " by (model, version) "
HEADER: Final = """\
# Prometheus rules for service level objectives, written by `triolet slo rules`. Do not edit: change
# the objectives and run it again (docs/SLO.md).
"""
ALERTS: Final = {
    "page": ("TrioletSloPage", "Objective {} is using up its error budget fast"),
    "ticket": ("TrioletSloTicket", "Objective {} is using up its error budget slowly"),
    "deployment": ("TrioletSloDeployment", "One version is using up the error budget of {} fast"),
}
"""Name and summary by severity."""


def write_rules(config: ObjectivesConfig) -> None:
    """Print the rules.

    Raises:
      ConfigError: the objectives are invalid.
    """
    groups = [
        {"name": f"sloth-slo-{kind}-{one.service}-{one.name}", "rules": rules}
        for one in read_objectives(config)
        for kind, rules in ObjectiveRules(one).by_kind().items()
    ]
    rules = yaml.safe_dump({"groups": groups}, sort_keys=False, width=10**6, allow_unicode=True)
    sys.stdout.write(HEADER + rules)


class ObjectiveRules:
    """The rules of one objective.

    Args:
      objective: the objective.
    """

    def __init__(self, objective: ServiceObjective) -> None:
        self._objective = objective
        self._labels = {
            "sloth_id": f"{objective.service}-{objective.name}",
            "sloth_service": objective.service,
            "sloth_slo": objective.name,
        }
        matchers = (f'{label}="{value}"' for label, value in self._labels.items())
        self._own = f"{{{', '.join(matchers)}}}"

    def by_kind(self) -> dict[str, list[dict[str, Any]]]:
        """Return the rules for error ratios, for the budget, and the alerts."""
        days = f"{self._objective.window_s / DAY_S:g}d"
        ratios = {window: self._error_ratio(window) for window in SPANS_S}
        latest = f"slo:sli_error:ratio_rate5m{self._own}[{days}]"
        ratios[days] = f"sum_over_time({latest}) / count_over_time({latest})"
        return {
            "sli-recordings": [
                self._record(f"slo:sli_error:ratio_rate{window}", ratio, sloth_window=window)
                for window, ratio in ratios.items()
            ],
            "meta-recordings": self._budget(days),
            "alerts": [
                *(
                    self._alert(severity, self._burning(severity))
                    for severity in ("page", "ticket")
                ),
                self._alert(DEPLOYMENT.severity, self._deployment()),
            ],
        }

    def _budget(self, days: str) -> list[dict[str, Any]]:
        one, own = self._objective, self._own
        spent = f"/ on(sloth_id, sloth_slo, sloth_service) group_left slo:error_budget:ratio{own}"
        expressions = {
            "slo:objective:ratio": f"vector({one.target})",
            "slo:error_budget:ratio": f"vector({one.budget})",
            "slo:time_period:days": f"vector({days[:-1]})",
            "slo:current_burn_rate:ratio": f"slo:sli_error:ratio_rate5m{own} {spent}",
            "slo:period_burn_rate:ratio": f"slo:sli_error:ratio_rate{days}{own} {spent}",
            "slo:period_error_budget_remaining:ratio": f"1 - slo:period_burn_rate:ratio{own}",
            "sloth_slo_info": "vector(1)",
        }
        return [self._record(name, expression) for name, expression in expressions.items()]

    def _record(self, name: str, expression: str, **labels: str) -> dict[str, Any]:
        return {"record": name, "expr": expression, "labels": {**self._labels, **labels}}

    def _sum(self, which: str, function: str, window: str, by: str = "") -> str:
        counter = f'triolet_slo_{which}_total{{slo="{self._objective.name}"}}'
        return f"sum{by}({function}({counter}[{window}]))"

    def _error_ratio(self, window: str, by: str = "") -> str:
        total = self._sum("events", "rate", window, by)
        return f"1 - {self._sum('good', 'rate', window, by)} / ({total} > 0)"

    def _above(self, rate: float) -> str:
        return f"> ({rate:g} * {self._objective.budget})"

    def _burning(self, severity: str) -> str:
        """Return the condition that a pair of this severity burns too fast."""
        conditions = []
        for pair in PAIRS:
            if pair.severity == severity:
                above = self._above(pair.rate_for(self._objective.window_s))
                both = (
                    f"slo:sli_error:ratio_rate{window}{self._own} {above}"
                    for window in (pair.long, pair.short)
                )
                conditions.append(f"({' and ignoring (sloth_window) '.join(both)})")
        return " or ignoring (sloth_window) ".join(conditions)

    def _deployment(self) -> str:
        """Return the condition that a version burns too fast. The number of bad events is rounded,
        because Prometheus extrapolates increases."""
        long, by = DEPLOYMENT.long, BY_VERSION
        above = self._above(DEPLOYMENT.rate_for(self._objective.window_s))
        total = self._sum("events", "increase", long, by)
        bad = f"round({total} - {self._sum('good', 'increase', long, by)})"
        both = (f"({self._error_ratio(w, by)}) {above}" for w in (long, DEPLOYMENT.short))
        return " and ".join((*both, f"{bad} >= {DEPLOYMENT.min_bad}"))

    def _alert(self, severity: str, expression: str) -> dict[str, Any]:
        name, summary = ALERTS[severity]
        one = self._objective
        return {
            "alert": name,
            "expr": expression,
            "labels": {**self._labels, "severity": severity, "sloth_severity": severity},
            "annotations": {
                "summary": summary.format(one.name),
                "description": "{{ $value | humanizePercentage }} of events are bad"
                "{{ with $labels.version }} in {{ $labels.model }} {{ . }}{{ end }}. "
                f"{one.description}",
                "runbook": RUNBOOK + name.lower(),
            },
        }

"""Tests of the alerts of rollouts: real promtool runs the shipped rules."""

from __future__ import annotations

import json
import operator
import re
from typing import TYPE_CHECKING, NamedTuple

import pytest
import yaml

from ..house.test_layout import ROOT
from .test_slo_rules import GROUPS, PER_STEP, Stretch, needs_promtool, promtool, series

if TYPE_CHECKING:
    from pathlib import Path

CAUSES = ROOT / "ops" / "monitoring" / "alerts.yml"
OWN = [
    group
    for group in yaml.safe_load(CAUSES.read_text("utf-8"))["groups"]
    if group["name"] == "triolet-rollouts"
]
INTERVAL_S = 10
CANDIDATE = 'model="chat",version="chat-2"'
BURNS = series('model="chat-2",version="v2"', Stretch(40, 0, 0), Stretch(8, 2, 1))
GOOD = series('model="chat-1",version="v1"', Stretch(60, PER_STEP, 0))


class Case(NamedTuple):
    """Samples of a metric, and what fires when."""

    alert: str
    inputs: list[dict[str, str]]
    firing: dict[int, str]


def phase(name: str, values: str) -> list[dict[str, str]]:
    labels = f'{CANDIDATE},phase="{name}"'
    return [{"series": f"triolet_rollout_phase{{{labels}}}", "values": values}]


def gauge(name: str, labels: str, values: str) -> list[dict[str, str]]:
    return [{"series": f"triolet_{name}{{{labels}}}", "values": values}]


CASES = {
    "paused for half an hour": Case(
        "TrioletRolloutPaused",
        phase("paused", "0 1x182 0x5"),
        {1790: "", 1820: CANDIDATE, 1850: ""},
    ),
    "paused, and resumed in time": Case(
        "TrioletRolloutPaused", phase("paused", "1x170 0x30"), {1700: "", 1990: ""}
    ),
    "one server's route is not renewed": Case(
        "TrioletRouteExpired",
        gauge("route_valid_seconds", 'model="chat",server="server-0"', "9x40")
        + gauge("route_valid_seconds", 'model="chat",server="server-1"', "9x9 0x4 9x9"),
        {110: "", 130: 'model="chat"', 160: ""},
    ),
    "rolled back": Case(
        "TrioletRolledBack",
        phase("rolled_back", "0x3 1x10"),
        {30: "", 40: CANDIDATE},
    ),
    "the candidate burns": Case(
        "TrioletRolloutBurns",
        [*GOOD, *BURNS, *phase("canary", "1x60")],
        {400: "", 470: CANDIDATE},
    ),
    "the candidate of a paused rollout burns": Case(
        "TrioletRolloutBurns",
        [*GOOD, *BURNS, *phase("canary", "1x40 0x20"), *phase("paused", "0x40 1x20")],
        {470: CANDIDATE},
    ),
    "the rollout has ended": Case(
        "TrioletRolloutBurns", [*GOOD, *BURNS, *phase("canary", "1x40 0x20")], {470: ""}
    ),
    "another version burns": Case(
        "TrioletRolloutBurns",
        [*BURNS, *gauge("rollout_phase", 'model="chat",version="chat-3",phase="canary"', "1x60")],
        {470: ""},
    ),
}


@needs_promtool
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_alert_fires_when_it_should_and_ends(tmp_path: Path, case: Case) -> None:
    slos = [one for one in GROUPS if one["name"].endswith("-availability")]
    groups = [*slos, *OWN]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": groups}))
    expected = [
        {
            "expr": f'sum by (model, version) (ALERTS{{alertname="{case.alert}",'
            'alertstate="firing"})',
            "eval_time": f"{at_s}s",
            "exp_samples": [{"labels": f"{{{labels}}}", "value": 1}] if labels else [],
        }
        for at_s, labels in case.firing.items()
    ]
    document = {
        "rule_files": ["rules.yml"],
        "group_eval_order": [one["name"] for one in groups],
        "evaluation_interval": f"{INTERVAL_S}s",
        "tests": [
            {
                "interval": f"{INTERVAL_S}s",
                "input_series": case.inputs,
                "promql_expr_test": expected,
            }
        ],
    }
    (tmp_path / "test.yml").write_text(json.dumps(document))
    promtool("test", "rules", "test.yml", cwd=tmp_path)


@needs_promtool
def test_promtool_accepts_the_rules_about_causes(tmp_path: Path) -> None:
    assert "SUCCESS" in promtool("check", "rules", str(CAUSES), cwd=tmp_path)


TEMPLATE = yaml.safe_load((CAUSES.parent / "analysis_template.yaml").read_text("utf-8"))
GATES = {one["name"]: one for one in TEMPLATE["spec"]["metrics"]}
COMPARE = {"==": operator.eq, "<=": operator.le}


def requests(arm: str, good: int, bad: int) -> list[dict[str, str]]:
    """Return the counts of errors of one version in the current step."""
    return [
        row
        for result, count in (("good", good), ("bad", bad))
        for row in gauge(
            "rollout_requests",
            f'{CANDIDATE},signal="errors",arm="{arm}",result="{result}"',
            f"{count}x5",
        )
    ]


@needs_promtool
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "inputs", "value", "passes"),
    [
        ("stopped", [*phase("paused", "0x5"), *phase("rolled_back", "0x5")], 0, True),
        ("stopped", [*phase("paused", "1x5"), *phase("rolled_back", "0x5")], 1, False),
        ("more-errors", [*requests("stable", 990, 10), *requests("candidate", 98, 2)], 0.01, False),
        ("more-errors", [*requests("stable", 990, 10), *requests("candidate", 99, 1)], 0, True),
        ("more-errors", [*requests("stable", 990, 10), *requests("candidate", 0, 0)], 0, True),
        ("dearer", [], 1, True),
        ("dearer", gauge("rollout_cost_ratio", f'{CANDIDATE},bound="low"', "1.2x5"), 1.2, False),
        ("shadow-delays", gauge("shadow_rows_while_waiting", CANDIDATE, "3x5"), 3, False),
    ],
)
def test_the_template_for_argo_asks_for_what_it_judges(
    tmp_path: Path, name: str, inputs: list[dict[str, str]], value: float, *, passes: bool
) -> None:
    query = GATES[name]["provider"]["prometheus"]["query"].replace("{{args.model}}", "chat")
    expected = {"expr": query, "eval_time": "30s", "exp_samples": [{"value": value}]}
    case = {"interval": "10s", "input_series": inputs, "promql_expr_test": [expected]}
    (tmp_path / "test.yml").write_text(json.dumps({"tests": [case]}))
    promtool("test", "rules", "test.yml", cwd=tmp_path)
    condition = re.fullmatch(r"result\[0\] (==|<=) ([\d.]+)", GATES[name]["successCondition"])
    assert condition is not None
    assert COMPARE[condition[1]](value, float(condition[2])) == passes


def test_the_template_s_metrics_are_told_of() -> None:
    page = (ROOT / "docs" / "operations" / "rollout_gates.md").read_text("utf-8")
    assert set(re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)) == set(GATES)

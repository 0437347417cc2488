"""Tests that the dashboard and the alerts use existing metrics and wording that operators
understand."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import promql_parser
import pytest
import yaml

from ops.control.worker_seconds import OTHERS

from .test_documents import exposed_metrics
from .test_layout import ROOT

MONITORING = ROOT / "ops" / "monitoring"
BOARD = json.loads((MONITORING / "grafana.json").read_text("utf-8"))
PANELS: list[dict[str, Any]] = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
GROUPS, GENERATED = (
    yaml.safe_load((MONITORING / name).read_text("utf-8"))["groups"]
    for name in ("alerts.yml", "slo_rules.yml")
)
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
OF_OBJECTIVES: list[dict[str, Any]] = [rule for group in GENERATED for rule in group["rules"]]
ALERTS = [rule for rule in (*RULES, *OF_OBJECTIVES) if "alert" in rule]
RECORDS = {rule["record"] for rule in OF_OBJECTIVES if "record" in rule}

SAMPLE_OF_HISTOGRAM = re.compile(r"_(bucket|count|sum)$")
UNITS = {"short", "reqps", "ops", "cpm", "s", "bytes", "Bps", "percentunit"}
OF_THE_CLIENT = {"process_cpu_seconds_total", "process_resident_memory_bytes"}
OF_PROMETHEUS = {"ALERTS"}


def selectors(expression: str) -> tuple[list[str], list[str]]:
    """Return the metric names that an expression selects, and those selected over a range.

    Raises:
      ValueError: Prometheus would reject the expression.
    """
    names: list[str] = []
    over_time: list[str] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            names.append(str(node.name))
        elif isinstance(node, promql_parser.MatrixSelector):
            over_time.append(str(node.vector_selector.name))

    # Grafana inserts a duration there.
    promql_parser.walk(promql_parser.parse(expression.replace("$__rate_interval", "1m")), visit)
    return names, over_time


def family(name: str) -> str:
    """Return the name of a sample's metric family."""
    of_histogram = SAMPLE_OF_HISTOGRAM.sub("", name)
    return of_histogram if of_histogram in exposed_metrics() else name


def expressions() -> dict[str, str]:
    """Return every expression by its location."""
    found = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in PANELS
        for target in panel["targets"]
    }
    found |= {rule["alert"]: rule["expr"] for rule in RULES}
    return found | {name_of(rule): rule["expr"] for rule in OF_OBJECTIVES}


def name_of(rule: dict[str, Any]) -> str:
    """Return a rule's name with its objective, because the rules of all objectives have the same
    names."""
    return f"{rule.get('alert') or rule['record']} {rule['labels']['sloth_slo']}"


@pytest.mark.parametrize("where", expressions())
def test_expressions_are_promql_and_of_metrics_that_exist(where: str) -> None:
    names, over_time = selectors(expressions()[where])
    assert names or expressions()[where].startswith("vector("), "selects no metric"
    assert {
        family(name) for name in names
    } <= exposed_metrics() | OF_THE_CLIENT | OF_PROMETHEUS | RECORDS
    by_themselves = Counter(names) - Counter(over_time)
    assert not [name for name in by_themselves if name.endswith("_total")], "counters"


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_a_panel_says_what_it_shows_and_in_which_unit(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["datasource"]["uid"] == "${datasource}"
    assert all(target["legendFormat"] for target in panel["targets"])


def test_panels_are_told_apart_and_cover_nothing() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in BOARD["panels"]]
    assert len(set(titles)) == len(titles)
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: str(rule["alert"]))
def test_an_alert_says_what_is_wrong_and_where_to_read_on(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"page", "ticket", "deployment", "info"}
    # A pair of windows already delays the alert.
    assert "sloth_slo" in rule["labels"] or re.fullmatch(r"\d+[sm]", rule["for"])
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook"}
    assert notes["summary"]
    assert notes["description"].endswith(".")
    path, _, anchor = notes["runbook"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text("utf-8"), re.MULTILINE)
    assert anchor in {heading.lower().replace(" ", "-") for heading in headings}


def test_every_rule_has_a_name_of_its_own() -> None:
    names = [rule["alert"] for rule in RULES] + [name_of(rule) for rule in OF_OBJECTIVES]
    assert len(set(names)) == len(names)


def test_no_rate_of_worker_seconds_takes_in_versions_that_join_others() -> None:
    """Their sum jumps by the version's whole past: a thousand workers in the panel."""
    asked = re.findall(r"triolet_worker_seconds_total(\{[^}]*\})?", str(expressions()))
    assert asked
    assert set(asked) == {f'{{version!="{OTHERS}"}}'}


def test_no_alert_counts_lines_of_batches_that_come_again() -> None:
    refusals = re.findall(r"triolet_requests_rejected_total\{([^}]*)\}", str(RULES))
    assert refusals
    assert all('class!="batch"' in labels for labels in refusals)
    assert str(RULES).count("triolet_requests_rejected_total") == len(refusals)

"""Tests of `triolet slo rules` with the real promtool: the rules are valid, and each pair of
windows fires and stops as docs/SLO.md says. tests/server/slo/test_report.py tests the same for the
server's figures."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import yaml

from ops.cli.commands import main
from triolet.config import ObjectivesConfig
from triolet.slo.burn_alerts import DEPLOYMENT, PAIRS, SPANS_S, BurnAlert
from triolet.slo.objectives import read_objectives

from ..house.test_layout import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from triolet.slo.objectives import ServiceObjective

AVAILABILITY = read_objectives(ObjectivesConfig())[0]
SHIPPED = ROOT / "ops" / "monitoring" / "slo_rules.yml"
GROUPS = yaml.safe_load(SHIPPED.read_text("utf-8"))["groups"]
NAMES = {"page": "TrioletSloPage", "ticket": "TrioletSloTicket"}
DEPLOYED = "TrioletSloDeployment"
PER_STEP = 10_000
BEFORE = 10
INTERVALS_S = {"5m": 60, "30m": 300, "2h": 1800, "6h": 1800}
"""Scrape interval by the short window of a pair."""
TIMEOUT_S = 60.0
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (of the package prometheus) is missing"
)


def written(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["slo", "rules", *options]) == 0
    return capsys.readouterr().out


def promtool(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        ["promtool", *arguments], cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Stretch(NamedTuple):
    """Consecutive scrapes with the same traffic."""

    num_steps: int
    events: int
    bad: int


def series(labels: str, *stretches: Stretch) -> list[dict[str, str]]:
    """Return the samples of both counters, which start at 0."""
    found = []
    for name in ("events", "good"):
        values, value = ["0"], 0
        for one in stretches:
            step = one.events - one.bad * (name == "good")
            if one.num_steps:
                values.append(f"{value + step}+{step}x{one.num_steps - 1}")
            value += step * one.num_steps
        labelled = f'triolet_slo_{name}_total{{slo="availability",{labels}}}'
        found.append({"series": labelled, "values": " ".join(values)})
    return found


def check_firing(
    folder: Path, interval_s: int, inputs: list[dict[str, str]], firing: dict[int, list[str]]
) -> None:
    """Run the shipped rules of one objective on these series, and compare which alerts fire at each
    step."""
    own = [one for one in GROUPS if one["name"].endswith("-availability")]
    (folder / "rules.yml").write_text(json.dumps({"groups": own}))
    query = 'count by (alertname) (ALERTS{alertstate="firing"})'
    expected = [
        {
            "expr": query,
            "eval_time": f"{step * interval_s}s",
            "exp_samples": [
                {"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(names)
            ],
        }
        for step, names in firing.items()
    ]
    document = {
        "rule_files": ["rules.yml"],
        "group_eval_order": [one["name"] for one in own],
        "evaluation_interval": f"{interval_s}s",
        "tests": [
            {
                "interval": f"{interval_s}s",
                "input_series": inputs,
                "promql_expr_test": expected,
            }
        ],
    }
    (folder / "test.yml").write_text(json.dumps(document))
    promtool("test", "rules", "test.yml", cwd=folder)


def steps_of(window: str, interval_s: int) -> int:
    return int(SPANS_S[window] / interval_s)


@needs_promtool
@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.rate:g}")
@pytest.mark.parametrize("excess", [1.05, 0.95], ids=["above", "below"])
def test_each_pair_fires_above_its_rate_and_rests_when_its_short_window_is_good(
    tmp_path: Path, pair: BurnAlert, excess: float
) -> None:
    """Earlier traffic is good, and large enough that no pair with longer windows fires."""
    interval_s = INTERVALS_S[pair.short]
    long, short = steps_of(pair.long, interval_s), steps_of(pair.short, interval_s)
    bad = round(PER_STEP * pair.rate * AVAILABILITY.budget * excess)
    burning = Stretch(long, PER_STEP, bad)
    good = Stretch(short, PER_STEP, 0)
    inputs = series('model="m",version="v"', Stretch(BEFORE, 100 * PER_STEP, 0), burning, good)
    end = BEFORE + long
    fires = [NAMES[pair.severity]] if excess > 1 else []
    check_firing(tmp_path, interval_s, inputs, {end: fires, end + short: []})


@needs_promtool
@pytest.mark.slow
def test_a_deployment_fires_for_the_version_that_burns_once_five_events_are_bad(
    tmp_path: Path,
) -> None:
    interval_s = 10
    old = series('model="m",version="old"', Stretch(60, PER_STEP, 0))
    for bad, fires in ((4, []), (5, [DEPLOYED])):
        new = [Stretch(40, 0, 0), Stretch(bad, 2, 1), Stretch(20, 2, 0)]
        inputs = old + series('model="m",version="new"', *new)
        check_firing(tmp_path, interval_s, inputs, {40: [], 40 + bad: fires, 44 + bad: []})


@needs_promtool
def test_promtool_accepts_the_rules_and_they_are_those_that_are_shipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = written(capsys)
    assert rules == SHIPPED.read_text("utf-8"), "run `triolet slo rules` again"
    (tmp_path / "rules.yml").write_text(rules)
    num_rules = sum(len(group["rules"]) for group in yaml.safe_load(rules)["groups"])
    said = promtool("check", "rules", "rules.yml", cwd=tmp_path)
    assert f"SUCCESS: {num_rules} rules found" in said


def rules_of(text: str, one: ServiceObjective) -> dict[str, Any]:
    return {
        rule.get("record") or rule["labels"]["severity"]: rule
        for group in yaml.safe_load(text)["groups"]
        for rule in group["rules"]
        if rule["labels"]["sloth_slo"] == one.name
    }


def test_records_have_the_names_and_labels_of_sloth(capsys: pytest.CaptureFixture[str]) -> None:
    rules = rules_of(written(capsys), AVAILABILITY)
    assert set(rules) == {
        *(f"slo:sli_error:ratio_rate{window}" for window in [*SPANS_S, "30d"]),
        *("slo:objective:ratio", "slo:error_budget:ratio", "slo:time_period:days"),
        *("slo:current_burn_rate:ratio", "slo:period_burn_rate:ratio"),
        *("slo:period_error_budget_remaining:ratio", "sloth_slo_info"),
        *("page", "ticket", DEPLOYMENT.severity),
    }
    labels = {
        "sloth_id": "triolet-availability",
        "sloth_service": "triolet",
        "sloth_slo": "availability",
    }
    assert rules["slo:error_budget:ratio"] == {
        "record": "slo:error_budget:ratio",
        "expr": "vector(0.01)",
        "labels": labels,
    }
    assert rules["slo:sli_error:ratio_rate5m"]["labels"] == labels | {"sloth_window": "5m"}
    assert labels.items() <= rules["page"]["labels"].items()


def test_a_file_of_objectives_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shipped = (ROOT / "triolet" / "slo" / "slo.yaml").read_text("utf-8").split("---")[0]
    own = tmp_path / "own.yaml"
    own.write_text(shipped.replace("30d", "15d").replace("0.99}", "0.9995}"), "utf-8")
    rules = rules_of(written(capsys, "--slo", str(own)), AVAILABILITY)
    assert "> (7.2 * 0.0005)" in rules["page"]["expr"]
    assert "slo:sli_error:ratio_rate15d" in rules
    own.write_text(shipped.replace("indicatorRef: availability", "indicatorRef: uptime"), "utf-8")
    assert main(["slo", "rules", "--slo", str(own)]) == 2
    assert "objective availability: indicatorRef is 'uptime'" in capsys.readouterr().err

"""Tests of the worked examples of docs/ROLLOUTS.md: the forecast and the judge compute them."""

from __future__ import annotations

import re

import pytest

from ops.rollouts.forecast import forecast
from ops.rollouts.judge import cost_bounds
from ops.rollouts.plan import Objective

from .rollout_cases import COSTS, begun, plan
from .test_judge import ROOT, costing, look, requests

TEXT = (ROOT / "docs" / "ROLLOUTS.md").read_text("utf-8")


def table(heading: str) -> list[list[str]]:
    """Return the rows of the page's table with this heading."""
    _, _, rest = TEXT.partition(f"| {heading}")
    rows = re.findall(r"^\|(.+)\|$", rest.partition("\n\n")[0], re.MULTILINE)[1:]
    assert rows
    return [[cell.strip() for cell in row.split("|")] for row in rows]


@pytest.mark.parametrize(("users", "each", "steps"), table("users | requests"))
def test_examples_of_forecasts(users: str, each: str, steps: str) -> None:
    asked = plan(shares=(0.01, 0.1, 0.5, 1.0))
    daily = [int(each.replace(",", ""))] * int(users.replace(",", ""))
    shares = forecast(asked, daily).shares
    assert steps == (", ".join(f"{100 * share:g}" for share in shares) or "none")


@pytest.mark.parametrize(
    ("canary", "canary_bad", "stable", "stable_bad", "verdict", "figure"), table("candidate's")
)
def test_examples_of_verdicts(
    canary: str, canary_bad: str, stable: str, stable_bad: str, verdict: str, figure: str
) -> None:
    chosen = plan(objectives={"errors": Objective(0.99)})
    new = requests(chosen, ("new",), int(canary) - int(canary_bad), int(canary_bad))
    old = requests(chosen, ("old",), int(stable) - int(stable_bad), int(stable_bad))
    found, _ = look(chosen, new, old)
    assert verdict == (found.reason if found.action == "rollback" else "goes on")
    shown = re.search(r"(?:the chance of this|log e) is ([\d.e-]+\d)", found.said)
    assert figure == (shown[1] if shown and found.action == "rollback" else "")


def test_the_limit_of_the_fast_test_is_the_one_that_is_told() -> None:
    chosen = plan(objectives={"errors": Objective(0.99)})
    new = requests(chosen, ("new",), 95, 5)
    found, _ = look(chosen, new, requests(chosen, ("old",), 900))
    limit = re.search(r"here log e of ([\d.]+)\.", TEXT)
    assert limit is not None
    assert f"the limit is {limit[1]}" in found.said


@pytest.mark.parametrize(("ratio", "batches", "low", "high", "verdict"), table("ratio | batches"))
def test_examples_of_costs(ratio: str, batches: str, low: str, high: str, verdict: str) -> None:
    chosen = plan(objectives={"errors": Objective(0.99)}, costs=COSTS)
    evidence = begun(chosen, 2)
    evidence.cost = costing(float(ratio), int(batches))
    bounds = cost_bounds(evidence)
    assert bounds is not None
    assert [f"{bounds[0]:.2f}", f"{bounds[1]:.3f}"] == [low, high]
    new = requests(chosen, ("old", "new"), 20, each=10)
    old = requests(chosen, ("old", "old"), 180)
    found, _ = look(chosen, new, old, after_s=70.0, evidence=evidence)
    assert found.action == verdict

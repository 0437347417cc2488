"""Tests of reading the objectives file: valid documents, and the errors for invalid ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml

from triolet.config import ObjectivesConfig
from triolet.errors import ConfigError
from triolet.service_class import ServiceClass
from triolet.slo.burn_alerts import PAIRS
from triolet.slo.objectives import DEFAULT_FILE, Indicator, parse_objectives, read_objectives

if TYPE_CHECKING:
    from pathlib import Path

    from triolet.slo.objectives import ServiceObjective

MOST = 3
LATE: dict[str, Any] = {"op": "lte", "value": 2.5, "target": 0.95}


def document(**spec: object) -> dict[str, Any]:
    """Return a valid document with changes to its spec."""
    return {
        "apiVersion": "openslo/v1",
        "kind": "SLO",
        "metadata": {"name": "one"},
        "spec": {
            "service": "triolet",
            "indicatorRef": "availability",
            "timeWindow": [{"duration": "30d", "isRolling": True}],
            "budgetingMethod": "Occurrences",
            "objectives": [{"target": 0.99}],
            **spec,
        },
    }


def named(name: str, **annotations: str) -> dict[str, Any]:
    notes = {f"triolet/{key.replace('_', '-')}": text for key, text in annotations.items()}
    return {**document(), "metadata": {"name": name, "annotations": notes}}


def read(*documents: dict[str, Any]) -> tuple[ServiceObjective, ...]:
    return parse_objectives(yaml.safe_dump_all(documents).encode(), MOST)


def window(duration: str, *, is_rolling: bool = True) -> dict[str, Any]:
    return document(timeWindow=[{"duration": duration, "isRolling": is_rolling}])


def test_the_shipped_file_has_one_objective_for_each_indicator() -> None:
    found = read_objectives(ObjectivesConfig())
    assert [one.indicator for one in found] == list(Indicator)
    assert [one.name for one in found] == list(Indicator)
    assert {one.budget for one in found} == {0.01, 0.005, 0.05}


def test_fields_and_annotations_are_read() -> None:
    notes = {"model": "chat, code", "class": "critical", "budget_policy": "freeze rollouts at 0"}
    covered = named("slow", **notes)
    covered["spec"] = document(indicatorRef="first-token", objectives=[LATE])["spec"]
    plain, slow = read(document(), covered)
    assert (plain.threshold_s, plain.freezes, plain.window_s) == (None, False, 30 * 86_400)
    assert (slow.threshold_s, slow.freezes, slow.target) == (2.5, True, 0.95)
    assert plain.covers("other", ServiceClass.BATCH)
    assert slow.covers("code", ServiceClass.CRITICAL)
    assert not slow.covers("other", ServiceClass.CRITICAL)
    assert not slow.covers("chat", ServiceClass.DEFAULT)


@pytest.mark.parametrize(("duration", "days"), [("7d", 7), ("28d", 28), ("90d", 90)])
def test_windows_scale_the_burn_rates_so_that_alerts_mean_the_same_share(
    duration: str, days: int
) -> None:
    [found] = read(window(duration))
    assert found.window_s == days * 86_400
    assert [one.rate_for(found.window_s) for one in PAIRS] == pytest.approx(
        [rate * days / 30 for rate in (14.4, 6, 3, 1)]
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (document(indicatorRef="speed"), "objective one: indicatorRef is 'speed'; allowed: avail"),
        (document(objectives=[{"target": 1}]), "`float` < 1.0 - at `$.spec.objectives[0].target`"),
        (document(objectives=[{"target": 0}]), "`float` > 0.0 - at `$.spec.objectives[0].target`"),
        (document(objectives=[{"target": "99 %"}]), "document 1: Expected `float`, got `str`"),
        (document(objectives=[]), "length >= 1 - at `$.spec.objectives`"),
        (document(objectives=[LATE]), "an objective for availability has only `target`"),
        (document(indicatorRef="queue-wait"), "queue-wait has `op: lte` and `value`, in seconds"),
        (document(indicatorRef="queue-wait", objectives=[{"target": 0.9, "op": "lte"}]), "`value`"),
        (document(indicatorRef="queue-wait", objectives=[{**LATE, "op": "gte"}]), "'gte'"),
        (document(indicatorRef="queue-wait", objectives=[{**LATE, "value": 0}]), "> 0.0"),
        (window("3d"), "timeWindow is '3d', isRolling true; allowed: 7d to 90d, isRolling"),
        (window("91d"), "timeWindow is '91d'"),
        (window("169h"), "timeWindow is '169h'"),
        (window("1M"), "timeWindow is '1M'"),
        (window("4w"), "timeWindow is '4w'"),
        (window("30d", is_rolling=False), "isRolling false; allowed"),
        (document(budgetingMethod="Timeslices"), "Invalid enum value 'Timeslices'"),
        (document(alertPolicies=[]), "unknown field `alertPolicies` - at `$.spec`"),
        ({**document(), "apiVersion": "openslo/v2"}, "Invalid enum value 'openslo/v2'"),
        ({**document(), "kind": "SLI"}, "Invalid enum value 'SLI'"),
        (named("Two Words"), "at `$.metadata.name`"),
        (named("one", speed="fast"), "unknown field `triolet/speed`"),
        (named("one", **{"class": "vip"}), "triolet/class names 'vip'; allowed: critical, default"),
        (named("one", budget_policy="freeze"), "Invalid enum value 'freeze'"),
    ],
)
def test_what_cannot_be_measured_is_refused_and_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(wrong)
    assert said in str(refused.value)


def test_objectives_have_names_of_their_own_and_one_threshold_for_gaps() -> None:
    with pytest.raises(ConfigError, match="2 objectives are named one"):
        read(document(), document())
    gaps = [named("one"), named("two")]
    for one, value in zip(gaps, (0.1, 0.2), strict=True):
        goal = {"op": "lte", "value": value, "target": 0.9}
        one["spec"] = document(indicatorRef="inter-token", objectives=[goal])["spec"]
    with pytest.raises(ConfigError, match="inter-token have different values"):
        read(*gaps)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the file holds 0 objectives; allowed: 1 to 3"),
        (b"a: [", "this is not YAML: while parsing a flow"),
        (b"a: \xff", "this is not YAML"),
        (b"a: !!python/object:os.system x", "could not determine a constructor"),
        (b"[" * 100_000, "this is not YAML"),
        (b"- 1", "document 1: Expected `object`, got `array`"),
        (b"#" * (1 << 21), "larger than"),
    ],
)
def test_files_that_are_something_else_are_refused(content: bytes, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_objectives(content, MOST)
    assert said in str(refused.value)


def test_more_objectives_than_the_bound_are_refused() -> None:
    assert len(read(named("a"), named("b"), named("c"))) == MOST
    with pytest.raises(ConfigError, match="holds 4 objectives; allowed: 1 to 3"):
        read(named("a"), named("b"), named("c"), named("d"))


def test_errors_name_the_file(tmp_path: Path) -> None:
    missing = tmp_path / "missing.yaml"
    with pytest.raises(ConfigError, match=r"No such file or directory: '.*missing\.yaml'"):
        read_objectives(ObjectivesConfig(str(missing)))
    wrong = tmp_path / "slo.yaml"
    wrong.write_text(DEFAULT_FILE.read_text("utf-8").replace("0.99}", "99}"), "utf-8")
    with pytest.raises(ConfigError, match=r"slo.yaml: document 1: Expected `float` < 1.0"):
        read_objectives(ObjectivesConfig(str(wrong)))

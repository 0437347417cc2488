"""Tests of the start benchmark: the fleets that it compares, and the evaluation of its
measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from loadtest.bench.start import GOALS, KINDS, OURS, Kind, Measured, Wait, rests
from ops.cli.options import gather
from triolet.ids import Role

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_fleets_differ_in_what_they_have_to_start_with(kind: Kind, tmp_path: Path) -> None:
    assignments = [word for word in kind.options(tmp_path / "Packed") if word != "--set"]
    settings = gather(None, assignments, {}).settings()
    snapshots = settings.worker(Role.DECODE).engine.snapshots
    assert settings.supervisor.templates is kind.has_templates
    assert snapshots.keep is kind.has_snapshots
    assert snapshots.folder == str(tmp_path / "Packed")


def test_medians_are_held_against_their_goals_and_the_others() -> None:
    measured = Measured()
    for seconds in (0.5, 0.1, 0.2):
        measured.add("wake", OURS.name, Wait(seconds, seconds / 2))
    measured.add("wake", "without snapshots", Wait(0.8, 0.6))
    measured.add("start", OURS.name, Wait(GOALS["start"] + 1))
    rows = {(row["what"], row["of"]): row for row in measured.rows()}
    assert rows["wake", OURS.name] == {
        "what": "wake",
        "of": OURS.name,
        "median_s": 0.2,
        "least_s": 0.1,
        "most_s": 0.5,
        "cpu_s": 0.1,
        "samples": 3,
    }
    assert rows["start", OURS.name]["cpu_s"] is None
    ratios = measured.ratios()
    assert ratios["wake: triolet vs without snapshots"].value == pytest.approx(0.25)
    assert ratios["seconds of wake"].is_met
    assert not ratios["seconds of start"].is_met
    assert "seconds of crash" not in ratios


def test_rests_differ_so_that_heartbeats_do_not_keep_step() -> None:
    assert len(set(rests(5))) == 5
    assert list(rests(1)) == [min(rests(5))]

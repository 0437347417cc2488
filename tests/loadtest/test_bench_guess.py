"""What the benchmark of guesses makes of what it measured."""

from __future__ import annotations

from loadtest.bench.guess import PLAIN, Counts, Measured, report_of


def test_rates_are_compared_within_a_task_and_a_batch() -> None:
    found = {
        ("copy", 1, PLAIN): Measured([90.0, 100.0, 110.0], 200, Counts(200, 0, 0, 0)),
        ("copy", 1, "lookup"): Measured([300.0, 240.0, 250.0], 200, Counts(80, 60, 160, 120)),
        ("plain", 1, PLAIN): Measured([100.0], 10, Counts(0, 0, 0, 0)),
        ("plain", 1, "lookup"): Measured([80.0], 10, Counts(10, 0, 0, 0)),
    }
    report = report_of(found, {})
    ratios = {name: (ratio.value, ratio.is_met) for name, ratio in report.ratios.items()}
    assert ratios == {
        "copy b1: lookup vs off": (2.5, True),
        "plain b1: lookup vs off": (0.8, False),
    }
    row = report.rows[1]
    assert (row["tokens_per_step"], row["accepted_per_row"], row["accepted_share"]) == (
        2.5,
        2.0,
        0.75,
    )


def test_counts_are_those_since_before() -> None:
    assert Counts(9, 8, 7, 6).since(Counts(1, 1, 1, 1)) == Counts(8, 7, 6, 5)

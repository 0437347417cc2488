"""Tests that each test runs in either `make test` or `make test-slow`, not in both."""

from __future__ import annotations

import re
import tomllib
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from _pytest.mark.expression import Expression

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PYTEST = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
MARKERS = [marker.partition(":")[0] for marker in PYTEST["markers"]]
MAKEFILE = (ROOT / "Makefile").read_text()
LEAVES_OUT = re.compile(r"-m\b|-k\b|--deselect|--ignore|--last-failed|--lf\b|--ff\b|--maxfail|-x\b")


def expression(name: str) -> str:
    found = re.search(rf"^{name} := (.+)$", MAKEFILE, re.MULTILINE)
    assert found is not None, name
    return found.group(1)


def recipe(target: str) -> str:
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert found is not None, target
    return found.group(1)


def sets_of_markers() -> Iterator[frozenset[str]]:
    for count in range(len(MARKERS) + 1):
        yield from map(frozenset, combinations(MARKERS, count))


def test_whatever_its_markers_a_test_runs_in_exactly_one_suite() -> None:
    quick, slow = (Expression.compile(expression(name)) for name in ("QUICK", "SLOW"))
    for markers in sets_of_markers():
        runs = [suite.evaluate(markers.__contains__) for suite in (quick, slow)]
        assert sum(runs) == 1, markers


def test_the_suites_run_what_their_expressions_say_and_leave_out_nothing_else() -> None:
    assert not LEAVES_OUT.search(" ".join(PYTEST["addopts"]))
    for target, name in (("test", "QUICK"), ("test-slow", "SLOW")):
        assert f"-m '$({name})'" in recipe(target)
        assert len(LEAVES_OUT.findall(recipe(target))) == 1
    assert not LEAVES_OUT.search(expression("SHOWN").replace("-p tests.progress", ""))


def test_ci_runs_both_suites() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert {"make test", "make test-slow"} <= set(lines)

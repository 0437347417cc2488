"""Tests that every attack of docs/SECURITY.md has a guard and existing tests."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from .guards import MUTANTS, Mutant
from .mutants import PASSED, copy_tree, judge, run_test

ROOT: Final = Path(__file__).parents[2]
ATTACKS: Final = [f"A{number}" for number in range(1, 45) if number != 41]
"""A41 was an attack on a removed command. Numbers are not reused."""
(QUICK,) = [mutant for mutant in MUTANTS if mutant.file == "transport/address.py"]
"""The one mutant run with every change, to check the mutation run itself; `make security-mutants`
runs all. Its test loads no torch."""


@cache
def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def rows() -> list[tuple[str, str, str, str]]:
    page = (ROOT / "docs" / "SECURITY.md").read_text(encoding="utf-8")
    found: list[tuple[str, str, str, str]] = re.findall(
        r"^\| (A\d+) \| (.+) \| (.+) \| (.+) \|$", page, re.MULTILINE
    )
    return found


def test_every_attack_has_a_guard_and_tests_that_exist() -> None:
    assert [row[0] for row in rows()] == ATTACKS
    for attack, what, guard, kept_by in rows():
        assert what, attack
        assert guard, attack
        named = re.findall(r"`(tests/[\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", kept_by)
        assert named, attack
        for file, names in named:
            missing = set(re.findall(r"\w+", names)) - names_in(ROOT / file)
            assert not missing, (attack, file, missing)
        counted = sum(len(re.findall(r"\w+", names)) for _, names in named)
        assert len(re.findall(r"`test_\w+`", kept_by)) == counted, attack


def test_every_attack_has_a_mutant_whose_test_its_row_names() -> None:
    kept_by = {row[0]: row[3] for row in rows()}
    assert {mutant.attack for mutant in MUTANTS} == set(ATTACKS)
    for mutant in MUTANTS:
        assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.guard) == 1, mutant
        file, name = mutant.test.split("::")
        assert name in names_in(ROOT / "tests" / file), mutant
        assert f"`tests/{file}`" in kept_by[mutant.attack], mutant
        assert f"`{name}`" in kept_by[mutant.attack], mutant


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("mutant", [QUICK], ids=str)
def test_a_product_without_a_guard_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    copy_tree(tmp_path)
    verdict = judge(tmp_path, mutant)
    assert verdict.outcome == "died", verdict.output
    assert run_test(tmp_path, mutant.test)[0] == PASSED

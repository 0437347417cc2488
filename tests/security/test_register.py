"""Every attack of docs/SECURITY.md has its guard, and tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
ATTACKS: Final = [f"A{number}" for number in range(1, 31)]


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_every_attack_has_a_guard_and_tests_that_exist() -> None:
    page = (ROOT / "docs" / "SECURITY.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (A\d+) \| (.+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    assert [row[0] for row in rows] == ATTACKS
    for attack, what, guard, kept_by in rows:
        assert what, attack
        assert guard, attack
        named = re.findall(r"`(tests/[\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", kept_by)
        assert named, attack
        for file, names in named:
            missing = set(re.findall(r"\w+", names)) - names_in(ROOT / file)
            assert not missing, (attack, file, missing)
        counted = sum(len(re.findall(r"\w+", names)) for _, names in named)
        assert len(re.findall(r"`test_\w+`", kept_by)) == counted, attack

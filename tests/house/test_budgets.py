"""Tests that each top folder stays within its number of statements in budgets.toml.

Docstrings and comment lines are not counted, so removing explanations saves nothing.
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path

from .test_layout import ROOT, listed, nodes_of

BUDGETS = Path(__file__).with_name("budgets.toml")


def statements(path: Path) -> int:
    """Return a file's number of statements, without docstrings and other constant expressions."""
    return sum(
        not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for kind, nodes in nodes_of(path).items()
        if issubclass(kind, ast.stmt)
        for node in nodes
    )


def test_folders_keep_their_budgets() -> None:
    budgets: dict[str, int] = tomllib.loads(BUDGETS.read_text(encoding="utf-8"))
    spent: Counter[str] = Counter()
    for path in listed():
        folder, *rest = path.relative_to(ROOT).parts
        if rest:
            spent[folder] += statements(path)
    assert spent.keys() == budgets.keys()
    table = [f"{'folder':<12}{'statements':>12}{'budget':>10}{'difference':>12}"]
    table += [
        f"{folder:<12}{number:>12}{budgets[folder]:>10}{number - budgets[folder]:>+12}"
        for folder, number in sorted(spent.items())
    ]
    over = [folder for folder, number in spent.items() if number > budgets[folder]]
    assert not over, "\n".join([f"{', '.join(over)}: delete, or raise the number", *table])

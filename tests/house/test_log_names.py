"""Events of the log have one style of names, so that one pattern finds them."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from .test_layout import ROOMS, nodes_of, shown, sources

if TYPE_CHECKING:
    from pathlib import Path

LEVELS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
NAME = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")


def events(path: Path) -> list[tuple[int, str]]:
    """Return the line and the name of each event that is logged by a literal."""
    return [
        (node.lineno, node.args[0].value)
        for node in nodes_of(path)[ast.Call]
        if isinstance(node.func, ast.Attribute)
        and node.func.attr in LEVELS
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
        and ast.unparse(node.func.value) in {"log", "structlog.get_logger()"}
    ]


def test_events_are_words_joined_by_underscores() -> None:
    found = [
        (shown(path), line, name)
        for path in sources(*(room for room in ROOMS if room not in {"loadtest", "tools"}))
        for line, name in events(path)
    ]
    assert len(found) > 50
    assert [one for one in found if not NAME.fullmatch(one[2])] == []

"""Tests of texts: log events share one naming style, errors say what they are about, and no text
for people contains a class name."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from .test_layout import ROOMS, called_name, nodes_of, shown, sources

if TYPE_CHECKING:
    from pathlib import Path

LEVELS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
NAME = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")


def events(path: Path) -> list[tuple[int, str]]:
    """Return line and name of each event that is logged with a literal name."""
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


ERRORS = frozenset({"error", "exc", "exception", "cause"})
SPLIT_INTO_WORDS = frozenset({"triolet/errors.py", "transport/frames.py"})
"""Files that make words from class names."""


def python_words(path: Path) -> list[int]:
    """Return the lines at which a text includes a class name or the `repr` of an error."""
    found = []
    for node in nodes_of(path)[ast.Attribute]:
        is_of_type = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "type"
        if node.attr in {"__name__", "__qualname__"} and is_of_type:
            found.append(node.lineno)
    for node in nodes_of(path)[ast.JoinedStr]:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                text = ast.unparse(part.value)
                is_repr = part.conversion == ord("r") and text in ERRORS
                if is_repr or text.endswith((".__name__", ".__qualname__")):
                    found.append(part.lineno)
    for node in nodes_of(path)[ast.Call]:
        if ast.unparse(node.func) == "repr" and node.args and ast.unparse(node.args[0]) in ERRORS:
            found.append(node.lineno)
    return found


def test_no_text_for_people_is_made_of_the_name_of_a_class_or_the_repr_of_an_error() -> None:
    paths = [
        path
        for path in sources(*(room for room in ROOMS if room not in {"loadtest", "tools"}))
        if not shown(path).startswith("simulation/") and shown(path) not in SPLIT_INTO_WORDS
    ]
    assert [(shown(path), line) for path in paths for line in python_words(path)] == []


PREFIXED = frozenset(
    {
        *("ReferrerFault", "TemplateLost", "LineError", "DecodeError", "_bad"),
        *("BrokenResourceError", "AssertionError"),
    }
)
"""Errors that are printed after their subject: a blob, a role, a line of a file, a server, a
request, a body."""
NO_SUBJECT = re.compile(r"(?:it|its|this|that|they|send|there is no such|there is nothing here)\b")
NAMED = re.compile(
    r"this (?:server|fleet|supervisor|system|user|release|machine|model|request|stream)\b"
)


def beginning(node: ast.expr) -> str:
    """Return the literal start of a text."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            return text
    return ""


def without_subject(path: Path) -> list[tuple[int, str]]:
    """Return line and start of each error that does not say what it is about."""
    found = []
    for node in nodes_of(path)[ast.Raise]:
        if isinstance(node.exc, ast.Call) and called_name(node.exc) not in PREFIXED:
            for text in map(beginning, node.exc.args):
                if " " in text and NO_SUBJECT.match(text) and not NAMED.match(text):
                    found.append((node.lineno, text))
    return found


def test_an_error_begins_with_what_it_is_about() -> None:
    # Callers of the audit log prepend the line number.
    paths = [path for path in sources("ops", "server", "store") if "audit" not in path.parts]
    assert [(shown(path), *one) for path in paths for one in without_subject(path)] == []

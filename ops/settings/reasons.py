"""The reason of every field: its docstring in triolet/config, read from the source."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from typing import Any

from .form import SECTIONS, is_section, types_of


@cache
def _reasons(kind: type[Any]) -> dict[str, str]:
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for item, after in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            found[item.target.id] = " ".join(str(after.value.value).split())
    return found


def reason(path: tuple[str, ...]) -> str:
    """Return why a field has its default, or what it is."""
    kind: Any = SECTIONS[path[0]]
    for name in path[1:-1]:
        kind = types_of(kind)[name]
        assert is_section(kind)
    return _reasons(kind).get(path[-1], "")

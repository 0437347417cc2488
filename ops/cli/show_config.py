"""`triolet config show`: prints every setting with its value, its origin and its reason."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from rich.console import Console
from rich.text import Text

from triolet.config import FleetModelConfig, shown_url

from ..settings.form import (
    MODELS,
    REDIS_URLS,
    SECTIONS,
    Settings,
    dotted,
    is_section,
    leaves,
    reader,
    show,
    types_of,
    value_at,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..settings.sources import SettingSources


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
    """Return the documentation of a field: the reason for its default, or its meaning."""
    if path[0] == MODELS:
        return _reasons(FleetModelConfig).get(path[-1], "")
    kind: Any = SECTIONS[path[0]]
    for name in path[1:-1]:
        kind = types_of(kind)[name]
        assert is_section(kind)
    return _reasons(kind).get(path[-1], "")


class ConfigRow(NamedTuple):
    """One setting."""

    field: str
    value: Any
    origin: str
    reason: str
    default: Any = None

    @property
    def is_changed(self) -> bool:
        """Whether the value differs from the default."""
        return bool(self.value != self.default)


def run_show_config(sources: SettingSources, *, only_changed: bool, as_json: bool) -> None:
    """Print settings as text, or as a JSON list.

    Args:
      sources: the settings and their origins.
      only_changed: leave out settings that have their defaults.
      as_json: print JSON.
    """
    found = [row for row in rows(sources) if row.is_changed or not only_changed]
    if as_json:
        shown = [row._asdict() for row in found]
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode() + "\n")
        return
    console = Console(highlight=False, soft_wrap=True)
    if not found:
        console.print("Every setting has its default.")
    for row in found:
        value = show(row.value)
        default = f"; default: {show(row.default)}" if only_changed else ""
        origin = "" if row.origin == "default" else f"  ({row.origin}{default})"
        console.print(Text.assemble((row.field, "bold"), f" = {value}", (origin, "yellow")))
        console.print(Text(f"  {row.reason}", style="dim"))


def rows(sources: SettingSources) -> Iterator[ConfigRow]:
    """Yield every setting in the order of the sections. A worker setting is one row of `worker` if
    prefill and decode agree, else a row of each.

    Raises:
      ConfigError: the settings are invalid.
    """
    settings, plain = sources.settings(), Settings()
    for path in leaves():
        section, *rest = path
        if section in ("worker", "prefill", "decode"):
            is_common = reader(path) is not None or _agree(settings, tuple(rest))
            if is_common != (section == "worker"):
                continue
        value = value_at(settings, path)
        if path[-2:] in REDIS_URLS and "://" in value:
            value = shown_url(value)
        default = value_at(plain, path)
        yield ConfigRow(dotted(path), value, sources.origin(path), reason(path), default)
    for name in settings.models:
        for last in types_of(FleetModelConfig):
            path = (MODELS, name, last)
            value, default = value_at(settings, path), getattr(FleetModelConfig(), last)
            yield ConfigRow(dotted(path), value, sources.origin(path), reason(path), default)


def _agree(settings: Settings, rest: tuple[str, ...]) -> bool:
    return bool(value_at(settings, ("prefill", *rest)) == value_at(settings, ("decode", *rest)))

"""Regenerates the tables of docs/configuration.md (`python -m tests.house.configuration_page`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ops.cli.options import NAMED, option_name
from ops.cli.show_config import ConfigRow, reason, rows
from ops.settings.form import MODELS, SECTIONS, dotted, show, types_of
from ops.settings.sources import SettingSources
from triolet.config import FleetModelConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE: Final = Path(__file__).parents[2] / "docs" / "configuration.md"
BEGIN: Final = "<!-- generated: python -m tests.house.configuration_page -->\n"


def tables() -> str:
    """Return the current options of `serve`, and every field by section."""
    return BEGIN + "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield from ("", "## Options of `triolet serve`", "")
    yield from ("| option | sets | |", "|---|---|---|")
    for name, one in NAMED.items():
        yield f"| `{option_name(name)}` | `{dotted(one.path)}` | {one.help} |"
    found = list(rows(SettingSources()))
    for section, kind in SECTIONS.items():
        own = [row for row in found if row.field.partition(".")[0] == section]
        if not own:
            continue
        yield from _table(section, kind, own)
    plain = FleetModelConfig()
    of_model = [
        ConfigRow(f"{MODELS}.{name}", getattr(plain, name), "default", reason((MODELS, "", name)))
        for name in types_of(FleetModelConfig)
    ]
    yield from _table(f"{MODELS}.NAME", FleetModelConfig, of_model)


def _table(section: str, kind: type[object], rows: list[ConfigRow]) -> Iterator[str]:
    yield from ("", f"## `[{section}]`", "", " ".join((kind.__doc__ or "").split()), "")
    yield from ("| field | default | reason |", "|---|---|---|")
    for row in rows:
        why = re.sub(r"\|", r"\\|", row.reason)
        yield f"| `{row.field.partition('.')[2]}` | `{show(row.value)}` | {why} |"


def main() -> None:
    """Write the page."""
    before = PAGE.read_text(encoding="utf-8").partition(BEGIN)[0]
    PAGE.write_text(before + tables(), encoding="utf-8")


if __name__ == "__main__":
    main()

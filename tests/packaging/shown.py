"""Test helper that extracts the commands and programs shown in README.md and docs/."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.house.test_layout import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGES: Final = tuple(
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
)
FENCED: Final = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SHELL: Final = ("", "console", "bash")
"""Languages of blocks that a shell reads."""
OTHERS: Final = ("python", *"py javascript http toml ini yaml json mermaid text".split())
"""Other languages; blocks in Python are run too."""


@dataclass(frozen=True, slots=True)
class Shown:
    """One shell command, or one Python program."""

    page: str
    line: int
    text: str
    is_python: bool = False

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def shown(page: str) -> list[Shown]:
    """Return what a page shows, in order."""
    return list(_shown(page))


def files(page: str) -> list[str]:
    """Return the TOML files that a page shows, in order."""
    return [block for kind, block in FENCED.findall(_text(page)) if kind == "toml"]


def languages(page: str) -> list[str]:
    """Return the language of each block of a page."""
    return [kind for kind, _ in FENCED.findall(_text(page))]


def _shown(page: str) -> Iterator[Shown]:
    text = _text(page)
    for match in FENCED.finditer(text):
        kind, block = match.groups()
        line = text.count("\n", 0, match.start()) + 2
        if kind == "python":
            yield Shown(page, line, block, is_python=True)
        elif kind in SHELL:
            joined = ""
            for number, typed in enumerate(block.splitlines(), line):
                joined += typed.removeprefix("$ ")
                if joined.endswith("\\"):
                    joined = joined.removesuffix("\\")
                elif joined:
                    yield Shown(page, number, joined)
                    joined = ""


def _text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")

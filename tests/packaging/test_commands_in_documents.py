"""Tests that the command line accepts the `triolet` commands shown on pages for operators."""

from __future__ import annotations

import re
from typing import Final

import pytest

from tests.house.test_layout import ROOT

from .command_lines import read_text
from .published import CONSOLE
from .shown import PAGES, shown

COMMAND: Final = re.compile(r"(?:^|[\s(|])((?:/opt/triolet/bin/)?triolet [a-z].*)")
SHELL: Final = re.compile(r"\s+(?:\d?[<>]|#|\||&&)|\)")
"""Where the command ends and shell syntax continues."""
KEY: Final = re.compile(r"\$(?:ROOT|ALICE|\(cat )")


def commands(page: str) -> list[str]:
    """Return every `triolet` command in a page's shell blocks."""
    lines = [one.text for one in shown(page) if not one.is_python]
    return [SHELL.split(match[1])[0] for line in lines if (match := COMMAND.search(line))]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_every_command_is_taken(page: str) -> None:
    for command in commands(page):
        read_text(command)


def test_the_first_hour_is_in_order() -> None:
    text = (ROOT / "docs" / "first_hour.md").read_text(encoding="utf-8")
    lines = [line for block in CONSOLE.findall(text) for line in block.splitlines()]
    assert all(line.startswith("$ ") for line in lines)
    assert sum(line.startswith("$ triolet serve ") for line in lines) == 1


def test_the_first_hour_gives_no_program_a_key_as_an_argument() -> None:
    text = (ROOT / "docs" / "first_hour.md").read_text(encoding="utf-8")
    lines = [line for block in CONSOLE.findall(text) for line in block.splitlines()]
    named = [part for line in lines for part in re.split(r"&&|;|\(|\$ ", line) if KEY.search(part)]
    shell = ("printf ", "echo ", "export ")
    assert named
    assert all(part.strip().startswith(shell) for part in named), named
    written = [line for line in lines if ".header)" in line]
    assert written
    assert all(line.startswith("$ (umask 077; ") for line in written)

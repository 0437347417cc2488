"""Tests that a narrowed Typer app parses command lines like the whole app."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import typer

from ops.cli import app, main
from ops.cli.narrowing import narrowed

if TYPE_CHECKING:
    from collections.abc import Iterator

WHOLE: Any = typer.main.get_command(app)


def paths(command: Any = WHOLE, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:  # noqa: ANN401
    """Yield the words of every command and group."""
    if words:
        yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from paths(inner, (*words, name))


def shown(tree: Any, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:  # noqa: ANN401
    tree(args=[*words, "--help"], prog_name="triolet", standalone_mode=False)
    return capsys.readouterr().out


@pytest.mark.parametrize("words", list(paths()), ids=" ".join)
def test_a_command_has_the_same_help_and_its_tree_no_other_command(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    chosen: Any = typer.main.get_command(narrowed(app, (*words, "--help")))
    assert shown(chosen, words, capsys) == shown(WHOLE, words, capsys)
    for word in words:
        assert list(chosen.commands) == [word]
        chosen = chosen.commands[word]


@pytest.mark.parametrize("line", ["", "--help", "--version", "sevre", "-h serve"])
def test_a_line_that_names_no_command_needs_all(line: str) -> None:
    assert narrowed(app, line.split()) is app


def test_a_group_keeps_its_commands_where_none_of_them_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["tenant", "lits"]) == 2
    assert "Did you mean" in capsys.readouterr().err

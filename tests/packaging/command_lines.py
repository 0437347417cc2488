"""Test helper that parses `triolet` command lines as the real command line does, without running
them."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import typer

from ops.cli import app
from ops.cli.options import NAMED, gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triolet.config import ServerConfig


def read(arguments: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return the command and the values of its parameters.

    Raises:
      typer.TyperException: the command line is rejected.
    """
    command: Any = typer.main.get_command(app)
    path, rest, context = [], list(arguments), None
    while hasattr(command, "commands"):
        name = rest.pop(0)
        path.append(name)
        command = command.commands[name]
    context = command.make_context(" ".join(path), rest)
    return context.info_name, context.params


def read_text(line: str) -> tuple[str, dict[str, Any]]:
    """Parse a command line as typed, including `triolet`."""
    program, *arguments = shlex.split(line)
    assert program.rpartition("/")[2] == "triolet"
    return read(arguments)


def server_config(arguments: Sequence[str]) -> ServerConfig:
    """Return the server settings of a `serve` command.

    Raises:
      ConfigError: a value is invalid.
    """
    command, values = read(arguments)
    assert command == "serve"
    named = {name: values[name] for name in NAMED}
    return gather(values["config"], values["assignments"], named).settings().server

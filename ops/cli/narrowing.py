"""Reduces a Typer app to the one command that a command line names, for a faster start.

Typer builds the parsers of all commands first, which takes 0.2 s of a core for Triolet.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from typer.main import get_command_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typer import Typer
    from typer.models import CommandInfo


def narrowed(app: Typer, words: Sequence[str]) -> Typer:
    """Return a copy of the app with only the command that the first words name.

    If they name none (an option, a misspelt command, nothing), return the app itself: its help and
    its error messages need all names.
    """
    if not words:
        return app
    found = copy(app)
    found.registered_commands = [one for one in app.registered_commands if _name(one) == words[0]]
    found.registered_groups = []
    for group in app.registered_groups:
        whole = group.typer_instance
        assert whole is not None, "every group was added with its app"
        # The commands of an unnamed group belong to the app itself.
        is_named = isinstance(group.name, str)
        part = narrowed(whole, words[1:] if is_named else words)
        if group.name == words[0] if is_named else part is not whole:
            chosen = copy(group)
            chosen.typer_instance = part
            found.registered_groups.append(chosen)
    return found if found.registered_commands or found.registered_groups else app


def _name(command: CommandInfo) -> str:
    assert command.callback is not None, "every command was added with its function"
    return command.name or get_command_name(command.callback.__name__)

"""Exit codes of commands, and the error that ends a command with one."""

from __future__ import annotations

from typing import Final

from triolet.errors import TrioletError

EXIT_FAILED: Final = 1
"""The command was valid but failed; trying again may help."""
EXIT_BAD_INPUT: Final = 2
"""Options, model or configuration are invalid; trying again does not help."""


class CommandFailed(TrioletError):
    """A failed command; `main` prints its message as one line on stderr.

    Attributes:
      exit_code: exit code of the process.
    """

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code

"""What a command exits with, and the error that carries it to the one place that prints it."""

from __future__ import annotations

from typing import Final

from triolet.errors import TrioletError

EXIT_FAILED: Final = 1
"""It was asked for something possible, and it did not work out."""
EXIT_BAD_INPUT: Final = 2
"""Options, model or configuration cannot work; trying again would not help."""


class CommandFailed(TrioletError):
    """A command that ends with one line on stderr and an exit code.

    Attributes:
      exit_code: what the process exits with.
    """

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code

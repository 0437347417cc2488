"""The command line of Triolet, one file per group of commands."""

from .commands import app, main

__all__ = ["app", "main"]

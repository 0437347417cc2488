"""The `triolet` command line, one file per group of commands."""

from .commands import app, main

__all__ = ["app", "main"]

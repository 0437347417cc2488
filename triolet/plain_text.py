"""Make untrusted text safe to print: remove control characters and line breaks."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return the text with every control character except line feeds replaced."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def one_line(text: str) -> str:
    """Return the text as a single line without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())

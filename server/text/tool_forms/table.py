"""The table of tool call formats, and detection of a model's format from its template and
tokens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from triolet.config import ToolParser

from .harmony import HarmonyForm
from .python_calls import PythonForm
from .tool_calls import GRANITE, HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, PHI, ToolForm
from .xml_calls import XmlForm

if TYPE_CHECKING:
    from collections.abc import Iterable


QWEN3_CODER: Final = XmlForm()
PYTHONIC: Final = PythonForm()
HARMONY: Final = HarmonyForm()

_FORMS: Final[dict[ToolParser, ToolForm]] = {
    ToolParser.HERMES: HERMES,
    ToolParser.LLAMA: LLAMA,
    ToolParser.MISTRAL: MISTRAL,
    ToolParser.QWEN3_CODER: QWEN3_CODER,
    ToolParser.PYTHONIC: PYTHONIC,
    ToolParser.HARMONY: HARMONY,
    ToolParser.GRANITE: GRANITE,
    ToolParser.PHI: PHI,
}
_SIGNS: Final[tuple[tuple[ToolParser, re.Pattern[str]], ...]] = (
    (ToolParser.HARMONY, re.compile(r"<\|channel\|>")),
    (ToolParser.QWEN3_CODER, re.compile(r"<function=")),
    (ToolParser.MISTRAL, re.compile(r"\[TOOL_CALLS\]")),
    (ToolParser.PHI, re.compile(r"<\|/tool_call\|>|functools\[|<\|/tool\|>")),
    (ToolParser.GRANITE, re.compile(r"<\|tool_call\|>|<tool_call>\s*\[")),
    (ToolParser.HERMES, re.compile(r"<tool_call>")),
    (ToolParser.PYTHONIC, re.compile(r"\[\w+\(\w+=")),
    (ToolParser.LLAMA, re.compile(r'<\|python_tag\|>|"parameters": dictionary')),
)
"""Patterns that identify a format, the most reliable first."""


def form_of(
    templates: Iterable[str],
    tokens: Iterable[str] = (),
    parser: ToolParser = ToolParser.AUTO,
) -> ToolForm:
    """Return a model's tool call format.

    Args:
      templates: its chat templates. They take precedence over the tokens, because a model may have
        tokens of a format that it was not trained on.
      tokens: tokens added to its vocabulary.
      parser: the format by name; AUTO to detect it, with Hermes as the default, because any model
        can be made to write it.
    """
    text, words = "\n".join(templates), "\n".join(tokens)
    if parser is ToolParser.AUTO:
        signs = [name for source in (text, words) for name, sign in _SIGNS if sign.search(source)]
        parser = signs[0] if signs else ToolParser.HERMES
    is_named = "[ARGS]" in (text if "[TOOL_CALLS]" in text else words)
    if parser is ToolParser.MISTRAL and is_named:
        return MISTRAL_NAMED
    return _FORMS[parser]

"""Which form of calls a model writes: by name, or told from its chat template and its tokens."""

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
"""What tells a form, the surest sign first."""


def form_of(
    templates: Iterable[str],
    tokens: Iterable[str] = (),
    parser: ToolParser = ToolParser.AUTO,
) -> ToolForm:
    """Return the form in which a model writes calls.

    Args:
      templates: the model's chat templates. What they say goes before what the tokens say: a
        model may have tokens of a form that it was not trained on.
      tokens: contents of the tokens that were added to its vocabulary.
      parser: the form by name; AUTO tells it from the others, and is Hermes's where they tell none:
        every model can be made to write that.
    """
    text, words = "\n".join(templates), "\n".join(tokens)
    if parser is ToolParser.AUTO:
        signs = [name for source in (text, words) for name, sign in _SIGNS if sign.search(source)]
        parser = signs[0] if signs else ToolParser.HERMES
    is_named = "[ARGS]" in (text if "[TOOL_CALLS]" in text else words)
    if parser is ToolParser.MISTRAL and is_named:
        return MISTRAL_NAMED
    return _FORMS[parser]

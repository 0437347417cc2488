"""Describes tools in the system prompt for models with a chat template that has no tools. Pure."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from .tool_calls import HERMES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class ToolSupport(StrEnum):
    """How tools are shown to a model."""

    NATIVE = "native"  # by its chat template
    GENERIC = "generic"  # by the system prompt
    NONE = "none"  # not at all


GENERIC: Final = HERMES
"""The format that most models have seen, and for which a grammar can enforce every schema."""
_LISTING: Final = """\
# Tools

You may call functions. Each line describes one:
<tools>
%s
</tools>

To call one, write its name and its arguments as JSON between tags:
<tool_call>
{"name": "the function", "arguments": {"an argument": "its value"}}
</tool_call>
What it returns follows between <tool_response> tags. To answer, write plain text."""


def with_tools_in_words(
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    takes_system: bool,
) -> list[dict[str, Any]]:
    """Return a conversation in which tools, calls and results are text of the roles system,
    assistant and user. Calls and results never create two consecutive turns of one role.

    Args:
      turns: turns in the format of chat templates.
      tools: the tools to describe, in the API's format.
      takes_system: whether the template shows system messages; otherwise the first user turn
        contains the description.
    """
    plain: list[dict[str, Any]] = []
    is_joined = False
    for turn in turns:
        was_joined, is_joined = is_joined, turn["role"] == "tool" or "tool_calls" in turn
        shown = _in_words(turn)
        if plain and (is_joined or was_joined) and plain[-1]["role"] == shown["role"]:
            shown["content"] = [*plain.pop()["content"], *shown["content"]]
        plain.append(shown)
    for turn in plain:
        turn["content"] = _joined("\n", *turn["content"])
    if tools:
        lines = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        listing, role = _LISTING % "\n".join(lines), "system" if takes_system else "user"
        told = next((turn for turn in plain if turn["role"] == role), None)
        if told is None:
            return [{"role": role, "content": listing}, *plain]
        parts = (told["content"], listing) if takes_system else (listing, told["content"])
        told["content"] = _joined("\n\n", *parts)
    return plain


def _in_words(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn without the role `tool` and without calls. Its content is a list of parts, so
    that the parts of many turns are joined once."""
    content = turn["content"]
    if turn["role"] == "tool":
        return {"role": "user", "content": [f"<tool_response>\n{content}\n</tool_response>"]}
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in turn.get("tool_calls", ())
    ]
    kept = {key: value for key, value in turn.items() if key != "tool_calls"}
    return {**kept, "content": [content, *calls]}


def _joined(between: str, *parts: str) -> str:
    return between.join(part for part in parts if part)

"""The content of a turn in the Messages API: text, calls of tools and what came of them. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticCustomError

from .errors import echo
from .schemas import Message, joined_text
from .tool_schema import CalledFunction, ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Content:
    """What one turn says.

    Attributes:
      text: all of it.
      calls: tools that the model called.
      results: by id of a call, what came of it.
      reasoning: what the model thought before.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    results: tuple[tuple[str, str], ...] = ()
    reasoning: str | None = None

    def messages(self, role: str) -> Iterator[Message]:
        """Yield the same as the turns of a chat, where results have a role of their own."""
        for call_id, text in self.results:
            yield Message.model_construct(role="tool", content=text, tool_call_id=call_id)
        if self.text or self.calls or not self.results:
            calls = list(self.calls) or None
            yield Message.model_construct(
                role=role, content=self.text, tool_calls=calls, reasoning=self.reasoning
            )


def read_content(value: object) -> object:
    """Return the Content in a string or in a list of blocks; anything else as it is."""
    if isinstance(value, str):
        return Content(value)
    if not isinstance(value, list):
        return value
    texts: list[dict[str, Any]] = []
    calls: list[ToolCall] = []
    results: list[tuple[str, str]] = []
    thoughts: list[str] = []
    for block in value:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            calls.append(_call(block))
        elif kind == "tool_result":
            results.append(_result(block))
        elif kind == "thinking":
            thoughts.append(_thought(block))
        elif kind != "redacted_thinking":  # which only its author can read
            texts.append(block)
    reasoning = "\n\n".join(thoughts) or None
    return Content(str(joined_text(texts)), tuple(calls), tuple(results), reasoning)


def _thought(block: dict[str, Any]) -> str:
    text = block.get("thinking")
    if not isinstance(text, str):
        raise ValueError("a thinking block must hold its thinking")
    return text


def _call(block: dict[str, Any]) -> ToolCall:
    call_id, name, given = block.get("id"), block.get("name"), block.get("input")
    if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(given, dict)):
        raise ValueError("tool_use needs an id, a name and an input that is an object")
    arguments = json.dumps(given, ensure_ascii=False)
    function = CalledFunction(name=name, arguments=arguments)
    return ToolCall(id=call_id, function=function)


def _result(block: dict[str, Any]) -> tuple[str, str]:
    call_id, content = block.get("tool_use_id"), block.get("content", "")
    if not isinstance(call_id, str):
        raise ValueError("tool_result needs a tool_use_id")
    text = joined_text(content)
    if not isinstance(text, str):
        raise PydanticCustomError("unsupported", f"a tool_result of {echo(content)}")
    return call_id, text

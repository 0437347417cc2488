"""Request schemas of the Messages API, and the parsed content of one turn: text, tool calls and
their results. Pure.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from .. import fields
from ..errors import echo
from ..fields import MAX_TOOLS, NamedSchema, ResponseFormat, ToolCall, ToolName, earlier_call
from ..schemas import (
    IGNORED,
    MAX_INT,
    MAX_MESSAGES,
    OWN_FUNCTION,
    UNSUPPORTED,
    CacheFields,
    Message,
    SamplingFields,
    ServedName,
    ServiceFields,
    StopStrings,
    Stream,
    StrictModel,
    TemplateKwargs,
    joined_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Content:
    """The content of one turn.

    Attributes:
      text: all of its text.
      calls: tool calls of the model.
      results: tool results, by call id.
      reasoning: the model's reasoning before the text.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    results: tuple[tuple[str, str], ...] = ()
    reasoning: str | None = None

    def messages(self, role: str) -> Iterator[Message]:
        """Yield the content as chat messages, in which results have their own role."""
        for call_id, text in self.results:
            yield Message.model_construct(role="tool", content=text, tool_call_id=call_id)
        if self.text or self.calls or not self.results:
            calls = list(self.calls) or None
            yield Message.model_construct(
                role=role, content=self.text, tool_calls=calls, reasoning=self.reasoning
            )


def read_content(value: object) -> object:
    """Parse a string or a list of blocks into Content; return anything else unchanged."""
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
        elif kind != "redacted_thinking":  # only its author can read it
            texts.append(block)
    reasoning = "\n\n".join(thoughts) or None
    return Content(str(joined_text(texts)), tuple(calls), tuple(results), reasoning)


def _thought(block: dict[str, Any]) -> str:
    text = block.get("thinking")
    if not isinstance(text, str):
        raise ValueError("a thinking block must have a thinking string")
    return text


def _call(block: dict[str, Any]) -> ToolCall:
    call_id, name, given = block.get("id"), block.get("name"), block.get("input")
    if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(given, dict)):
        raise ValueError("tool_use needs an id, a name and an input that is an object")
    return earlier_call(call_id, name, json.dumps(given, ensure_ascii=False))


def _result(block: dict[str, Any]) -> tuple[str, str]:
    call_id, content = block.get("tool_use_id"), block.get("content", "")
    if not isinstance(call_id, str):
        raise ValueError("tool_result needs a tool_use_id")
    if isinstance(content, list):
        content = [_found_tool(part) for part in content]
    text = joined_text(content)
    if not isinstance(text, str):
        raise PydanticCustomError(
            "unsupported", f"a tool_result of {echo(content)} (send its text)"
        )
    return call_id, text


def _found_tool(part: object) -> object:
    """Return a tool reference as a text part; return any other part unchanged."""
    if not isinstance(part, dict) or part.get("type") != "tool_reference":
        return part
    # The prompt has the tool's definition among all others.
    return {"type": "text", "text": f"Tool found: {part.get('tool_name')}\n"}


_IGNORED: Final = IGNORED | frozenset(
    "cache_control diagnostics inference_geo speed user_profile_id workspace_id".split()
)
_UNSUPPORTED: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    **UNSUPPORTED,
    "container": (
        "a container (offer a function in tools, and run code when the model calls it)",
        (),
    ),
    "mcp_servers": (
        "calling MCP servers (list their tools in tools, and call them from your program)",
        ([],),
    ),
    "context_management": (
        "any edit but keeping all thinking (send the messages as the model should see them)",
        ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    ),
    "thread": ("a conversation stored on the server (send all messages, without a thread)", ()),
}


def _own_tool(value: object) -> object:
    if value not in (None, "custom"):
        raise PydanticCustomError("unsupported", f"a tool of type {echo(value)}{OWN_FUNCTION}")
    return value


class OutputFormat(StrictModel):
    """The required format of the output."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]

    def of_chat(self) -> ResponseFormat:
        """Return the same format as a chat request's field."""
        named = NamedSchema.model_construct(name="output", schema_=self.schema_)
        return ResponseFormat(type="json_schema", json_schema=named)


class OutputConfig(StrictModel):
    """Output settings. `effort` is a hint."""

    model_config = ConfigDict(extra="ignore")

    format: OutputFormat | None = None


class Turn(StrictModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Content,
        BeforeValidator(read_content, json_schema_input_type=str | list[dict[str, Any]]),
    ]


class OfferedTool(StrictModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[Literal["custom"] | None, BeforeValidator(_own_tool)] = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolUse(StrictModel):
    """Whether the model must call tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_one(self) -> ToolUse:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("needs a name with type tool, and must have none with other types")
        return self


class ThinkingConfig(StrictModel):
    """Whether to reason before the answer, and how much. `display` is a hint."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None

    @model_validator(mode="after")
    def _has_a_budget(self) -> ThinkingConfig:
        if self.type == "enabled" and self.budget_tokens is None:
            raise ValueError("needs budget_tokens with type enabled")
        return self

    @property
    def budget(self) -> int | None:
        """Maximum number of reasoning tokens; None for no limit."""
        return 0 if self.type == "disabled" else self.budget_tokens


class PromptFields(StrictModel):
    """Fields that determine the prompt."""

    ignored: ClassVar[frozenset[str]] = _IGNORED
    unsupported: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = _UNSUPPORTED

    model: ServedName = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)] = Field(
        description="The conversation, oldest turn first."
    )
    system: (
        Annotated[str, BeforeValidator(joined_text, json_schema_input_type=fields.Content)] | None
    ) = Field(default=None, description="System prompt; default: none.")
    output_config: OutputConfig | None = Field(
        default=None, description="Output format: a JSON Schema as format; default: text."
    )
    thinking: ThinkingConfig | None = Field(
        default=None,
        description="Turn reasoning on or off, with a token budget; default: the template's.",
    )
    chat_template_kwargs: TemplateKwargs = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS)] | None = Field(
        default=None, description="Functions that the model may call; default: none."
    )
    tool_choice: ToolUse | None = Field(
        default=None,
        description="Whether the model must call a function, or which one; default: auto.",
    )


class CountRequest(PromptFields):
    """The body of POST /v1/messages/count_tokens."""


class MessagesRequest(PromptFields, SamplingFields, CacheFields, ServiceFields):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] = Field(
        description="Maximum number of output tokens, including reasoning; cut to what fits; "
        "0 only fills the prefix cache."
    )
    stop: Annotated[StopStrings, Field(alias="stop_sequences")] = Field(
        default=(), description="Stop strings, not included in the output; default: none."
    )
    stream: Stream = None
    service_tier: Literal["standard_only"] | fields.ServiceTier | None = Field(
        default=None, description="Service class; auto and standard_only use the plan's default."
    )  # type: ignore[assignment]

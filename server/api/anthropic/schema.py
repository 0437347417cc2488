"""What may be asked of the Messages API, as types for validation and for the OpenAPI document, and
the content of one turn: text, calls of tools and their results. Pure.
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
    """Return a reference to a tool as text; any other part as it is."""
    if not isinstance(part, dict) or part.get("type") != "tool_reference":
        return part
    # The prompt has the tool's definition among all others.
    return {"type": "text", "text": f"Tool found: {part.get('tool_name')}\n"}


_IGNORED: Final = IGNORED | frozenset(
    "cache_control diagnostics inference_geo speed user_profile_id workspace_id".split()
)
_UNSUPPORTED: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    **UNSUPPORTED,
    "container": ("a container (offer a function in tools, and run code when it is called)", ()),
    "mcp_servers": (
        "calling MCP servers (list their tools in tools, and call them from your program)",
        ([],),
    ),
    "context_management": (
        "any edit but keeping all thinking (send the messages as the model is to see them)",
        ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    ),
    "thread": ("a conversation that the server keeps (send all messages, without a thread)", ()),
}


def _own_tool(value: object) -> object:
    if value not in (None, "custom"):
        raise PydanticCustomError("unsupported", f"a tool of type {echo(value)}{OWN_FUNCTION}")
    return value


class OutputFormat(StrictModel):
    """What the output has to be."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]

    def of_chat(self) -> ResponseFormat:
        """Return the same in the words of a chat."""
        named = NamedSchema.model_construct(name="output", schema_=self.schema_)
        return ResponseFormat(type="json_schema", json_schema=named)


class OutputConfig(StrictModel):
    """How to write the output. How much a model should try is a hint."""

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
    """Whether tools are to be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_one(self) -> ToolUse:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("needs a name with type tool, and only then")
        return self


class ThinkingConfig(StrictModel):
    """Whether to reason before the answer, and how much. How it is shown is a hint."""

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
        """Most tokens of reasoning; None for no bound."""
        return 0 if self.type == "disabled" else self.budget_tokens


class PromptFields(StrictModel):
    """What a prompt is made from."""

    ignored: ClassVar[frozenset[str]] = _IGNORED
    unsupported: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = _UNSUPPORTED

    model: ServedName = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)] = Field(
        description="The conversation, oldest turn first."
    )
    system: (
        Annotated[str, BeforeValidator(joined_text, json_schema_input_type=fields.Content)] | None
    ) = Field(default=None, description="System text in front of the conversation; default: none.")
    output_config: OutputConfig | None = Field(
        default=None, description="Form of the answer: a JSON Schema as format; default: text."
    )
    thinking: ThinkingConfig | None = Field(
        default=None,
        description="Reasoning on or off, with a budget of tokens; default: the template's.",
    )
    chat_template_kwargs: TemplateKwargs = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS)] | None = Field(
        default=None, description="Functions that the model may call; default: none."
    )
    tool_choice: ToolUse | None = Field(
        default=None, description="Whether a function is called, or which one; default: auto."
    )


class CountRequest(PromptFields):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(PromptFields, SamplingFields, CacheFields, ServiceFields):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] = Field(
        description="Longest answer with its reasoning, in tokens; cut to what fits; "
        "0 only fills the cache."
    )
    stop: Annotated[StopStrings, Field(alias="stop_sequences")] = Field(
        default=(), description="Texts that end the answer and are left out of it; default: none."
    )
    stream: Stream = None
    service_tier: Literal["standard_only"] | fields.ServiceTier | None = Field(
        default=None, description="Class of service; auto and standard_only leave it to the plan."
    )  # type: ignore[assignment]

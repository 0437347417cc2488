"""What a client may ask of the Messages API: names, types and ranges."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from . import accepted
from .constraint_schema import NamedSchema, ResponseFormat
from .errors import echo
from .messages_content import Content, read_content
from .schemas import (
    IGNORED,
    MAX_INT,
    MAX_MESSAGES,
    UNSUPPORTED,
    CacheFields,
    SamplingFields,
    StopStrings,
    StrictModel,
    TemplateSwitches,
    joined_text,
)
from .tool_schema import MAX_TOOLS, ToolName

_IGNORED: Final = IGNORED | frozenset(
    "cache_control diagnostics inference_geo speed user_profile_id workspace_id".split()
)
_UNSUPPORTED: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    **UNSUPPORTED,
    "container": ("a container", ()),
    "mcp_servers": ("calling other servers", ([],)),
    "thread": ("a conversation that the server keeps (send all messages, without a thread)", ()),
}


def _own_tool(value: object) -> object:
    if value not in (None, "custom"):
        raise PydanticCustomError("unsupported", f"a tool of type {echo(value)}")
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

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: (
        Annotated[str, BeforeValidator(joined_text, json_schema_input_type=accepted.Content)] | None
    ) = None
    output_config: OutputConfig | None = None
    thinking: ThinkingConfig | None = None
    chat_template_kwargs: TemplateSwitches | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolUse | None = None


class CountRequest(PromptFields):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(PromptFields, SamplingFields, CacheFields):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT)]
    stop: Annotated[StopStrings, Field(alias="stop_sequences")] = ()
    stream: bool | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    service_tier: Literal["standard_only"] | accepted.ServiceTier | None = None

"""What a client may ask of the Messages API: names, types and ranges."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from .errors import unsupported
from .schemas import (
    IGNORED,
    MAX_INT,
    MAX_MESSAGES,
    UNSUPPORTED,
    CacheSalt,
    SamplingFields,
    StopStrings,
    StrictModel,
    TemplateSwitches,
    joined_text,
)

_IGNORED: Final = IGNORED | frozenset(
    "cache_control diagnostics inference_geo speed thinking user_profile_id workspace_id".split()
)
_UNSUPPORTED: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    **UNSUPPORTED,
    "tool_choice": ("calling tools", ({"type": "auto"}, {"type": "none"})),
    "container": ("a container", ()),
    "mcp_servers": ("calling other servers", ([],)),
}


def _only_effort(value: object) -> object:
    """Return nothing: how much a model should try is a hint, but the form of its output is not."""
    if isinstance(value, dict) and value.get("format") is not None:
        raise unsupported("output_config.format", "constrained output")
    return None


class Turn(StrictModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["user", "assistant", "system"]
    content: Annotated[str, BeforeValidator(joined_text)]


class PromptFields(StrictModel):
    """What a prompt is made from."""

    ignored: ClassVar[frozenset[str]] = _IGNORED
    unsupported: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = _UNSUPPORTED

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Annotated[str, BeforeValidator(joined_text)] | None = None
    output_config: Annotated[Any, BeforeValidator(_only_effort)] = None
    chat_template_kwargs: TemplateSwitches | None = None


class CountRequest(PromptFields):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(PromptFields, SamplingFields):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT)]
    stop: Annotated[StopStrings, Field(alias="stop_sequences")] = ()
    stream: bool | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    cache_salt: CacheSalt = None

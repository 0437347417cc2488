"""What a client may say on the WebSocket of the Responses API: names, types and ranges."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from triolet.sampling import MAX_TOP_LOGPROBS

from .accepted import MAX_INT
from .errors import unsupported
from .schemas import (
    MAX_MESSAGES,
    CacheSalt,
    Message,
    SamplingFields,
    StrictModel,
    TemplateSwitches,
)

LANE: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
INCLUDE_LOGPROBS: Final = "message.output_text.logprobs"


def _messages(value: object) -> object:
    """Return the short form, a string, as the one message that it means."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _only_text(value: object) -> object:
    form = value.get("format") if isinstance(value, dict) else None
    if form is not None and form != {"type": "text"}:
        raise unsupported("text.format", "a text format other than text")
    return None


class InputMessage(Message):
    """One turn, as a client writes it or as an earlier answer gave it."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["message"] = "message"


class ResponseCreate(SamplingFields):
    """`response.create`: begin an answer."""

    model: str | None = None
    input: Annotated[
        list[InputMessage],
        BeforeValidator(_messages),
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    previous_response_id: str | None = None
    stream: Literal[True] | None = None
    stream_id: str | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    text: Annotated[Any, BeforeValidator(_only_text)] = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    chat_template_kwargs: TemplateSwitches | None = None
    cache_salt: CacheSalt = None


class ResponseCancel(StrictModel):
    """`response.cancel`: end an answer, or all answers of a lane."""

    response_id: str | None = None
    stream_id: str | None = None
    event_id: str | None = None

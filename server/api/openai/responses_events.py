"""Builds a response object and its stream events as an answer is generated.

An answer is one message with one text part. With reasoning or tools, reasoning and calls are
additional items. A request that only warms the prefix cache has no items.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec
from pydantic import BaseModel

from ...contract.generation import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    Usage,
)
from ...text.tool_forms.reasoning import Thinking, reader_of
from ...text.tool_forms.tool_calls import Arguments, CallBegins, CallsRead, Piece, Reasoning, Text
from ..errors import error_object
from ..limits import tier_field
from ..sampling import chat_logprobs
from ..stream import Serializer
from .chunks import new_call_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triolet.errors import RequestError

    from .responses_schema import InputItem, ResponseFields


TOO_MANY: Final = 429


def response_usage(usage: Usage) -> dict[str, Any]:
    """Return token counts in this API's format."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def response_error(error: RequestError) -> dict[str, Any]:
    """Return the value of `error`. `code` is from the API's closed list; `type` is ours."""
    code = "server_error"
    if error.status < 500:
        code = "rate_limit_exceeded" if error.status == TOO_MANY else "invalid_prompt"
    return {"code": code, "message": error.told, "param": error.param, "type": error.code}


@dataclass(slots=True)
class MessageItem:
    """The text of an answer."""

    EVENT: ClassVar[str] = "response.output_text"

    item_id: str
    text: str = ""
    # JSON text, a fifth of the size of objects. The end of the answer repeats all of it, so it is
    # kept in memory until a slow client has read it.
    logprobs: bytearray = field(default_factory=bytearray)

    def shown(self, status: str) -> dict[str, Any]:
        """Return the item; its content is included once it has ended."""
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [] if status == "in_progress" else [self.part()],
        }

    def part(self) -> dict[str, Any] | None:
        """Return the text generated so far."""
        return {"type": "output_text", "annotations": [], **self.whole()}

    def whole(self) -> dict[str, Any]:
        """Return the content of the final events."""
        return {"text": self.text, "logprobs": msgspec.Raw(b"[" + self.logprobs + b"]")}


@dataclass(slots=True)
class CallItem:
    """A tool call."""

    EVENT: ClassVar[str] = "response.function_call_arguments"

    item_id: str
    call_id: str
    name: str
    arguments: str = ""

    def shown(self, status: str) -> dict[str, Any]:
        """Return the item."""
        return {
            "id": self.item_id,
            "type": "function_call",
            "call_id": self.call_id,
            "status": status,
            **self.whole(),
        }

    def part(self) -> dict[str, Any] | None:
        """Return None: calls have no parts."""
        return None

    def whole(self) -> dict[str, Any]:
        """Return the content of the final events."""
        return {"name": self.name, "arguments": self.arguments}


@dataclass(slots=True)
class ReasoningItem:
    """The model's reasoning before its answer, or between two calls."""

    EVENT: ClassVar[str] = "response.reasoning_text"

    item_id: str
    text: str = ""

    def shown(self, status: str) -> dict[str, Any]:
        """Return the item; its content is included once it has ended."""
        return {
            "id": self.item_id,
            "type": "reasoning",
            "summary": [],
            "content": [] if status == "in_progress" else [self.part()],
            "encrypted_content": None,
            "status": status,
        }

    def part(self) -> dict[str, Any] | None:
        """Return the text generated so far."""
        return {"type": "reasoning_text", **self.whole()}

    def whole(self) -> dict[str, Any]:
        """Return the content of the final events."""
        return {"text": self.text}


Item = MessageItem | CallItem | ReasoningItem


def response_head(
    response_id: str, fields: ResponseFields, request: GenerationRequest, model_name: str
) -> dict[str, Any]:
    """Return a response before its end.

    Args:
      response_id: `resp_` and hex.
      fields: the request.
      request: its generation request.
      model_name: name of the model.
    """
    choice = fields.tool_choice
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "model": model_name,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {
            "effort": fields.reasoning.effort if fields.reasoning else None,
            "summary": None,
        },
        "store": False,
        "temperature": request.sampling.temperature,
        "text": {"format": fields.text_format.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": choice.model_dump() if isinstance(choice, BaseModel) else choice or "auto",
        "tools": [tool.model_dump() for tool in fields.tools or ()],
        "top_logprobs": request.sampling.logprobs or 0,
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        **tier_field(fields.service_tier, request.scheduling),
    }


DELTA: Final = b"response.output_text.delta"
LOGPROBS: Final = b',"logprobs":'

_encode = msgspec.json.Encoder().encode


def message_frame(kind: bytes, event: bytes) -> bytes:
    """Return an event as a WebSocket message."""
    return event


def sse_frame(kind: bytes, event: bytes) -> bytes:
    """Return an event as a Server-Sent Event."""
    return b"event: %b\ndata: %b\n\n" % (kind, event)


def error_frame(error: RequestError, stream_id: str | None = None) -> bytes:
    """Return the error event for a message that started no answer."""
    event = {"type": "error", "status": error.status, "error": error_object(error)}
    if stream_id is not None:
        event["stream_id"] = stream_id
    return _encode(event)


def notice_frame(finish_within_s: float) -> bytes:
    """Return the event that announces the shutdown of this process: running answers may finish, and
    new requests need another connection."""
    event = {
        "type": "notice",
        "code": "draining",
        "message": "this server is shutting down: reconnect for new requests",
        "finish_within_s": finish_within_s,
    }
    return _encode(event)


class ResponseEvents(Serializer):
    """The events of one response.

    Args:
      head: the response before its end.
      fields: the request.
      framing: returns the frame of an event from its type and JSON.
      tool_form: the format of tool calls in the text; None without tools.
      thinking: the format of reasoning in the text; None without reasoning.
      stream_id: the lane that each event names; None for none.

    Attributes:
      response: the final response; its head before the end.
      items: the items so far.
      have_failed: whether the answer failed.
      own_items: the items of the request.
      on_end: called at the end, before the client is notified.
    """

    def __init__(
        self,
        head: dict[str, Any],
        fields: ResponseFields,
        framing: Callable[[bytes, bytes], bytes],
        tool_form: CallsRead | None = None,
        thinking: Thinking | None = None,
        stream_id: str | None = None,
    ) -> None:
        self.response = head
        self.items: list[Item] = []
        self.own_items: Sequence[InputItem] = ()
        self.have_failed = False
        self.on_end: Callable[[ResponseEvents], None] = lambda _: None
        self._hex = head["id"].removeprefix("resp_")
        self._shows_output = not fields.only_warms
        self._wants_logprobs = fields.wants_logprobs
        self._is_message = tool_form is None and thinking is None  # all text is one message
        self._reader = reader_of(tool_form, thinking)
        self._open: Item | None = None  # the last item
        self._framing = framing
        self._sequence = 0
        self._lane = {} if stream_id is None else {"stream_id": stream_id}
        self._delta_form = (b"", b"", b"")

    def begin(self) -> list[bytes]:
        """Return the events before the answer."""
        frames = [
            self._event("response.created", response=self.response),
            self._event("response.in_progress", response=self.response),
        ]
        if self._shows_output and self._is_message:
            frames += self._open_message()
        return frames

    def event(self, index: int, event: Event) -> list[bytes]:
        """Return the frames of an event; the last one ends the answer."""
        del index  # there is one choice
        match event:
            case Delta():
                return self._delta(event)
            case Finished():
                pieces = self._reader.finish(is_cut=event.is_cut)
                left = [frame for piece in pieces for frame in self._piece(piece)]
                return left + self._finish(event)
            case Failed() if self.is_stopped:
                # Text generated so far stays valid.
                return self._end("cancelled", event.usage, last="incomplete")
            case Failed():
                self.have_failed = True
                self.response |= {
                    "status": "failed",
                    "error": response_error(event.error),
                    "usage": response_usage(event.usage),
                }
                return [self._last("response.failed")]

    def _delta(self, delta: Delta) -> list[bytes]:
        """Return the frames of new text; empty for an incomplete character."""
        if not self._shows_output or not (delta.text or delta.logprobs):
            return []
        scored = b""
        if self._wants_logprobs and delta.logprobs:
            scored = _encode(chat_logprobs(delta.logprobs))[1:-1]
        frames: list[bytes] = []
        pieces = self._reader.push(delta.text)
        if scored and not pieces and isinstance(self._open, MessageItem):
            pieces = [Text("")]
        for piece in pieces:
            frames += self._piece(piece, scored)
            scored = b""
        return frames

    def _piece(self, piece: Piece, scored: bytes = b"") -> list[bytes]:
        item, opening = self._open, []
        match piece:
            case Text():
                if not isinstance(item, MessageItem):
                    opening = self._open_message()
                return [*opening, self._text(piece.text, scored)]
            case Reasoning():
                if not isinstance(item, ReasoningItem):
                    item = ReasoningItem(f"rs_{self._hex}_{len(self.items)}")
                    opening = self._open_item(item)
                item.text += piece.text
            case CallBegins():
                name = f"fc_{self._hex}_{len(self.items)}"
                return self._open_item(CallItem(name, new_call_id(), piece.name))
            case Arguments():
                assert isinstance(item, CallItem)
                item.arguments += piece.text
        return [*opening, self._event(f"{item.EVENT}.delta", **self._place, delta=piece.text)]

    def _text(self, text: str, scored: bytes) -> bytes:
        assert isinstance(self._open, MessageItem)
        self._open.text += text
        if scored:
            self._open.logprobs += b"," + scored if self._open.logprobs else scored
        before, between, after = self._delta_form
        sequence, self._sequence = self._sequence, self._sequence + 1
        shown = _encode(text)
        event = b"%b%d%b%b%b[%b]%b" % (before, sequence, between, shown, LOGPROBS, scored, after)
        return self._framing(DELTA, event)

    def _open_message(self) -> list[bytes]:
        place = f"_{len(self.items)}" if self.items else ""
        frames = self._open_item(MessageItem(f"msg_{self._hex}{place}"))
        # Most events are deltas that differ only in their text, so the rest is encoded once.
        self._delta_form = (
            b'{"type":"%b","sequence_number":' % DELTA,
            b',%b,"delta":' % _encode(self._place)[1:-1],
            b"," + _encode(self._lane)[1:] if self._lane else b"}",
        )
        return frames

    def _open_item(self, item: Item) -> list[bytes]:
        frames = self._close_item("completed")
        index, shown = len(self.items), item.shown("in_progress")
        self._open = item
        self.items.append(item)
        frames.append(self._event("response.output_item.added", output_index=index, item=shown))
        if part := item.part():
            frames.append(self._event("response.content_part.added", **self._place, part=part))
        return frames

    def _close_item(self, status: str) -> list[bytes]:
        """Close the open item and its parts, innermost first."""
        item, place = self._open, self._place
        if item is None:
            return []
        frames = [self._event(f"{item.EVENT}.done", **place, **item.whole())]
        if part := item.part():
            frames.append(self._event("response.content_part.done", **place, part=part))
        index, shown = place["output_index"], item.shown(status)
        frames.append(self._event("response.output_item.done", output_index=index, item=shown))
        self._open = None
        return frames

    @property
    def _place(self) -> dict[str, Any]:
        """Where the deltas of the open item belong."""
        if self._open is None:
            return {}
        index = {} if isinstance(self._open, CallItem) else {"content_index": 0}
        return {"item_id": self._open.item_id, "output_index": len(self.items) - 1, **index}

    def _finish(self, end: Finished) -> list[bytes]:
        """Return the frames of a normal end; a call cut by a stop token is incomplete."""
        if not self._shows_output:
            return self._end("completed", replace(end.usage, completion_tokens=0))
        if end.reason is FinishReason.STOP:
            is_cut = end.is_cut and isinstance(self._open, CallItem)
            return self._end("completed", end.usage, last="incomplete" if is_cut else "completed")
        self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._end("incomplete", end.usage, last="incomplete")

    def _end(self, status: str, usage: Usage, last: str = "completed") -> list[bytes]:
        """Return the final frames, with the status of the response and of the last item."""
        frames = self._close_item(last)
        output = [item.shown("completed") for item in self.items]
        output[-1:] = [item.shown(last) for item in self.items[-1:]]
        self.response |= {"status": status, "output": output, "usage": response_usage(usage)}
        kind = "response.completed" if status == "completed" else "response.incomplete"
        return [*frames, self._last(kind)]

    def _last(self, kind: str) -> bytes:
        self.on_end(self)
        return self._event(kind, response=self.response)

    def _event(self, kind: str, **fields: object) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **fields, **self._lane}
        self._sequence += 1
        return self._framing(kind.encode(), _encode(event))

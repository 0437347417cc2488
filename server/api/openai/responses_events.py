"""The object of a response as it grows, and the events that show it.

An answer is one message with one part of text; where the model reasons or calls tools, reasoning
and calls are items too. What only warms the prefix cache has none.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

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
from ...text.reasoning import Thinking, reader_of
from ...text.tool_calls import Arguments, CallBegins, Piece, PieceReader, Reasoning, Text, ToolForm
from ..errors import error_object
from ..limits import tier_field
from ..sampling import chat_logprobs
from ..stream import Serializer
from .chunks import new_call_id

if TYPE_CHECKING:
    from triolet.config import ServerConfig
    from triolet.errors import RequestError

    from .responses_schema import ResponseFields


TOO_MANY: Final = 429


def response_usage(usage: Usage) -> dict[str, Any]:
    """Return token counts in the words of this API."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def response_error(error: RequestError) -> dict[str, Any]:
    """Return the value of `error`. `code` is out of the API's closed list; `type` is our own."""
    code = "server_error"
    if error.status < 500:
        code = "rate_limit_exceeded" if error.status == TOO_MANY else "invalid_prompt"
    return {"code": code, "message": error.message, "param": error.param, "type": error.code}


@dataclass(slots=True)
class MessageItem:
    """Text of an answer."""

    item_id: str
    text: str = ""
    # As text, a fifth of what the same would take as objects: the end of the answer repeats it
    # all, and until then a client that reads slowly has it kept here.
    logprobs: bytearray = field(default_factory=bytearray)

    def shown(self, status: str) -> dict[str, Any]:
        """Return the item; it has its part only once it has ended."""
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [] if status == "in_progress" else [self.part()],
        }

    def part(self) -> dict[str, Any]:
        """Return the text as far as it is known."""
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": self.all_logprobs,
        }

    @property
    def all_logprobs(self) -> msgspec.Raw:
        """The list of every token's logprobs."""
        return msgspec.Raw(b"[" + self.logprobs + b"]")

    def add(self, text: str, scored: bytes) -> None:
        """Take in more text and the inside of its tokens' list of logprobs."""
        self.text += text
        if scored:
            self.logprobs += b"," + scored if self.logprobs else scored


@dataclass(slots=True)
class CallItem:
    """A call of a tool."""

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
            "name": self.name,
            "arguments": self.arguments,
            "status": status,
        }


@dataclass(slots=True)
class ReasoningItem:
    """What the model thought before it answered, or between two calls."""

    item_id: str
    text: str = ""

    def shown(self, status: str) -> dict[str, Any]:
        """Return the item; it has its part only once it has ended."""
        return {
            "id": self.item_id,
            "type": "reasoning",
            "summary": [],
            "content": [] if status == "in_progress" else [self.part()],
            "encrypted_content": None,
            "status": status,
        }

    def part(self) -> dict[str, Any]:
        """Return the text as far as it is known."""
        return {"type": "reasoning_text", "text": self.text}


Item = MessageItem | CallItem | ReasoningItem


class ResponseDocument:
    """One response.

    Args:
      response_id: `resp_` and hex.
      fields: what was asked for.
      request: what is generated for it.
      config: names the served model.
      tool_form: how calls of tools in the answer are written; None if there are none.
      thinking: how reasoning in the answer is written; None if there is none.

    Attributes:
      items: of the answer so far.
      shows_output: whether it has any.
      wants_logprobs: whether tokens are listed with what the model thought of them.
      is_message: whether it is one message, whatever it says.
      head: the response before its end.
    """

    def __init__(
        self,
        response_id: str,
        fields: ResponseFields,
        request: GenerationRequest,
        config: ServerConfig,
        tool_form: ToolForm | None = None,
        thinking: Thinking | None = None,
    ) -> None:
        self.items: list[Item] = []
        self.shows_output = not fields.only_warms
        self.wants_logprobs = fields.wants_logprobs
        self.is_message = tool_form is None and thinking is None
        self._tool_form = tool_form
        self._thinking = thinking
        self._hex = response_id.removeprefix("resp_")
        choice = fields.tool_choice
        self.head: dict[str, Any] = {
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
            "model": config.model_name,
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
            "tool_choice": choice.model_dump()
            if isinstance(choice, BaseModel)
            else choice or "auto",
            "tools": [tool.model_dump() for tool in fields.tools or ()],
            "top_logprobs": request.sampling.logprobs or 0,
            "top_p": request.sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            **tier_field(fields.service_tier, request.scheduling),
        }

    def reader(self) -> PieceReader:
        """Return what reads its text."""
        return reader_of(self._tool_form, self._thinking)

    def add_reasoning(self) -> ReasoningItem:
        """Begin reasoning, which is the next item."""
        item = ReasoningItem(f"rs_{self._hex}_{len(self.items)}")
        self.items.append(item)
        return item

    def add_message(self) -> MessageItem:
        """Begin a message, which is the next item."""
        place = f"_{len(self.items)}" if self.items else ""
        item = MessageItem(f"msg_{self._hex}{place}")
        self.items.append(item)
        return item

    def add_call(self, name: str) -> CallItem:
        """Begin a call, which is the next item."""
        item = CallItem(f"fc_{self._hex}_{len(self.items)}", new_call_id(), name)
        self.items.append(item)
        return item

    def finished(self, end: Finished) -> dict[str, Any]:
        """Return the response at its good end; a call that a stop token cut is incomplete."""
        usage = end.usage
        if not self.shows_output:
            return self._ended("completed", replace(usage, completion_tokens=0))
        if end.reason is FinishReason.STOP:
            return self._ended("completed", usage, is_cut=end.is_cut)
        return self._ended("incomplete", usage) | {
            "incomplete_details": {"reason": "max_output_tokens"}
        }

    def cancelled(self, usage: Usage) -> dict[str, Any]:
        """Return the response that its client ended; what was said so far stands."""
        return self._ended("cancelled", usage)

    def failed(self, error: RequestError, usage: Usage) -> dict[str, Any]:
        """Return the response at its bad end."""
        return self.head | {
            "status": "failed",
            "error": response_error(error),
            "usage": response_usage(usage),
        }

    def _ended(self, status: str, usage: Usage, *, is_cut: bool = False) -> dict[str, Any]:
        output = [item.shown("completed") for item in self.items]
        is_cut = is_cut and bool(self.items) and isinstance(self.items[-1], CallItem)
        if output and (is_cut or status != "completed"):
            output[-1] = self.items[-1].shown("incomplete")
        return self.head | {
            "status": status,
            "output": output,
            "usage": response_usage(usage),
        }


DELTA: Final = b"response.output_text.delta"
LOGPROBS: Final = b',"logprobs":'

_encode = msgspec.json.Encoder().encode


class Framing(Protocol):
    """How an event travels."""

    def __call__(self, kind: bytes, event: bytes) -> bytes:
        """Return the frame of an event: its type, and all of it as JSON."""
        ...


def message_frame(kind: bytes, event: bytes) -> bytes:
    """Return an event as a message on a WebSocket."""
    return event


def sse_frame(kind: bytes, event: bytes) -> bytes:
    """Return an event as a Server-Sent Event."""
    return b"event: %b\ndata: %b\n\n" % (kind, event)


def error_frame(error: RequestError, stream_id: str | None = None) -> bytes:
    """Return the event for a message that began no answer."""
    event = {"type": "error", "status": error.status, "error": error_object(error)}
    if stream_id is not None:
        event["stream_id"] = stream_id
    return _encode(event)


def notice_frame(finish_within_s: float) -> bytes:
    """Return the event that says that this process leaves: answers under way go on, the next
    question needs another connection."""
    event = {
        "type": "notice",
        "code": "draining",
        "message": "this server leaves: answers under way may finish; connect again for the next",
        "finish_within_s": finish_within_s,
    }
    return _encode(event)


class ResponseEvents(Serializer):
    """The events of one response.

    Args:
      document: the response, which grows by what is written.
      framing: how events travel.
      stream_id: the lane that each event names; None for none.

    Attributes:
      response: as it is at the end; its head before.
      are_over: nothing follows.
      have_failed: and the end was a bad one.
    """

    def __init__(
        self, document: ResponseDocument, framing: Framing, stream_id: str | None = None
    ) -> None:
        self.response = document.head
        self.are_over = False
        self.have_failed = False
        self._document = document
        self._reader = document.reader()
        self._open: Item | None = None
        self._open_at = 0
        self._framing = framing
        self._sequence = 0
        self._lane = {} if stream_id is None else {"stream_id": stream_id}
        self._delta_form = (b"", b"", b"")

    def begin(self) -> list[bytes]:
        """Return what comes before the answer."""
        document = self._document
        frames = [
            self._event("response.created", response=document.head),
            self._event("response.in_progress", response=document.head),
        ]
        if document.shows_output and document.is_message:
            frames += self._open_message()
        return frames

    def event(self, index: int, event: Event) -> list[bytes]:
        """Return what something that happened looks like; the last of it ends the answer."""
        del index  # there is one choice
        match event:
            case Delta():
                return self._delta(event)
            case Finished():
                pieces = self._reader.finish(is_cut=event.is_cut)
                left = [frame for piece in pieces for frame in self._piece(piece)]
                response = self._document.finished(event)
                return left + self._end(response)
            case Failed() if self.is_stopped:
                return self._end(self._document.cancelled(event.usage))
            case Failed():
                return self._fail(event.error, event.usage)

    def _delta(self, delta: Delta) -> list[bytes]:
        """Return what new text looks like; nothing for part of a character."""
        document = self._document
        if not document.shows_output or not (delta.text or delta.logprobs):
            return []
        scored = b""
        if document.wants_logprobs and delta.logprobs:
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
        match piece:
            case Text():
                opening = [] if isinstance(self._open, MessageItem) else self._open_message()
                return [*opening, self._text(piece.text, scored)]
            case Reasoning():
                opening = [] if isinstance(self._open, ReasoningItem) else self._open_reasoning()
                assert isinstance(self._open, ReasoningItem)
                self._open.text += piece.text
                inside = {**self._place, "content_index": 0, "delta": piece.text}
                return [*opening, self._event("response.reasoning_text.delta", **inside)]
            case CallBegins():
                return self._open_item(self._document.add_call(piece.name))
            case Arguments():
                assert isinstance(self._open, CallItem)
                self._open.arguments += piece.text
                delta = {**self._place, "delta": piece.text}
                return [self._event("response.function_call_arguments.delta", **delta)]

    def _text(self, text: str, scored: bytes) -> bytes:
        assert isinstance(self._open, MessageItem)
        self._open.add(text, scored)
        before, between, after = self._delta_form
        sequence, self._sequence = self._sequence, self._sequence + 1
        shown = _encode(text)
        event = b"%b%d%b%b%b[%b]%b" % (before, sequence, between, shown, LOGPROBS, scored, after)
        return self._framing(DELTA, event)

    def _open_message(self) -> list[bytes]:
        item = self._document.add_message()
        frames = self._open_item(item)
        place = {**self._place, "content_index": 0}
        # Most events are deltas, which differ in little: what is around that is encoded once.
        self._delta_form = (
            b'{"type":"%b","sequence_number":' % DELTA,
            b',%b,"delta":' % _encode(place)[1:-1],
            b"," + _encode(self._lane)[1:] if self._lane else b"}",
        )
        return [*frames, self._event("response.content_part.added", **place, part=item.part())]

    def _open_reasoning(self) -> list[bytes]:
        item = self._document.add_reasoning()
        frames = self._open_item(item)
        place = {**self._place, "content_index": 0}
        return [*frames, self._event("response.content_part.added", **place, part=item.part())]

    def _open_item(self, item: Item) -> list[bytes]:
        closed = self._close_item("completed")
        self._open = item
        self._open_at = len(self._document.items) - 1
        shown = item.shown("in_progress")
        return [
            *closed,
            self._event("response.output_item.added", output_index=self._open_at, item=shown),
        ]

    def _close_item(self, status: str) -> list[bytes]:
        """Close what is open, from the inside out."""
        item, place = self._open, self._place
        self._open = None
        frames: list[bytes] = []
        match item:
            case None:
                return []
            case MessageItem():
                inside = {**place, "content_index": 0}
                told = {"text": item.text, "logprobs": item.all_logprobs}
                frames.append(self._event("response.output_text.done", **inside, **told))
                part = item.part()
                frames.append(self._event("response.content_part.done", **inside, part=part))
            case ReasoningItem():
                inside = {**place, "content_index": 0}
                frames.append(self._event("response.reasoning_text.done", **inside, text=item.text))
                part = item.part()
                frames.append(self._event("response.content_part.done", **inside, part=part))
            case CallItem():
                told = {"name": item.name, "arguments": item.arguments}
                kind = "response.function_call_arguments.done"
                frames.append(self._event(kind, **place, **told))
        index, shown = place["output_index"], item.shown(status)
        frames.append(self._event("response.output_item.done", output_index=index, item=shown))
        return frames

    @property
    def _place(self) -> dict[str, Any]:
        """Where the open item is."""
        if self._open is None:
            return {}
        return {"item_id": self._open.item_id, "output_index": self._open_at}

    def _fail(self, error: RequestError, usage: Usage) -> list[bytes]:
        self.are_over = self.have_failed = True
        self.response = self._document.failed(error, usage)
        return [self._event("response.failed", response=self.response)]

    def _end(self, response: dict[str, Any]) -> list[bytes]:
        self.are_over = True
        self.response = response
        output = response["output"]
        closed = self._close_item(output[-1]["status"] if output else "completed")
        is_complete = response["status"] == "completed"
        kind = "response.completed" if is_complete else "response.incomplete"
        return [*closed, self._event(kind, response=response)]

    def _event(self, kind: str, **fields: object) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **fields, **self._lane}
        self._sequence += 1
        return self._framing(kind.encode(), _encode(event))

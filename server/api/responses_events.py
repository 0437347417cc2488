"""The events of one response, in order, as frames of a WebSocket or of Server-Sent Events. Pure.

The order is: created, in_progress, an item and its part added, deltas, the same closed from the
inside out, the next item, and one terminal event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from ..generation import Delta, Failed, Finished
from ..text.tool_calls import Arguments, CallBegins, Reasoning, Text
from .chunks import KEEP_ALIVE
from .errors import error_object
from .logprobs import chat_logprobs
from .responses_document import CallItem, MessageItem, ReasoningItem

if TYPE_CHECKING:
    from triolet.errors import RequestError

    from ..generation import Event, Usage
    from ..text.tool_calls import Piece
    from .responses_document import Item, ResponseDocument

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


class ResponseEvents:
    """Writes the events of one response.

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

    def write(self, event: Event, *, is_cancelled: bool = False) -> list[bytes]:
        """Return what something that happened looks like.

        Args:
          event: what happened.
          is_cancelled: whether the client has asked for the end, which is not a bad one then.
        """
        match event:
            case Delta():
                return self._delta(event)
            case Finished():
                pieces = self._reader.finish(is_cut=event.is_cut)
                left = [frame for piece in pieces for frame in self._piece(piece)]
                response = self._document.finished(event)
                return left + self._end(response)
            case Failed() if is_cancelled:
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


class ResponseStream:
    """The stream of a response over HTTP (see StreamForm).

    Args:
      events: what is written.
    """

    keep_alive = KEEP_ALIVE

    def __init__(self, events: ResponseEvents) -> None:
        self._events = events

    def begin(self) -> bytes:
        """Return what comes before the text."""
        return b"".join(self._events.begin())

    def write(self, index: int, event: Event) -> bytes:
        """Return what something that happened looks like; the last of it ends the stream."""
        return b"".join(self._events.write(event))

    def end(self) -> bytes:
        """Return nothing: the terminal event was the end."""
        return b""

"""The events of one response, in order, as frames of a WebSocket or of Server-Sent Events. Pure.

The order is: created, in_progress, the message and its part added, deltas, the same closed from the
inside out, and one terminal event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from ..generation import Delta, Failed, Finished
from .chunks import KEEP_ALIVE
from .errors import error_object

if TYPE_CHECKING:
    from triolet.errors import RequestError

    from ..generation import Event, Usage
    from .responses_document import ResponseDocument

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
      are_over: nothing follows.
      have_failed: and the end was a bad one.
    """

    def __init__(
        self, document: ResponseDocument, framing: Framing, stream_id: str | None = None
    ) -> None:
        self.are_over = False
        self.have_failed = False
        self._document = document
        self._framing = framing
        self._sequence = 0
        self._lane = {} if stream_id is None else {"stream_id": stream_id}
        self._place = {"item_id": document.item_id, "output_index": 0, "content_index": 0}
        # Most events are deltas, which differ in little: what is around that is encoded once.
        self._delta_form = (
            b'{"type":"%b","sequence_number":' % DELTA,
            b',%b,"delta":' % _encode(self._place)[1:-1],
            b"," + _encode(self._lane)[1:] if self._lane else b"}",
        )

    def begin(self) -> list[bytes]:
        """Return what comes before the text."""
        document = self._document
        frames = [
            self._event("response.created", response=document.head),
            self._event("response.in_progress", response=document.head),
        ]
        if document.shows_output:
            item = document.item("in_progress")
            frames += [
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **self._place, part=document.part()),
            ]
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
                response = self._document.finished(event.reason, event.usage)
                return self._close(response)
            case Failed() if is_cancelled:
                return self._close(self._document.cancelled(event.usage))
            case Failed():
                return self._fail(event.error, event.usage)

    def _delta(self, delta: Delta) -> list[bytes]:
        """Return what new text looks like; nothing for part of a character."""
        scored = self._document.add(delta)
        if scored is None:
            return []
        before, between, after = self._delta_form
        sequence, self._sequence = self._sequence, self._sequence + 1
        text = _encode(delta.text)
        event = b"%b%d%b%b%b[%b]%b" % (before, sequence, between, text, LOGPROBS, scored, after)
        return [self._framing(DELTA, event)]

    def _fail(self, error: RequestError, usage: Usage) -> list[bytes]:
        self.are_over = self.have_failed = True
        return [self._event("response.failed", response=self._document.failed(error, usage))]

    def _close(self, response: dict[str, Any]) -> list[bytes]:
        self.are_over = True
        is_complete = response["status"] == "completed"
        kind = "response.completed" if is_complete else "response.incomplete"
        return [*self._close_items(response), self._event(kind, response=response)]

    def _close_items(self, response: dict[str, Any]) -> list[bytes]:
        document = self._document
        return [
            frame
            for item in response["output"]
            for frame in (
                self._event(
                    "response.output_text.done",
                    **self._place,
                    text=document.text,
                    logprobs=document.all_logprobs,
                ),
                self._event("response.content_part.done", **self._place, part=document.part()),
                self._event("response.output_item.done", output_index=0, item=item),
            )
        ]

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

"""The events of one answer of the Responses API, in order, as text frames. Pure: knows no socket.

Every answer is one message with one part of text. The order is: created, in_progress, the item and
its part added, deltas, the same closed from the inside out, and one terminal event.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ..generation import FinishReason
from .errors import error_object
from .logprobs import chat_logprobs

if TYPE_CHECKING:
    from triolet.config import ServerConfig
    from triolet.errors import RequestError

    from ..generation import Delta, GenerationRequest, Usage
    from .responses_schema import ResponseCreate

LOGPROBS: Final = b',"logprobs":'

_encode = msgspec.json.Encoder().encode


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


def response_usage(usage: Usage) -> dict[str, Any]:
    """Return token counts in the words of this API."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class ResponseEvents:
    """Writes the events of one answer.

    Args:
      response_id: `resp_` and hex.
      create: what was asked for.
      request: what is generated for it.
      config: names the served model.

    Attributes:
      text: of the answer so far.
      are_over: nothing follows.
      have_failed: and the end was a bad one.
    """

    def __init__(
        self,
        response_id: str,
        create: ResponseCreate,
        request: GenerationRequest,
        config: ServerConfig,
    ) -> None:
        self.text = ""
        self.are_over = False
        self.have_failed = False
        self._item_id = f"msg_{response_id.removeprefix('resp_')}"
        # As text, a fifth of what the same would take as objects: the end of the answer repeats it
        # all, and until then a client that reads slowly has it kept here.
        self._logprobs = bytearray()
        self._wants_logprobs = bool(create.include)
        self._sequence = 0
        self._lane = {} if create.stream_id is None else {"stream_id": create.stream_id}
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        # Most events are deltas, which differ in little: what is around that is encoded once.
        self._delta_form = (
            b'{"type":"response.output_text.delta","sequence_number":',
            b',%b,"delta":' % _encode(self._place)[1:-1],
            b"," + _encode(self._lane)[1:] if self._lane else b"}",
        )
        self._response: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": create.instructions,
            "max_output_tokens": create.max_output_tokens,
            "metadata": {},
            "model": config.model_name,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": create.previous_response_id,
            "store": False,
            "temperature": request.sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": request.sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def begin(self) -> list[bytes]:
        """Return what comes before the text."""
        return [
            self._event("response.created", response=self._response),
            self._event("response.in_progress", response=self._response),
            self._event("response.output_item.added", output_index=0, item=self._item(None)),
            self._event("response.content_part.added", **self._place, part=self._part()),
        ]

    def delta(self, delta: Delta) -> list[bytes]:
        """Return what new text looks like; nothing for part of a character."""
        if not (delta.text or delta.logprobs):
            return []
        scored = b""
        if self._wants_logprobs and delta.logprobs:
            scored = _encode(chat_logprobs(delta.logprobs))[1:-1]
            self._logprobs += b"," + scored if self._logprobs else scored
        self.text += delta.text
        before, between, after = self._delta_form
        sequence, self._sequence = self._sequence, self._sequence + 1
        text = _encode(delta.text)
        return [b"%b%d%b%b%b[%b]%b" % (before, sequence, between, text, LOGPROBS, scored, after)]

    def finish(self, reason: FinishReason, usage: Usage) -> list[bytes]:
        """Return the good end."""
        if reason is FinishReason.STOP:
            return self._close("response.completed", "completed", usage)
        return self._close(
            "response.incomplete", "incomplete", usage, {"reason": "max_output_tokens"}
        )

    def cancelled(self, usage: Usage) -> list[bytes]:
        """Return the end that the client asked for; what was said so far stands."""
        return self._close("response.incomplete", "cancelled", usage, {"reason": "cancelled"})

    def fail(self, error: RequestError, usage: Usage) -> list[bytes]:
        """Return the bad end."""
        self.are_over = self.have_failed = True
        response = self._response | {
            "status": "failed",
            "error": {"code": error.code, "message": error.message},
            "usage": response_usage(usage),
        }
        return [self._event("response.failed", response=response)]

    def _close(
        self, kind: str, status: str, usage: Usage, details: dict[str, str] | None = None
    ) -> list[bytes]:
        self.are_over = True
        item = self._item("completed" if status == "completed" else "incomplete")
        response = self._response | {
            "status": status,
            "incomplete_details": details,
            "output": [item],
            "usage": response_usage(usage),
        }
        return [
            self._event(
                "response.output_text.done",
                **self._place,
                text=self.text,
                logprobs=self._all_logprobs,
            ),
            self._event("response.content_part.done", **self._place, part=self._part()),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(kind, response=response),
        ]

    @property
    def _all_logprobs(self) -> msgspec.Raw:
        return msgspec.Raw(b"[" + self._logprobs + b"]")

    def _item(self, status: str | None) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status or "in_progress",
            "content": [self._part()] if status else [],
        }

    def _part(self) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": self._all_logprobs,
        }

    def _event(self, kind: str, **fields: object) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **fields, **self._lane}
        self._sequence += 1
        return _encode(event)

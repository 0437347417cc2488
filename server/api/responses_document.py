"""The object of a response as it grows: head, message, end. Pure: knows no stream and no socket.

Every answer is one message with one part of text; what only warms the prefix cache has none.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ..generation import FinishReason
from .logprobs import chat_logprobs

if TYPE_CHECKING:
    from triolet.config import ServerConfig
    from triolet.errors import RequestError

    from ..generation import Delta, GenerationRequest, Usage
    from .responses_schema import ResponseFields

_encode = msgspec.json.Encoder().encode

TOO_MANY: Final = 429


def response_usage(usage: Usage) -> dict[str, Any]:
    """Return token counts in the words of this API."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def response_error(error: RequestError) -> dict[str, Any]:
    """Return the value of `error`. `code` is out of the API's closed list; `type` is our own."""
    code = "server_error"
    if error.status < 500:
        code = "rate_limit_exceeded" if error.status == TOO_MANY else "invalid_prompt"
    return {"code": code, "message": error.message, "param": error.param, "type": error.code}


class ResponseDocument:
    """One response.

    Args:
      response_id: `resp_` and hex.
      fields: what was asked for.
      request: what is generated for it.
      config: names the served model.

    Attributes:
      text: of the answer so far.
      shows_output: whether it has a message at all.
      head: the response before its end.
      item_id: of its message.
    """

    def __init__(
        self,
        response_id: str,
        fields: ResponseFields,
        request: GenerationRequest,
        config: ServerConfig,
    ) -> None:
        self.text = ""
        self.shows_output = not fields.only_warms
        self.item_id = f"msg_{response_id.removeprefix('resp_')}"
        # As text, a fifth of what the same would take as objects: the end of the answer repeats it
        # all, and until then a client that reads slowly has it kept here.
        self._logprobs = bytearray()
        self._wants_logprobs = fields.wants_logprobs
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
            "metadata": {},
            "model": config.model_name,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": fields.previous_response_id,
            "store": False,
            "temperature": request.sampling.temperature,
            "text": {"format": fields.text_format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": request.sampling.logprobs or 0,
            "top_p": request.sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def add(self, delta: Delta) -> bytes | None:
        """Take in what was generated.

        Returns:
          The new tokens' logprobs as the inside of a JSON array; None if there is nothing to show.
        """
        if not self.shows_output or not (delta.text or delta.logprobs):
            return None
        scored = b""
        if self._wants_logprobs and delta.logprobs:
            scored = _encode(chat_logprobs(delta.logprobs))[1:-1]
            self._logprobs += b"," + scored if self._logprobs else scored
        self.text += delta.text
        return scored

    def finished(self, reason: FinishReason, usage: Usage) -> dict[str, Any]:
        """Return the response at its good end."""
        if not self.shows_output:
            return self._ended("completed", replace(usage, completion_tokens=0))
        if reason is FinishReason.STOP:
            return self._ended("completed", usage)
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

    @property
    def all_logprobs(self) -> msgspec.Raw:
        """The list of every token's logprobs."""
        return msgspec.Raw(b"[" + self._logprobs + b"]")

    def item(self, status: str) -> dict[str, Any]:
        """Return the message; it has its part only once it has ended."""
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [] if status == "in_progress" else [self.part()],
        }

    def part(self) -> dict[str, Any]:
        """Return the message's text as far as it is known."""
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": self.all_logprobs,
        }

    def _ended(self, status: str, usage: Usage) -> dict[str, Any]:
        of_item = "completed" if status == "completed" else "incomplete"
        return self.head | {
            "status": status,
            "output": [self.item(of_item)] if self.shows_output else [],
            "usage": response_usage(usage),
        }

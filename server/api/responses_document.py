"""The object of a response as it grows: head, items, end. Pure: knows no stream and no socket.

An answer is one message with one part of text; where the model reasons or calls tools, reasoning
and calls are items too. What only warms the prefix cache has none.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pydantic import BaseModel

from ..generation import FinishReason
from .claims import tier_field
from .pieces import reader_of
from .tool_chunks import new_call_id

if TYPE_CHECKING:
    from triolet.config import ServerConfig
    from triolet.errors import RequestError

    from ..generation import Finished, GenerationRequest, Usage
    from ..text.reasoning import Thinking
    from ..text.tool_calls import PieceReader, ToolForm
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
            **tier_field(fields.service_tier, request.claim),
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

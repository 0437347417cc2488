"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's Messages API defines them.

A message's content is a list of numbered blocks; a block opens with its first text. A stream
consists of message_start, ping, the blocks, message_delta and message_stop.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import trio
from quart import request as http_request

from triolet.errors import RequestError, invalid_request

from ...contract.generation import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    Usage,
)
from ...tenants.tenancy import current_tenant
from ...text.tool_forms.reasoning import Thinking, reader_of
from ...text.tool_forms.tool_calls import Arguments, CallBegins, CallsRead, Piece, Reasoning, Text
from ...text.tool_forms.whole_calls import Part, WholeCall, WholeCalls
from ..auto import count_prompt, plan_request
from ..body import CAP_HEADER, current_scope, note_ignored, read_fields, shown_request_id
from ..errors import UNSUPPORTED_PARAMETER, message_with_param, params_called
from ..fields import NamedTool, named_tool, offered_function
from ..generate import (
    GenerationPlan,
    begin_stream,
    begin_whole,
    json_response,
    own_requests,
    warming,
)
from ..limits import check_output, message_tier
from ..openai.chat import plan_chat, prompt_of_chat
from ..schemas import (
    EXTENSION_NAME,
    MAX_UNKNOWN,
    TURNS_AT_ONCE,
    ChatRequest,
    Message,
    shared_fields,
)
from ..stream import Answer, Serializer, WholeAnswer
from .schema import CountRequest, MessagesRequest, PromptFields, ToolUse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from hashlib import blake2b as Hash

    from quart import Response

    from ..served_models import ServedModel
    from ..services import Services


_encode = msgspec.json.Encoder().encode

SIGNATURE_BYTES: Final = 32
"""Size of the digest that serves as a reasoning block's signature. It is never verified."""
PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
NO_TIER: Final[Mapping[str, str]] = {}
_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_SERVED_BETAS: Final = frozenset(
    "claude-code-20250219 context-management-2025-06-27 effort-2025-11-24 "
    "fine-grained-tool-streaming-2025-05-14 interleaved-thinking-2025-05-14 "
    "prompt-caching-2024-07-31 structured-outputs-2025-11-13 token-counting-2024-11-01".split()
)
"""Supported values of `anthropic-beta`. Their fields are read with or without them."""

_DETAILS: Final = {"thread": "thread_unsupported_request"}
"""The `error_code` for an unsupported parameter that makes the official client retry without it."""


def message_error(error: RequestError, request_id: str) -> dict[str, Any]:
    """Return an error in this API's format, which has no field for the parameter's name."""
    kind = _ERROR_TYPES.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "api_error"
    shown: dict[str, Any] = {"type": kind, "message": message_with_param(error)}
    if error.code == UNSUPPORTED_PARAMETER and error.param in _DETAILS:
        shown["details"] = {"error_code": _DETAILS[error.param]}
    return {"type": "error", "error": shown, "request_id": request_id}


class MessageStream(Serializer):
    """Writes one message, as a stream or whole.

    Args:
      request: its generation request.
      message_id: `msg_` and hex.
      model: name of the served model.
      max_tokens: as the client asked; 0 for a request that only warms the prefix cache.
      request_id: the id in errors.
      tool_form: the format of tool calls in the text; None without tools.
      thinking: the format of reasoning in the text; None without reasoning.
      tier: the service tier shown in its usage.
    """

    keep_alive = PING

    def __init__(
        self,
        request: GenerationRequest,
        message_id: str,
        model: str,
        max_tokens: int,
        request_id: str,
        tool_form: CallsRead | None = None,
        thinking: Thinking | None = None,
        tier: Mapping[str, str] = NO_TIER,
    ) -> None:
        self._request = request
        self._message_id = message_id
        self._model = model
        self._max_tokens = max_tokens
        self._request_id = request_id
        self._reader = reader_of(tool_form, thinking)
        self._tier = tier
        self._block = -1
        self._open_kind: str | None = None
        self._digest = _signing()

    def whole(self, answers: Sequence[Answer]) -> bytes:
        """Return the whole message."""
        (answer,) = answers
        end = answer.finished
        parts = WholeCalls(self._reader).read(answer.text, is_cut=end.is_cut)
        content = [_block(part) for part in parts] if self._max_tokens else []
        return _encode(self._message(self._usage(end.usage), content) | self._stop(end))

    def _message(self, usage: dict[str, Any], content: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the message without its end."""
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """Return the final token counts. This API counts cached tokens separately from other
        input."""
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens if self._max_tokens else 0,
            **self._tier,
        }

    def _stop(self, end: Finished) -> dict[str, Any]:
        """Return why the message ended."""
        return {"stop_reason": self._stop_reason(end), "stop_sequence": end.stop_string}

    def _stop_reason(self, end: Finished) -> str:
        if not self._max_tokens:
            return "max_tokens"
        if self._reader.num_calls and end.reason is FinishReason.STOP and not end.is_cut:
            return "tool_use"
        if end.reason is FinishReason.STOP:
            return "end_turn" if end.stop_string is None else "stop_sequence"
        if end.usage.completion_tokens < self._max_tokens:
            return "model_context_window_exceeded"
        return "max_tokens"

    def begin(self) -> list[bytes]:
        """Return the first events, with the prompt's length."""
        usage = {"input_tokens": len(self._request.prompt_ids), "output_tokens": 0}
        return [_event("message_start", message=self._message(usage, [])), PING]

    def event(self, index: int, event: Event) -> list[bytes]:
        """Return the frames of an event; the last one ends the stream."""
        match event:
            case Delta():
                return self._show(self._reader.push(event.text))
            case Finished():
                return [
                    *self._show(self._reader.finish(is_cut=event.is_cut)),
                    *self._close(),
                    _event(
                        "message_delta",
                        delta=self._stop(event),
                        usage=self._usage(event.usage),
                    ),
                    _event("message_stop"),
                ]
            case Failed():
                error = _encode(message_error(event.error, self._request_id))
                return [b"event: error\ndata: %b\n\n" % error]

    def _show(self, pieces: Iterable[Piece]) -> list[bytes]:
        if not self._max_tokens:
            return []
        return [frame for piece in pieces for frame in self._frames(piece)]

    def _frames(self, piece: Piece) -> Iterator[bytes]:
        """Yield the frames of a piece, and the start and end of its block."""
        match piece:
            case Text():
                if self._open_kind != "text":
                    yield from self._close()
                    yield self._open({"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": piece.text})
            case Reasoning():
                if self._open_kind != "thinking":
                    yield from self._close()
                    yield self._open({"type": "thinking", "thinking": "", "signature": ""})
                    self._digest = _signing()
                self._digest.update(piece.text.encode())
                yield self._delta({"type": "thinking_delta", "thinking": piece.text})
            case CallBegins():
                yield from self._close()
                yield self._open(_tool_use(piece.name))
            case Arguments():
                yield self._delta({"type": "input_json_delta", "partial_json": piece.text})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._block, delta=delta)

    def _open(self, block: dict[str, Any]) -> bytes:
        self._open_kind = block["type"]
        self._block += 1
        return _event("content_block_start", index=self._block, content_block=block)

    def _close(self) -> Iterator[bytes]:
        kind, self._open_kind = self._open_kind, None
        if kind == "thinking":
            signature = _signature(self._digest)
            yield self._delta({"type": "signature_delta", "signature": signature})
        if kind is not None:
            yield _event("content_block_stop", index=self._block)


def _event(kind: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def _tool_use(name: str) -> dict[str, Any]:
    call_id = f"toolu_{secrets.token_hex(12)}"
    return {"type": "tool_use", "id": call_id, "name": name, "input": {}}


def _signing(text: str = "") -> Hash:
    return hashlib.blake2b(text.encode(), digest_size=SIGNATURE_BYTES)


def _signature(digest: Hash) -> str:
    """Return a block's `signature`: clients drop blocks without one."""
    return base64.b64encode(digest.digest()).decode()


def _block(part: Part) -> dict[str, Any]:
    """Return a content block of a whole message."""
    match part:
        case Text():
            return {"type": "text", "text": part.text}
        case Reasoning():
            signature = _signature(_signing(part.text))
            return {"type": "thinking", "thinking": part.text, "signature": signature}
        case WholeCall():
            # A call cut at the token limit has no valid object; the stop_reason reports the cut.
            return _tool_use(part.name) | {"input": part.given or {}}


OF_OWN_FORM: Final = frozenset({"stream", "max_tokens", "tools", "tool_choice"})
PARAMS: Final = {
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "tools.*.function.parameters": "tools.*.input_schema",
    "tools.*.function": "tools.*",
    "continue_final_message": "messages",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Names of this API's parameters, by the names in a chat request."""


async def create_message(services: Services) -> Response:
    """Create a message."""
    fields = await read_fields(MessagesRequest, services)
    _note_betas(services)
    _check_budget(fields)
    plan = await _plan(fields, services)
    live = current_scope()
    (request,) = own_requests(plan, services, is_streamed=bool(fields.stream))
    if request.sampling.max_tokens < fields.max_tokens:
        live.headers[CAP_HEADER] = str(request.sampling.max_tokens)
    message = MessageStream(
        request,
        f"msg_{live.request_id.hex()}",
        plan.model.name,
        fields.max_tokens,
        shown_request_id(),
        plan.tool_form,
        plan.thinking,
        message_tier(fields.service_tier, request.scheduling),
    )
    if fields.stream:
        return await begin_stream([request], message, fields, plan.model, services)
    whole = WholeAnswer(1, message.whole)
    return await begin_whole([request], whole, fields, plan.model, services)


def _note_betas(services: Services) -> None:
    """List the values of `anthropic-beta` that have no effect in a response header, if any."""
    values = ",".join(http_request.headers.getlist("anthropic-beta"))
    unknown = [value for value in EXTENSION_NAME.findall(values) if value not in _SERVED_BETAS]
    if unknown:
        note_ignored([f"anthropic-beta.{value}" for value in unknown[:MAX_UNKNOWN]], services)


def _check_budget(fields: MessagesRequest) -> None:
    budget = None if fields.thinking is None else fields.thinking.budget
    if budget and 0 < fields.max_tokens <= budget:
        raise invalid_request(
            f"must be less than max_tokens ({fields.max_tokens}), which includes reasoning",
            "thinking.budget_tokens",
        )


async def count_message_tokens(services: Services) -> Response:
    """Return the number of prompt tokens of a conversation."""
    fields = await read_fields(CountRequest, services)
    with params_called(PARAMS):
        chat = await _as_chat(fields)
        on_model = partial(prompt_of_chat, chat, services=services)
        prompt_ids = await count_prompt(chat, services, on_model)
    return json_response({"input_tokens": len(prompt_ids)})


async def _plan(fields: MessagesRequest, services: Services) -> GenerationPlan:
    is_warming = fields.max_tokens == 0
    with params_called(PARAMS):
        chat = await _as_chat(fields)
        check_output(fields, current_tenant().plan)

        async def plan_on(model: ServedModel) -> GenerationPlan:
            plan = await plan_chat(chat, model, services)
            return (
                warming(plan) if is_warming else replace(plan, default_max_tokens=fields.max_tokens)
            )

        return await plan_request(chat, services, plan_on)


async def _as_chat(fields: PromptFields) -> ChatRequest:
    """Return the validated request as a chat request."""
    turns: list[Message] = []
    for number, said in enumerate(fields.messages, 1):
        if not number % TURNS_AT_ONCE:
            await trio.lowlevel.checkpoint()
        turns += said.content.messages(said.role)
    if fields.system:
        turns.insert(0, Message.model_construct(role="system", content=fields.system))
    output, choice = fields.output_config, fields.tool_choice
    switches = fields.chat_template_kwargs
    if fields.thinking is not None and fields.thinking.type == "enabled":
        switches = {"enable_thinking": True, **(switches or {})}
    tools = [
        offered_function(tool.name, tool.description, tool.input_schema, strict=tool.strict)
        for tool in fields.tools or ()
    ]
    return ChatRequest.model_construct(
        **shared_fields(fields, OF_OWN_FORM),
        messages=turns,
        # A conversation that ends with the assistant's turn continues that turn.
        continue_final_message=turns[-1].role == "assistant",
        chat_template_kwargs=switches,
        response_format=output.format.of_chat() if output and output.format else None,
        tools=tools or None,
        tool_choice=None if choice is None else _choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        thinking_token_budget=fields.thinking.budget if fields.thinking else None,
    )


def _choice(choice: ToolUse) -> NamedTool | Literal["none", "auto", "required"]:
    if choice.name is not None:
        return named_tool(choice.name)
    if choice.type == "any":
        return "required"
    return "none" if choice.type == "none" else "auto"

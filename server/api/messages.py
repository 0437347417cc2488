"""POST /v1/messages and its count_tokens: Anthropic's words for a chat.

What is generated is decided where chats are; here are the names only, forth in requests and back in
the names of errors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from .answers import collect
from .chat import encode_chat, plan_chat
from .errors import params_called, unsupported
from .generate import (
    check_fields,
    event_stream,
    json_response,
    own_requests,
    submit_all,
    warming,
)
from .intake import live_request, read_fields, shown_request_id
from .messages_form import MessageForm, MessageStream
from .messages_schema import CountRequest, MessagesRequest
from .schemas import ChatRequest, GenerationFields, Message

if TYPE_CHECKING:
    from quart import Response

    from .generate import Plan
    from .messages_schema import PromptFields
    from .ports import Services

MESSAGES: Final = "/v1/messages"
PARAMS: Final = {
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
}
"""What a chat calls its parameters, and what they are called here."""


async def create_message(services: Services) -> Response:
    """Answer a conversation."""
    fields = await read_fields(MessagesRequest, services)
    plan = await _plan(fields, services)
    (request,) = own_requests(plan, services)
    live = live_request()
    form = MessageForm(
        f"msg_{live.request_id.hex()}", services.config.model_name, fields.max_tokens
    )
    choices = submit_all([request], services, live)
    if fields.stream:
        return event_stream(choices, MessageStream(form, request, shown_request_id()), services)
    (answer,) = await collect(choices, 1)
    return json_response(form.whole(answer))


async def count_message_tokens(services: Services) -> Response:
    """Return how many tokens a conversation has as a prompt."""
    fields = await read_fields(CountRequest, services)
    chat = _as_chat(fields)
    check_fields(chat, services)
    return json_response({"input_tokens": len(await encode_chat(chat, services))})


async def _plan(fields: MessagesRequest, services: Services) -> Plan:
    with params_called(PARAMS):
        chat = _as_chat(fields)
        check_fields(chat, services)
        plan = await plan_chat(chat, services)
    if fields.max_tokens == 0:
        return warming(plan)
    # Beyond the context it is not refused, because clients have to name a number, but cut.
    return replace(plan, max_tokens=None, default_max_tokens=fields.max_tokens)


def _as_chat(fields: PromptFields) -> ChatRequest:
    """Return what was asked for as a chat. All of it has been checked."""
    if fields.messages[-1].role == "assistant":
        raise unsupported("messages", "continuing the last message")
    turns = [Message.model_construct(role=t.role, content=t.content) for t in fields.messages]
    if fields.system:
        turns.insert(0, Message.model_construct(role="system", content=fields.system))
    same = {
        name: getattr(fields, name)
        for name in GenerationFields.model_fields
        if name in type(fields).model_fields and name not in {"stream", "max_tokens"}
    }
    output = fields.output_config
    return ChatRequest.model_construct(
        **same,
        messages=turns,
        chat_template_kwargs=fields.chat_template_kwargs,
        response_format=output.format.of_chat() if output and output.format else None,
    )

"""From a request of the Responses API to the plan of a chat. Knows both; knows no connection.

A response is a chat in other words, so everything about it is decided where chats are: here are the
names only, forth in requests and back in errors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from triolet.errors import invalid_request

from .chat import plan_chat
from .errors import params_called
from .generate import check_fields, warming
from .schemas import ChatRequest, GenerationFields, Message

if TYPE_CHECKING:
    from .conversations import Turns
    from .generate import Plan
    from .ports import Services
    from .responses_schema import ResponseFields

PARAMS: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
"""What a chat calls its parameters, and what they are called here."""


async def plan_response(fields: ResponseFields, earlier: Turns, services: Services) -> Plan:
    """Return what is to be generated.

    Args:
      fields: what was asked for.
      earlier: the turns before its own.
      services: what it works with.

    Raises:
      RequestError: 400, 404, or 503 while the process shuts down.
    """
    if fields.top_logprobs and not fields.wants_logprobs:
        raise invalid_request(
            "needs message.output_text.logprobs among the values of include", "top_logprobs"
        )
    with params_called(PARAMS):
        chat = _as_chat(fields, earlier)
        check_fields(chat, services)
        plan = await plan_chat(chat, services)
    plan = replace(plan, param=PARAMS[plan.param])
    return warming(plan) if fields.only_warms else plan


def _as_chat(fields: ResponseFields, earlier: Turns) -> ChatRequest:
    """Return what was asked for as a chat. All of it has been checked."""
    system = [message("system", fields.instructions)] if fields.instructions else []
    same = {
        name: getattr(fields, name)
        for name in GenerationFields.model_fields
        if name in type(fields).model_fields and name not in {"stream", "stream_options"}
    }
    return ChatRequest.model_construct(
        **same,
        messages=[*system, *earlier, *fields.input],
        max_tokens=fields.max_output_tokens,
        logprobs=fields.wants_logprobs,
        response_format=fields.text_format.of_chat(),
        top_logprobs=fields.top_logprobs if fields.wants_logprobs else None,
        chat_template_kwargs=fields.chat_template_kwargs,
    )


def message(role: str, content: str) -> Message:
    """Return a turn whose words are known to be right."""
    return Message.model_construct(role=role, content=content)

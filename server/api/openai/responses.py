"""POST /v1/responses and /v1/responses/input_tokens, mapped onto chats.

Parameter names are translated to those of a chat in requests, and back in errors. Continuing from
stored responses is in stored_responses.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import trio

from triolet.errors import invalid_request

from ...contract.generation import Delta
from ..auto import count_prompt, plan_request
from ..body import current_scope, read_fields
from ..errors import params_called
from ..fields import NamedTool, ToolCall, earlier_call, named_tool, offered_function
from ..generate import (
    GenerationPlan,
    begin_stream,
    begin_whole,
    json_response,
    own_requests,
    warming,
)
from ..schemas import TURNS_AT_ONCE, ChatRequest, Message, shared_fields
from ..stream import WholeAnswer
from .chat import plan_chat, prompt_of_chat
from .responses_events import (
    ResponseEvents,
    message_frame,
    response_head,
    sse_frame,
)
from .responses_schema import (
    FunctionChoice,
    InputItem,
    InputTokensRequest,
    ResponseFields,
    ResponseRequest,
)
from .stored_responses import conversation_of, keep_at_end

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quart import Response

    from ..services import Services
    from ..stream import Answer


PARAMS: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "tools.*.function": "tools.*",
}
OF_OWN_FORM: Final = frozenset({"stream", "stream_options", "tools", "tool_choice"})
"""Names of this API's parameters, by the names in a chat request."""


async def plan_response(
    fields: ResponseFields, items: Sequence[InputItem], services: Services
) -> GenerationPlan:
    """Plan a response.

    Args:
      fields: the request.
      items: the items that it answers.
      services: the server's parts.

    Raises:
      RequestError: 400, 404, or 503 while the process shuts down.
    """
    if fields.top_logprobs and not fields.wants_logprobs:
        raise invalid_request("needs message.output_text.logprobs in include", "top_logprobs")
    with params_called(PARAMS):
        chat = await _as_chat(fields, items)
        plan = await plan_request(chat, services, partial(plan_chat, chat, services=services))
    plan = replace(plan, param=PARAMS[plan.param])
    return warming(plan) if fields.only_warms else plan


async def prompt_of_response(fields: ResponseFields, services: Services) -> tuple[int, ...]:
    """Return the prompt of a response.

    Raises:
      RequestError: see `plan_response`.
    """
    earlier, own = await conversation_of(fields, services)
    with params_called(PARAMS):
        chat = await _as_chat(fields, [*earlier, *own])
        return await count_prompt(chat, services, partial(prompt_of_chat, chat, services=services))


async def _as_chat(fields: ResponseFields, items: Sequence[InputItem]) -> ChatRequest:
    """Return the validated request as a chat request."""
    system = [message("system", fields.instructions)] if fields.instructions else []
    turns = await turns_of(items)
    if not turns:
        raise invalid_request(
            "contains only reasoning, which is not enough for a prompt", "messages"
        )
    tools = [
        offered_function(tool.name, tool.description, tool.parameters, strict=tool.strict)
        for tool in fields.tools or ()
    ]
    return ChatRequest.model_construct(
        **shared_fields(fields, OF_OWN_FORM),
        messages=[*system, *turns],
        max_tokens=fields.max_output_tokens,
        logprobs=fields.wants_logprobs,
        response_format=fields.text_format.of_chat(),
        top_logprobs=fields.top_logprobs if fields.wants_logprobs else None,
        chat_template_kwargs=fields.chat_template_kwargs,
        reasoning_effort=fields.reasoning.effort if fields.reasoning else None,
        thinking_token_budget=fields.thinking_token_budget,
        tools=tools or None,
        tool_choice=_choice(fields.tool_choice),
        parallel_tool_calls=fields.parallel_tool_calls,
    )


async def turns_of(items: Sequence[InputItem]) -> list[Message]:
    """Return the items as chat messages. Calls are added to the turn before them, reasoning to the
    turn after it."""
    turns: list[Message] = []
    reasoning: str | None = None
    for number, item in enumerate(items, 1):
        if not number % TURNS_AT_ONCE:
            await trio.lowlevel.checkpoint()
        if item.type == "reasoning":
            reasoning = (reasoning or "") + (item.content or "")
            continue
        if item.type == "message":
            turns.append(message(item.role or "user", item.content or ""))
        elif item.type == "function_call_output":
            turns.append(
                Message.model_construct(role="tool", content=item.output, tool_call_id=item.call_id)
            )
        else:
            before = turns.pop() if turns and turns[-1].role == "assistant" else None
            turns.append(with_call(before, item.call_id or "", item.name or "", item.arguments))
        if reasoning and turns[-1].role == "assistant":
            turns[-1] = turns[-1].model_copy(update={"reasoning": reasoning})
        reasoning = None
    return turns


def with_call(before: Message | None, call_id: str, name: str, arguments: str | None) -> Message:
    """Return the assistant's turn with another call."""
    call = earlier_call(call_id, name, arguments or "")
    calls = [*((before and before.tool_calls) or ()), call]
    return _said(before, before.content if before else None, calls)


def _said(before: Message | None, content: str | None, calls: list[ToolCall] | None) -> Message:
    """Return an assistant's turn that keeps the earlier turn's reasoning."""
    reasoning = before.reasoning if before else None
    return Message.model_construct(
        role="assistant", content=content, tool_calls=calls, reasoning=reasoning
    )


def _choice(
    choice: FunctionChoice | Literal["none", "auto", "required"] | None,
) -> NamedTool | Literal["none", "auto", "required"] | None:
    if choice is None or isinstance(choice, str):
        return choice
    return named_tool(choice.name)


def message(role: str, content: str) -> Message:
    """Return a message without validation."""
    # Pydantic's constructor takes four times as long, and there may be thousands of turns.
    return Message(role=role, content=content)  # type: ignore[arg-type]


async def create_response(services: Services) -> Response:
    """Create a response."""
    fields = await read_fields(ResponseRequest, services)
    if fields.stream_options is not None and not fields.stream:
        raise invalid_request("is allowed only with stream: true", "stream_options")
    earlier, own = await conversation_of(fields, services)
    plan = await plan_response(fields, [*earlier, *own], services)
    live = current_scope()
    (request,) = own_requests(plan, services, is_streamed=bool(fields.stream))
    request = replace(request, request_id=live.request_id)
    head = response_head(f"resp_{live.request_id.hex()}", fields, request, plan.model.name)
    framing = sse_frame if fields.stream else message_frame
    events = ResponseEvents(head, fields, framing, plan.tool_form, plan.thinking)
    if live.owner is None:  # responses of batch lines are in the output file
        keep_at_end(events, fields, own, services)
    if fields.stream:
        return await begin_stream([request], events, fields, plan.model, services)
    whole = WholeAnswer(1, partial(_whole, events))
    return await begin_whole([request], whole, fields, plan.model, services)


async def count_input_tokens(services: Services) -> Response:
    """Return the number of prompt tokens of a conversation."""
    fields = await read_fields(InputTokensRequest, services)
    prompt_ids = await prompt_of_response(fields, services)
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt_ids)})


def _whole(events: ResponseEvents, answers: Sequence[Answer]) -> bytes:
    """Return the response object that a stream would have ended with."""
    (answer,) = answers
    events.begin()
    events.event(0, Delta(answer.text, tuple(answer.token_ids), tuple(answer.logprobs)))
    events.event(0, answer.finished)
    return msgspec.json.encode(events.response)

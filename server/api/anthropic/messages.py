"""POST /v1/messages and its count_tokens: Anthropic's words for a chat.

What is generated is decided where chats are; here are the names only, forth in requests and back in
the names of errors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from triolet.errors import invalid_request

from ...tenants.tenancy import current_tenant
from ..body import current_scope, read_fields, shown_request_id
from ..claims import message_tier
from ..errors import params_called
from ..generate import (
    begin_stream,
    begin_whole,
    check_fields,
    check_output,
    json_response,
    own_requests,
    warming,
)
from ..openai.chat import encode_chat, plan_chat
from ..openai.tools import plan_tools
from ..overload import refuse_early
from ..schemas import ChatRequest, GenerationFields, Message
from ..tool_schema import Function, FunctionName, NamedTool, Tool
from .form import MessageForm, MessageStream
from .schema import CountRequest, MessagesRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quart import Response

    from ..generate import Plan
    from ..services import Services
    from ..stream import Answer
    from .schema import OfferedTool, PromptFields, ToolUse

OF_OWN_FORM: Final = frozenset({"stream", "max_tokens", "tools", "tool_choice"})
MESSAGES: Final = "/v1/messages"
PARAMS: Final = {
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "tools.*.function.parameters": "tools.*.input_schema",
    "tools.*.function": "tools.*",
    "continue_final_message": "messages",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""What a chat calls its parameters, and what they are called here."""


async def create_message(services: Services) -> Response:
    """Answer a conversation."""
    fields = await read_fields(MessagesRequest, services)
    _check_budget(fields)
    plan = await _plan(fields, services)
    (request,) = own_requests(plan, services, is_streamed=bool(fields.stream))
    live = current_scope()
    form = MessageForm(
        f"msg_{live.request_id.hex()}",
        services.config.model_name,
        fields.max_tokens,
        plan.tool_form,
        message_tier(fields.service_tier, request.scheduling),
        plan.thinking,
    )
    if fields.stream:
        stream = MessageStream(form, request, shown_request_id())
        return await begin_stream([request], stream, fields, services)

    def document(answers: Sequence[Answer]) -> bytes:
        return msgspec.json.encode(form.whole(answers[0]))

    return await begin_whole([request], document, fields, services)


def _check_budget(fields: MessagesRequest) -> None:
    budget = None if fields.thinking is None else fields.thinking.budget
    if budget and 0 < fields.max_tokens <= budget:
        raise invalid_request(
            f"must be less than max_tokens ({fields.max_tokens}), which counts reasoning too",
            "thinking.budget_tokens",
        )


async def count_message_tokens(services: Services) -> Response:
    """Return how many tokens a conversation has as a prompt."""
    fields = await read_fields(CountRequest, services)
    with params_called(PARAMS):
        chat = _as_chat(fields)
        check_fields(chat, services)
        tools = await plan_tools(chat, services)
        prompt_ids = await encode_chat(chat, services, tools.shown)
    return json_response({"input_tokens": len(prompt_ids)})


async def _plan(fields: MessagesRequest, services: Services) -> Plan:
    with params_called(PARAMS):
        chat = _as_chat(fields)
        check_fields(chat, services)
        check_output(fields, current_tenant().plan)
        refuse_early(chat, services)
        plan = await plan_chat(chat, services)
    if fields.max_tokens == 0:
        return warming(plan)
    return replace(plan, max_tokens=fields.max_tokens)


def _as_chat(fields: PromptFields) -> ChatRequest:
    """Return what was asked for as a chat. All of it has been checked."""
    turns = [turn for m in fields.messages for turn in m.content.messages(m.role)]
    if fields.system:
        turns.insert(0, Message.model_construct(role="system", content=fields.system))
    same = {
        name: getattr(fields, name)
        for name in GenerationFields.model_fields
        if name in type(fields).model_fields and name not in OF_OWN_FORM
    }
    output, choice = fields.output_config, fields.tool_choice
    switches = fields.chat_template_kwargs
    if fields.thinking is not None and fields.thinking.type == "enabled":
        switches = {"enable_thinking": True, **(switches or {})}
    return ChatRequest.model_construct(
        **same,
        messages=turns,
        # Whoever ends with words of the assistant's wants them gone on with.
        continue_final_message=turns[-1].role == "assistant",
        chat_template_kwargs=switches,
        response_format=output.format.of_chat() if output and output.format else None,
        tools=[_tool(tool) for tool in fields.tools] if fields.tools else None,
        tool_choice=None if choice is None else _choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        thinking_token_budget=fields.thinking.budget if fields.thinking else None,
    )


def _tool(tool: OfferedTool) -> Tool:
    function = Function(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return Tool(type="function", function=function)


def _choice(choice: ToolUse) -> NamedTool | Literal["none", "auto", "required"]:
    if choice.name is not None:
        return NamedTool(type="function", function=FunctionName(name=choice.name))
    if choice.type == "any":
        return "required"
    return "none" if choice.type == "none" else "auto"

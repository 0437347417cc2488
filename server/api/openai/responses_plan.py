"""From a request of the Responses API to the plan of a chat. Knows both; knows no connection.

A response is a chat in other words, so everything about it is decided where chats are: here are the
names only, forth in requests and back in errors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from triolet.errors import invalid_request

from ..errors import params_called
from ..generate import check_fields, warming
from ..overload import refuse_early
from ..schemas import ChatRequest, GenerationFields, Message
from ..tool_schema import CalledFunction, Function, FunctionName, NamedTool, Tool, ToolCall
from .chat import encode_chat, plan_chat
from .responses_events import CallItem, MessageItem, ReasoningItem
from .tools import plan_tools

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..conversations import Turns
    from ..generate import Plan
    from ..services import Services
    from .responses_events import Item
    from .responses_schema import FunctionChoice, FunctionTool, InputItem, ResponseFields

PARAMS: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "tools.*.function": "tools.*",
}
OF_OWN_FORM: Final = frozenset({"stream", "stream_options", "tools", "tool_choice"})
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
        refuse_early(chat, services)
        plan = await plan_chat(chat, services)
    plan = replace(plan, param=PARAMS[plan.param])
    return warming(plan) if fields.only_warms else plan


async def prompt_of_response(fields: ResponseFields, services: Services) -> tuple[int, ...]:
    """Return the prompt that a response would be made from.

    Raises:
      RequestError: as `plan_response`.
    """
    with params_called(PARAMS):
        chat = _as_chat(fields, ())
        check_fields(chat, services)
        tools = await plan_tools(chat, services)
        return await encode_chat(chat, services, tools.shown)


def _as_chat(fields: ResponseFields, earlier: Turns) -> ChatRequest:
    """Return what was asked for as a chat. All of it has been checked."""
    system = [message("system", fields.instructions)] if fields.instructions else []
    same = {
        name: getattr(fields, name)
        for name in GenerationFields.model_fields
        if name in type(fields).model_fields and name not in OF_OWN_FORM
    }
    turns = [*earlier, *turns_of(fields.input)]
    if not turns:
        raise invalid_request("holds nothing but reasoning, which no prompt is made of", "messages")
    return ChatRequest.model_construct(
        **same,
        messages=[*system, *turns],
        max_tokens=fields.max_output_tokens,
        logprobs=fields.wants_logprobs,
        response_format=fields.text_format.of_chat(),
        top_logprobs=fields.top_logprobs if fields.wants_logprobs else None,
        chat_template_kwargs=fields.chat_template_kwargs,
        reasoning_effort=fields.reasoning.effort if fields.reasoning else None,
        thinking_token_budget=fields.thinking_token_budget,
        tools=[_tool(tool) for tool in fields.tools] if fields.tools else None,
        tool_choice=_choice(fields.tool_choice),
        parallel_tool_calls=fields.parallel_tool_calls,
    )


def turns_of(items: Sequence[InputItem]) -> list[Message]:
    """Return what was sent as the turns of a chat, where calls belong to the turn before them, and
    reasoning to the turn behind it."""
    turns: list[Message] = []
    reasoning: str | None = None
    for item in items:
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


def answer_of(items: Sequence[Item]) -> list[Message]:
    """Return an answer as the one turn that it is in a chat; none if it has no items."""
    turn: Message | None = None
    for item in items:
        match item:
            case ReasoningItem():
                if turn is None:
                    turn = Message.model_construct(role="assistant", reasoning=item.text)
            case MessageItem():
                said = (turn.content or "") if turn else ""
                turn = _said(turn, said + item.text, turn.tool_calls if turn else None)
            case CallItem():
                turn = with_call(turn, item.call_id, item.name, item.arguments)
    return [] if turn is None else [turn]


def with_call(before: Message | None, call_id: str, name: str, arguments: str | None) -> Message:
    """Return a turn of the assistant's with one call more."""
    call = ToolCall(id=call_id, function=CalledFunction(name=name, arguments=arguments or ""))
    calls = [*((before and before.tool_calls) or ()), call]
    return _said(before, before.content if before else None, calls)


def _said(before: Message | None, content: str | None, calls: list[ToolCall] | None) -> Message:
    """Return a turn of the assistant's, with the reasoning of what there was of it before."""
    reasoning = before.reasoning if before else None
    return Message.model_construct(
        role="assistant", content=content, tool_calls=calls, reasoning=reasoning
    )


def _tool(tool: FunctionTool) -> Tool:
    function = Function(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return Tool(type="function", function=function)


def _choice(
    choice: FunctionChoice | Literal["none", "auto", "required"] | None,
) -> NamedTool | Literal["none", "auto", "required"] | None:
    if choice is None or isinstance(choice, str):
        return choice
    return NamedTool(type="function", function=FunctionName(name=choice.name))


def message(role: str, content: str) -> Message:
    """Return a turn whose words are known to be right."""
    return Message.model_construct(role=role, content=content)

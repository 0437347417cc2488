"""POST /v1/chat/completions: messages in, the assistant's turn out."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from triolet.errors import invalid_request

from .chunks import ChatChunks
from .constraints import read_grammar
from .continuing import check_continued, marked, new_mark, up_to_mark
from .generate import Plan, check_fields, head, stream_response, whole_response
from .intake import INLINE_BYTES, in_parser_thread, read_fields
from .logprobs import chat_logprobs
from .overload import refuse_early
from .schemas import ChatRequest, Message
from .tool_chunks import ToolChunks, reason_of, whole_message
from .tools import parsed_arguments, plan_tools

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quart import Response

    from .answers import Answer
    from .ports import Services

_ROLES = {"developer": "system"}
"""Templates were written before the name `developer` was."""


def template_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Return a conversation in the words that chat templates know."""
    return [_template_message(message) for message in messages]


async def read_turns(messages: Sequence[Message], services: Services) -> list[dict[str, object]]:
    """Do the same where it holds up nobody: arguments of calls are JSON, perhaps megabytes of it.

    Raises:
      RequestError: 503 if too many wait for that.
    """
    calls = [call for message in messages for call in message.tool_calls or ()]
    num_chars = sum(len(call.function.arguments) for call in calls)
    return await in_parser_thread(
        partial(template_messages, messages), services, is_quick=num_chars <= INLINE_BYTES
    )


def _template_message(message: Message) -> dict[str, object]:
    role = _ROLES.get(message.role, message.role)
    turn: dict[str, object] = {"role": role, "content": message.content or ""}
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {
                    "name": call.function.name,
                    "arguments": parsed_arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    return turn


async def chat_completions(services: Services) -> Response:
    """Answer a conversation."""
    fields = await read_fields(ChatRequest, services)
    check_fields(fields, services)
    refuse_early(fields, services)
    plan = await plan_chat(fields, services)
    if fields.stream:
        return await stream_response(
            plan,
            services,
            head("chat.completion.chunk", "chatcmpl", services),
            ChatChunks if plan.tool_form is None else partial(ToolChunks, form=plan.tool_form),
        )
    return await whole_response(
        plan, services, head("chat.completion", "chatcmpl", services), partial(_choice, plan)
    )


async def encode_chat(
    fields: ChatRequest, services: Services, tools: Sequence[dict[str, Any]] | None = None
) -> tuple[int, ...]:
    """Return the prompt that a conversation is to the model, which may be shown tools.

    Raises:
      RequestError: the template refuses it, or it can never fit.
    """
    continues = bool(fields.continue_final_message)
    messages, mark = await read_turns(fields.messages, services), new_mark()
    if continues:
        check_continued(fields)
        messages = marked(messages, mark)
    prompt = await services.text.render_chat(
        messages,
        add_generation_prompt=fields.add_generation_prompt is not False and not continues,
        tools=tools,
        template_kwargs=fields.chat_template_kwargs,
    )
    if continues:
        prompt = up_to_mark(prompt, mark)
    return tuple(await services.text.encode(prompt, add_special_tokens=False, param="messages"))


async def plan_chat(fields: ChatRequest, services: Services) -> Plan:
    """Return what is to be generated for a conversation, in whatever API's words it came.

    Raises:
      RequestError: 400 in the words of this one.
    """
    if fields.top_logprobs is not None and not fields.logprobs:
        raise invalid_request("needs logprobs to be true", "top_logprobs")
    tools = await plan_tools(fields, services)
    # What has to be called is no place for an answer, which alone has a form of its own.
    grammar = tools.grammar or await read_grammar(fields, services)
    prompt_ids = await encode_chat(fields, services, tools.shown)
    max_tokens = fields.max_completion_tokens
    return Plan(
        fields=fields,
        prompts=[prompt_ids],
        max_tokens=fields.max_tokens if max_tokens is None else max_tokens,
        default_max_tokens=services.defaults.max_new_tokens,
        param="messages",
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        grammar=grammar,
        tool_form=tools.form,
        watch=tools.watch,
    )


def _choice(plan: Plan, index: int, answer: Answer) -> dict[str, Any]:
    logprobs = None
    if plan.logprobs is not None:
        logprobs = {"content": chat_logprobs(answer.logprobs), "refusal": None}
    ids = {"token_ids": answer.token_ids} if plan.fields.return_token_ids else {}
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    num_calls = 0
    if plan.tool_form is not None:
        message, num_calls = whole_message(answer, plan.tool_form)
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": reason_of(answer.finished.reason, num_calls),
        **ids,
    }

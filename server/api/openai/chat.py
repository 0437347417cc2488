"""POST /v1/chat/completions and /v1/completions.

`continue_final_message` must undo the template's closing of the last turn. A mark is appended to
the last message, and the rendered prompt is cut at the mark, because a template may strip the text
or surround it with similar text.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from triolet.errors import invalid_request

from ...text.tool_forms.reasoning import SWITCHES, Reasoner, ReasoningPlan
from ..auto import plan_request
from ..body import read_fields
from ..constraints import plan_tools, read_grammar
from ..generate import GenerationPlan, begin_stream, begin_whole, head, own_requests
from ..limits import tier_field
from ..sampling import chat_logprob, check_ids, completion_logprobs, completion_top
from ..schemas import TURNS_AT_ONCE, ChatRequest, CompletionRequest, Message, Prompt
from ..stream import WholeAnswer
from .chunks import (
    ChatChunks,
    CompletionChunks,
    Envelope,
    RunningUsage,
    reason_of,
    total_usage,
    whole_message,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quart import Response

    from ...contract.generation import TokenLogprob
    from ...text.special_tokens import ChatPrompt
    from ..served_models import ServedModel
    from ..services import Services
    from ..stream import Answer
    from .chunks import ChunkStream


PARAM = "continue_final_message"


def check_continued(fields: ChatRequest) -> None:
    """Raise RequestError if the conversation's last turn cannot be continued."""
    if fields.add_generation_prompt:
        raise invalid_request(f"contradicts {PARAM}", "add_generation_prompt")
    last = fields.messages[-1]
    if last.role != "assistant" or not last.content:
        raise invalid_request("needs a last message from the assistant that is not empty", PARAM)


def new_mark() -> str:
    """Return a mark that occurs in no conversation and that no template strips."""
    return secrets.token_hex(16)


def up_to_mark(prompt: ChatPrompt, mark: str) -> ChatPrompt:
    """Return a rendered conversation up to the mark.

    Raises:
      RequestError: the template does not show the last message, or shows it more than once.
    """
    begun = prompt.up_to(mark)
    if begun is None:
        raise invalid_request("the chat template does not show the last message unchanged", PARAM)
    return begun


_ROLES = {"developer": "system"}
"""Roles to rename, because templates do not know `developer`."""
TEMPLATE_EFFORTS: Final = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Reasoning efforts that templates do not know, with the nearest known one."""


async def turns(
    messages: Sequence[Message], history_field: str | None = None, mark: str = ""
) -> list[dict[str, object]]:
    """Return the conversation in the format of chat templates.

    Args:
      messages: its turns.
      history_field: the template's field for the reasoning of earlier turns; None if it has none.
      mark: appended to the last message.
    """
    found: list[dict[str, object]] = []
    for number, message in enumerate(messages, 1):
        if not number % TURNS_AT_ONCE:
            await trio.lowlevel.checkpoint()
        found.append(_template_message(message, history_field))
    if mark:
        found[-1]["content"] = f"{found[-1]['content']}{mark}"
    return found


def _template_message(message: Message, history_field: str | None) -> dict[str, object]:
    role = _ROLES.get(message.role, message.role)
    turn: dict[str, object] = {"role": role, "content": message.content or ""}
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {
                    "name": call.function.name,
                    "arguments": call.function.arguments,
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.role == "tool" and message.name is not None:
        turn["name"] = message.name
    # Harmony templates refuse reasoning and text beside tool calls.
    is_refused = history_field == "thinking" and message.tool_calls and message.content
    if history_field is not None and message.reasoning and not is_refused:
        turn[history_field] = message.reasoning
    return turn


async def chat_completions(services: Services) -> Response:
    """Create a chat completion."""
    fields = await read_fields(ChatRequest, services)
    plan = await plan_request(fields, services, partial(plan_chat, fields, services=services))
    if fields.stream:
        fields_of_chunk = head("chat.completion.chunk", "chatcmpl", plan.model)
        chunks = partial(ChatChunks, form=plan.tool_form, thinking=plan.thinking)
        return await _stream_response(plan, services, fields_of_chunk, chunks)
    fields_of_answer = head("chat.completion", "chatcmpl", plan.model)
    return await _whole_response(
        plan, services, fields_of_answer, partial(_choice, plan), chat_logprob
    )


async def _stream_response(
    plan: GenerationPlan,
    services: Services,
    fields_of_chunk: dict[str, Any],
    chunks: Callable[[Envelope], ChunkStream],
) -> Response:
    """Submit a plan and return the streaming response.

    Args:
      plan: the plan.
      services: the server's parts.
      fields_of_chunk: the first fields of each chunk.
      chunks: returns the serializer for an envelope.
    """
    options = plan.fields.stream_options
    requests = own_requests(plan, services)
    running = None
    if options is not None and options.continuous_usage_stats:
        running = RunningUsage(sum(map(len, plan.prompts)), plan.count)
    envelope = Envelope(
        fields_of_chunk | tier_field(plan.fields.service_tier, requests[0].scheduling),
        with_usage=options is not None and bool(options.include_usage),
        with_token_ids=bool(plan.fields.return_token_ids),
        count=plan.count,
        per_prompt=plan.per_prompt,
        running=running,
    )
    return await begin_stream(requests, chunks(envelope), plan.fields, plan.model, services)


async def _whole_response(
    plan: GenerationPlan,
    services: Services,
    fields_of_answer: dict[str, Any],
    choice: Callable[[int, Answer], dict[str, Any]],
    score: Callable[[TokenLogprob], object],
) -> Response:
    """Submit a plan, wait for its end and return the response.

    Args:
      plan: the plan.
      services: the server's parts.
      fields_of_answer: the first fields of the response.
      choice: returns the JSON of a choice.
      score: returns the JSON of a token's alternatives.
    """
    requests = own_requests(plan, services, is_streamed=False)
    tier = tier_field(plan.fields.service_tier, requests[0].scheduling)

    def document(answers: Sequence[Answer]) -> bytes:
        usages = [answer.finished.usage for answer in answers]
        whole = fields_of_answer | {
            "choices": [choice(index, answer) for index, answer in enumerate(answers)],
            "usage": total_usage(usages, plan.per_prompt),
            **tier,
        }
        return msgspec.json.encode(whole)

    serializer = WholeAnswer(len(requests), document, score)
    return await begin_whole(requests, serializer, plan.fields, plan.model, services)


async def prompt_of_chat(
    fields: ChatRequest, model: ServedModel, services: Services
) -> tuple[int, ...]:
    """Return the prompt of a conversation, including the tools shown to the model.

    Raises:
      RequestError: see `encode_chat`.
    """
    tools = await plan_tools(fields, model)
    return await encode_chat(fields, model, services, tools.shown)


async def encode_chat(
    fields: ChatRequest,
    model: ServedModel,
    services: Services,
    tools: Sequence[dict[str, Any]] | None = None,
) -> tuple[int, ...]:
    """Return the prompt of a conversation with the given tools.

    Raises:
      RequestError: the template refuses it, or it is too long for the context.
    """
    prompt = await _render(fields, model, services, tools)
    return await _encode(prompt, model)


async def _encode(prompt: ChatPrompt, model: ServedModel) -> tuple[int, ...]:
    return tuple(await model.text.encode(prompt, add_special_tokens=False, param="messages"))


async def _render(
    fields: ChatRequest,
    model: ServedModel,
    services: Services,
    tools: Sequence[dict[str, Any]] | None,
) -> ChatPrompt:
    """Return the conversation rendered by the model's template, up to the start of the
    completion."""
    continues = bool(fields.continue_final_message)
    if continues:
        check_continued(fields)
    mark = new_mark() if continues else ""
    reasoner = model.text.reasoner
    prompt = await model.text.render_chat(
        await turns(fields.messages, None if reasoner is None else reasoner.history_field, mark),
        add_generation_prompt=fields.add_generation_prompt is not False and not continues,
        tools=tools,
        template_kwargs=template_switches(fields, model.text.reasoner),
    )
    return up_to_mark(prompt, mark) if continues else prompt


def template_switches(fields: ChatRequest, reasoner: Reasoner | None) -> dict[str, object] | None:
    """Return the template's reasoning switches, in addition to those that the client sets.

    Any known name of the reasoning switch sets the switch of the model's template.
    """
    given: dict[str, object] = {**(fields.chat_template_kwargs or {})}
    if reasoner is not None:
        is_off = is_reasoning_off(fields)
        if is_off or any(given.get(name) for name in SWITCHES):
            given |= dict.fromkeys(reasoner.switches, not is_off)
        if fields.reasoning_effort and reasoner.takes_effort and not is_off:
            effort = fields.reasoning_effort
            given["reasoning_effort"] = TEMPLATE_EFFORTS.get(effort, effort)
    return given or None


def is_reasoning_off(fields: ChatRequest) -> bool:
    """Return whether the client asked for an answer without reasoning."""
    given = fields.chat_template_kwargs or {}
    return (
        fields.reasoning_effort == "none"
        or fields.thinking_token_budget == 0
        or not all(given.get(name, True) for name in SWITCHES)
    )


def plan_reasoning(
    fields: ChatRequest,
    prompt: ChatPrompt,
    reasoner: Reasoner | None,
    *,
    has_call_grammar: bool,
    has_answer_grammar: bool,
) -> ReasoningPlan | None:
    """Return how the model reasons before the answer; None if it does not."""
    if reasoner is None:
        return None
    continued = fields.messages[-1].content or "" if fields.continue_final_message else None
    budget = 0 if is_reasoning_off(fields) else fields.thinking_token_budget
    plan = reasoner.plan(prompt, continued=continued, budget=budget)
    if plan is None or not reasoner.reads_calls:
        return plan
    tokens = plan.tokens
    if has_call_grammar:
        # The grammar of the calls includes the reasoning before them.
        tokens = replace(tokens, budget=None, is_in_grammar=True)
    elif has_answer_grammar:
        # Only a final message can follow the format; the first closing token starts one.
        tokens = replace(tokens, closings=tokens.closings[:1])
    return plan._replace(tokens=tokens)


async def plan_chat(fields: ChatRequest, model: ServedModel, services: Services) -> GenerationPlan:
    """Plan a chat request, whichever API it came from.

    Raises:
      RequestError: 400 with this API's parameter names.
    """
    if fields.top_logprobs is not None and not fields.logprobs:
        raise invalid_request("needs logprobs to be true", "top_logprobs")
    tools = await plan_tools(fields, model)
    # A required call leaves no room for an answer, and only an answer has its own format.
    grammar = tools.grammar or await read_grammar(fields, model)
    prompt = await _render(fields, model, services, tools.shown)
    prompt_ids = await _encode(prompt, model)
    max_tokens = fields.max_completion_tokens
    reasoner = model.text.reasoner
    reads_all = reasoner is not None and reasoner.reads_calls
    return GenerationPlan(
        model=model,
        fields=fields,
        prompts=[prompt_ids],
        max_tokens=fields.max_tokens if max_tokens is None else max_tokens,
        default_max_tokens=model.defaults.max_new_tokens,
        param="messages",
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        grammar=grammar,
        tool_form=model.text.tool_form if reads_all and tools.form is None else tools.form,
        reasoning=plan_reasoning(
            fields,
            prompt,
            reasoner,
            has_call_grammar=tools.grammar is not None,
            has_answer_grammar=grammar is not None,
        ),
        watch=tools.watch,
    )


def _choice(plan: GenerationPlan, index: int, answer: Answer) -> dict[str, Any]:
    logprobs = None
    if plan.logprobs is not None:
        logprobs = {"content": answer.scored, "refusal": None}
    ids = {"token_ids": answer.token_ids} if plan.fields.return_token_ids else {}
    message, num_calls = whole_message(answer, plan.tool_form, plan.thinking)
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": reason_of(answer.finished, num_calls),
        **ids,
    }


DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's default; a plain completion may never end by itself."""


async def completions(services: Services) -> Response:
    """Complete one or more prompts."""
    fields = await read_fields(CompletionRequest, services)
    plan = await plan_request(
        fields, services, partial(plan_completions, fields, services=services)
    )
    echoes = await _echoes(fields, plan.prompts, plan.model)
    fields_of_answer = head("text_completion", "cmpl", plan.model)
    if fields.stream:
        chunks = partial(CompletionChunks, echoes=echoes)
        return await _stream_response(plan, services, fields_of_answer, chunks)
    choice = partial(_completion_choice, fields, echoes)
    return await _whole_response(plan, services, fields_of_answer, choice, completion_top)


async def plan_completions(
    fields: CompletionRequest, model: ServedModel, services: Services
) -> GenerationPlan:
    """Plan a completion request.

    Raises:
      RequestError: 400.
    """
    if fields.echo and fields.logprobs is not None:
        raise invalid_request(
            "with echo would include the prompt's, which are not computed; leave out one of them",
            "logprobs",
        )
    if len(fields.prompt) > services.config.max_prompts:
        raise invalid_request(f"must be at most {services.config.max_prompts} prompts", "prompt")
    grammar = await read_grammar(fields, model)
    prompts = [await _prompt_ids(prompt, model) for prompt in fields.prompt]
    return GenerationPlan(
        model=model,
        fields=fields,
        prompts=prompts,
        max_tokens=fields.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        param="prompt",
        logprobs=fields.logprobs,
        grammar=grammar,
    )


async def _prompt_ids(prompt: Prompt, model: ServedModel) -> tuple[int, ...]:
    if isinstance(prompt, str):
        await trio.lowlevel.checkpoint()  # there may be many prompts
        return tuple(await model.text.encode(prompt))
    check_ids(prompt, model, "prompt")
    return prompt


async def _echoes(
    fields: CompletionRequest, prompts: Sequence[tuple[int, ...]], model: ServedModel
) -> list[str]:
    """Return the text before each choice's completion: its prompt with `echo`, else empty."""
    echoes = []
    for prompt, ids in zip(fields.prompt, prompts, strict=True):
        text = ""
        if fields.echo:
            text = prompt if isinstance(prompt, str) else await model.text.decode(ids)
        echoes += [text] * (fields.n or 1)
    return echoes


def _completion_choice(
    fields: CompletionRequest, echoes: Sequence[str], index: int, answer: Answer
) -> dict[str, Any]:
    logprobs = None
    if fields.logprobs is not None:
        logprobs = completion_logprobs(answer.logprobs, 0, answer.scored)
    ids = {"token_ids": answer.token_ids} if fields.return_token_ids else {}
    return {
        "index": index,
        "text": echoes[index] + answer.text,
        "logprobs": logprobs,
        "finish_reason": answer.finished.reason,
        **ids,
    }

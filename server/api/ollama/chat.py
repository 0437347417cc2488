"""POST /api/chat, /api/generate, /api/embed and /api/embeddings (Ollama).

An answer is one JSON object, or one object per line, the last with `done`. A tool call is written
as a whole, when its arguments are complete. During silence a line without text is sent: clients
append it without effect, and it detects disconnected clients.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio
from quart import Response

from triolet.errors import RequestError, invalid_request

from ...contract.generation import Delta, Event, Failed, Finished
from ...text.tool_forms.reasoning import reader_of
from ...text.tool_forms.whole_calls import Part, WholeCall, WholeCalls, joined
from ..auto import is_auto, plan_request, widest_context
from ..body import current_scope, note_ignored, read_fields
from ..errors import echo, message_with_param, params_called
from ..fields import NamedSchema, ResponseFormat, earlier_call
from ..generate import (
    GenerationPlan,
    begin,
    event_stream,
    json_response,
    own_requests,
    whole_document,
)
from ..openai.chat import plan_chat, plan_completions
from ..openai.embeddings import Vectors, check_count, embed, numbers_of
from ..openai.embeddings_schema import EmbeddingFields
from ..schemas import (
    TURNS_AT_ONCE,
    ChatRequest,
    CompletionRequest,
    Message,
    TemplateSwitches,
    shared_fields,
    take_unknown,
)
from ..stream import Answer, Serializer, WholeAnswer
from ..versions import named_model
from .schema import (
    LOAD_OPTIONS,
    AnyRequest,
    OllamaChat,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaGenerate,
    OllamaOptions,
    OllamaTurn,
    untagged,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ..served_models import ServedModel
    from ..services import Services


_encode = msgspec.json.Encoder().encode
NS_PER_S: Final = 1_000_000_000


def ollama_error(error: RequestError) -> dict[str, Any]:
    """Return an error in this API's format, which has only a message."""
    return {"error": message_with_param(error)}


def stamp(at: float | None = None) -> str:
    """Return a Unix time, default now, in RFC 3339 format."""
    moment = datetime.fromtimestamp(time.time() if at is None else at, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _ns(seconds: float) -> int:
    return max(0, round(seconds * NS_PER_S))


def _document(
    model: str, parts: Iterable[Part] = (), *, is_chat: bool, **end: object
) -> dict[str, Any]:
    """Return a response object with text and calls, and the final fields if it is the last.

    Args:
      model: name of the served model.
      parts: parts of the completion.
      is_chat: whether the text is a message's content; otherwise a response field.
      end: the final fields.
    """
    text, thinking, calls = joined(parts)
    said: dict[str, Any] = {"content" if is_chat else "response": text}
    said |= {"thinking": thinking} if thinking else {}
    if is_chat:
        shown = {"tool_calls": [_call(call) for call in calls]} if calls else {}
        said = {"message": {"role": "assistant", **said, **shown}}
    return {"model": model, "created_at": stamp(), **said, "done": bool(end), **end}


def _call(call: WholeCall) -> dict[str, Any]:
    function = {"index": call.index, "name": call.name, "arguments": call.given}
    return {"id": f"call_{call.index}", "function": function}


class OllamaAnswer(Serializer):
    """Writes one answer, as lines or whole; created when its request is queued.

    Args:
      plan: the request's plan.
      began_at: when the request arrived [s].
      is_chat: whether it is a chat message; otherwise plain text.
    """

    def __init__(self, plan: GenerationPlan, began_at: float, *, is_chat: bool) -> None:
        self._reader = WholeCalls(reader_of(plan.tool_form, plan.thinking))
        self._began_at = began_at
        self._submitted_at = trio.current_time()
        self._document = partial(_document, plan.model.name, is_chat=is_chat)

    @property
    def keep_alive(self) -> bytes:  # type: ignore[override]
        """A line without text, since this format has no comments."""
        return _line(self._document())

    def event(self, index: int, event: Event) -> list[bytes]:
        """Return the lines of an event; the last one ends the stream."""
        del index  # there is one choice
        match event:
            case Delta():
                return self._lines(self._reader.push(event.text))
            case Finished():
                rest = self._lines(self._reader.finish(is_cut=event.is_cut))
                return [*rest, _line(self._document(**self._end(event)))]
            case Failed():
                return [_line(ollama_error(event.error))]

    def whole(self, answers: Sequence[Answer]) -> bytes:
        """Return the whole answer."""
        (answer,) = answers
        end = answer.finished
        parts = self._reader.read(answer.text, is_cut=end.is_cut)
        return _encode(self._document(_kept(parts), **self._end(end)))

    def _lines(self, parts: Iterable[Part]) -> list[bytes]:
        return [_line(self._document([part])) for part in _kept(parts)]

    def _end(self, end: Finished) -> dict[str, Any]:
        """Return the final fields.

        The model is always loaded. The prompt's time runs from dispatch to the first token, so
        queueing counts only in the total. The rest is the completion's time, including waits for a
        slow reader.
        """
        now, usage = trio.current_time(), end.usage
        ttft_s = usage.queue_s if usage.ttft_s is None else usage.ttft_s
        return {
            "done_reason": str(end.reason),
            "total_duration": _ns(now - self._began_at),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(ttft_s - usage.queue_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(now - self._submitted_at - ttft_s),
        }


def _kept(parts: Iterable[Part]) -> list[Part]:
    """Return parts without calls that have incomplete arguments, because clients of this API run
    any call they receive."""
    return [part for part in parts if not isinstance(part, WholeCall) or part.given is not None]


def _line(document: dict[str, Any]) -> bytes:
    return _encode(document) + b"\n"


MAX_SHOWN: Final = 64
"""Maximum length of an unknown option's name that an error repeats."""
LINES: Final = "application/x-ndjson"
LINE_HEADERS: Final = {
    "content-type": LINES,
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
PARAMS: Final = {
    "response_format.json_schema.schema": "format",
    "response_format.json_schema": "format",
    "response_format": "format",
    "repetition_penalty": "options.repeat_penalty",
}
"""Names of this API's parameters, by the names in a chat request."""


async def chat(services: Services) -> Response:
    """Create a chat completion; without messages, report that the model is loaded."""
    fields = await read_fields(OllamaChat, services)
    if not fields.messages:
        return _loaded(fields, services, is_chat=True)
    common = _common(fields, services)
    chat_fields = ChatRequest.model_construct(
        **common,
        messages=await _messages(fields.messages),
        tools=fields.tools or None,
    )
    return await _answer(fields, chat_fields, services, is_chat=True)


async def generate(services: Services) -> Response:
    """Complete a prompt, in the chat template unless `raw` is set."""
    fields = await read_fields(OllamaGenerate, services)
    if not fields.prompt:
        return _loaded(fields, services, is_chat=False)
    common = _common(fields, services)
    if fields.raw:
        if fields.system:
            raise invalid_request("cannot be used with raw", "system")
        if fields.think is not None:
            note_ignored(["think"], services)
        raw = CompletionRequest.model_construct(**common, prompt=(fields.prompt,))
        return await _answer(fields, raw, services, is_chat=False)
    turns = [Message.model_construct(role="user", content=fields.prompt)]
    if fields.system:
        turns.insert(0, Message.model_construct(role="system", content=fields.system))
    chat_fields = ChatRequest.model_construct(**common, messages=turns)
    return await _answer(fields, chat_fields, services, is_chat=False)


def _loaded(fields: AnyRequest, services: Services, *, is_chat: bool) -> Response:
    """Return the response to a request that only loads the model, which is always loaded."""
    name = untagged(fields.model, services.models)
    if not is_auto(name, services):
        name = named_model(name, services).name
    document = _document(name, is_chat=is_chat, done_reason="load")
    if fields.stream is False:
        return json_response(document)
    return Response(_line(document), headers=LINE_HEADERS)


async def _answer(
    fields: AnyRequest,
    asked: ChatRequest | CompletionRequest,
    services: Services,
    *,
    is_chat: bool,
) -> Response:
    """Run a request and return its response, as lines or whole.

    `num_ctx` selects among the models of `auto` by their context; a named model's context is fixed.
    """
    wanted = (fields.options or OllamaOptions()).num_ctx or 0
    num_ctx = min(wanted, widest_context(asked, services))

    async def plan_on(model: ServedModel) -> GenerationPlan:
        if num_ctx > model.fleet.max_model_len:
            raise invalid_request(
                f"is more than the context of model {model.name}",
                "options.num_ctx",
                code="context_length_exceeded",
            )
        plan = await (
            plan_chat(asked, model, services)
            if isinstance(asked, ChatRequest)
            else plan_completions(asked, model, services)
        )
        return replace(plan, default_max_tokens=_most_tokens(fields.options, plan))

    with params_called(PARAMS):
        plan = await plan_request(asked, services, plan_on)
    is_streamed, live = fields.stream is not False, current_scope()
    requests = own_requests(plan, services, is_streamed=is_streamed)
    stream = await begin(requests, plan.model, services, live)
    answer = OllamaAnswer(plan, live.began_at, is_chat=is_chat)
    if is_streamed:
        return event_stream(stream, answer, services, LINE_HEADERS)
    whole = await whole_document(stream, WholeAnswer(1, answer.whole))
    return Response(whole, content_type="application/json")


def _most_tokens(options: OllamaOptions | None, plan: GenerationPlan) -> int | None:
    """Return the maximum number of tokens, cut to what fits; None for as many as fit."""
    wanted = None if options is None else options.num_predict
    if wanted is None:
        return plan.default_max_tokens
    return wanted if wanted > 0 else None


def _common(fields: AnyRequest, services: Services) -> dict[str, Any]:
    """Return the fields that a chat and a completion share.

    Raises:
      RequestError: 400, an option is invalid.
    """
    options = fields.options or OllamaOptions()
    check_options(options, services)
    common = shared_fields(options, but=("seed",)) | {
        "model": untagged(fields.model, services.models),
        "repetition_penalty": options.repeat_penalty,
        "seed": None if options.seed == -1 else options.seed,
        "priority": fields.priority,
        "service_tier": fields.service_tier,
        "response_format": _response_format(fields.format),
        "stream": fields.stream is not False,
    }
    if fields.think is not None:
        switches: TemplateSwitches = {"enable_thinking": fields.think is not False}
        common["chat_template_kwargs"] = switches
    if isinstance(fields.think, str):
        common["reasoning_effort"] = fields.think
    return common


def check_options(options: OllamaOptions, services: Services) -> None:
    """Refuse options that cannot be applied, and report those without effect in a response header.

    Raises:
      RequestError: 400 that names the option.
    """
    extra = {name: one for name, one in (options.model_extra or {}).items() if one is not None}
    known = [name for name in extra if name in LOAD_OPTIONS]
    for name in known:
        del extra[name]
    unknown = () if services.config.strict_requests else take_unknown(OllamaOptions, extra)
    for name in extra:
        raise invalid_request(
            f"{echo(name)} is not an option of this server", f"options.{name[:MAX_SHOWN]}"
        )
    ignored = [*known, *unknown] + (["num_ctx"] if options.num_ctx is not None else [])
    if ignored:
        note_ignored([f"options.{name}" for name in ignored], services)


def _response_format(wanted: Mapping[str, Any] | str | None) -> ResponseFormat | None:
    if not wanted and wanted != {}:
        return None
    if isinstance(wanted, str):
        return ResponseFormat(type="json_object")
    named = NamedSchema.model_construct(name="format", schema_=dict(wanted))
    return ResponseFormat(type="json_schema", json_schema=named)


async def _messages(turns: list[OllamaTurn]) -> list[Message]:
    """Return the conversation as chat messages, with an id for each tool call.

    Ids are positions, so that the start of a growing conversation stays the same.
    """
    messages = []
    num_calls = 0
    for number, turn in enumerate(turns):
        if not number % TURNS_AT_ONCE:
            await trio.lowlevel.checkpoint()
        calls = []
        for call in turn.tool_calls or ():
            name, arguments = call.function.name, call.function.arguments
            written = json.dumps(arguments, ensure_ascii=False)
            calls.append(earlier_call(call.id or f"call_{num_calls}", name, written))
            num_calls += 1
        if not (calls or turn.thinking or turn.tool_call_id or turn.tool_name):
            messages.append(Message(role=turn.role, content=turn.content or ""))
            continue
        messages.append(
            Message.model_construct(
                role=turn.role,
                content=turn.content or "",
                reasoning=turn.thinking,
                tool_calls=calls or None,
                tool_call_id=turn.tool_call_id,
                name=turn.tool_name,
            )
        )
    return messages


async def embed_inputs(services: Services) -> Response:
    """Return the embeddings of one or more inputs; an empty list for none."""
    fields = await read_fields(OllamaEmbed, services)
    texts = [fields.input] if isinstance(fields.input, str) else fields.input
    vectors = await _embed(
        fields, texts, services, dimensions=fields.dimensions, is_cut=fields.truncate is not False
    )
    lists: list[msgspec.Raw] = []
    for vector in vectors.found:
        lists.append(msgspec.Raw(msgspec.json.encode(numbers_of(vector))))
        await trio.lowlevel.checkpoint()
    return json_response(
        {
            "model": vectors.model.name,
            "embeddings": lists,
            "total_duration": _ns(trio.current_time() - current_scope().began_at),
            "load_duration": 0,
            "prompt_eval_count": vectors.num_tokens,
        }
    )


async def embed_prompt(services: Services) -> Response:
    """Return the embedding of one prompt; an empty one for an empty prompt."""
    fields = await read_fields(OllamaEmbeddings, services)
    with params_called({"input": "prompt"}):
        vectors = await _embed(fields, [fields.prompt or ""], services)
    return json_response({"embedding": numbers_of(vectors.found[0]) if vectors.found else []})


async def _embed(
    fields: OllamaEmbed | OllamaEmbeddings,
    texts: list[str],
    services: Services,
    *,
    dimensions: int | None = None,
    is_cut: bool = True,
) -> Vectors:
    """Return the embeddings of some texts; none for a single empty text."""
    name = untagged(fields.model, services.models)
    model = named_model(name, services)
    check_options(fields.options or OllamaOptions(), services)
    check_count(texts, services)
    if texts in ([], [""]):
        return Vectors((), 0, model)
    asked = EmbeddingFields.model_construct(input=tuple(texts), model=name, dimensions=dimensions)
    return await embed(asked, services, is_cut=is_cut)

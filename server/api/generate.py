"""Turns a validated request into generation requests, submits them, and returns the response."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import trio
from quart import Response, has_request_context

from triolet.errors import draining, invalid_request
from triolet.ids import new_request_id

from ..contract.generation import Failed, GenerationRequest, TextWatch
from ..scheduling.admission import AdmissionAsk
from ..tenants.tenancy import current_tenant
from .body import (
    CAP_HEADER,
    LEVEL_HEADER,
    current_key,
    current_scope,
    deadline_s,
    shown_request_id,
)
from .limits import check_output, current_scheduling, renew_tenant, reserved
from .resuming import has_answer, resumable_stream, resumable_whole
from .sampling import cache_ask, check_token_ids, of_choice, sampling_params
from .stream import EventStreamBody
from .versions import assigned_version, named_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pydantic import BaseModel

    from triolet.sampling import Grammar
    from triolet.service_class import Scheduling
    from triolet.tenants.plans import Plan as TenantPlan

    from ..contract.generation import AutoChoice
    from ..contract.output_stream import OutputStream
    from ..text.tool_forms.reasoning import ReasoningPlan, Thinking
    from ..text.tool_forms.tool_calls import CallsRead
    from .request_scope import RequestScope
    from .schemas import GenerationFields
    from .served_models import ServedModel
    from .services import Services
    from .stream import Serializer


SALT_BYTES: Final = 16


def salt_of(cache_salt: str | None) -> bytes:
    """Return a salt of fixed length for `cache_salt`; empty, the shared salt, for None.

    With tenants, the salt always depends on the tenant, so that no tenant can hit another one's
    cache. All servers of a fleet compute the same salt, so they share cached KV.
    """
    secret = current_tenant().secret
    if secret:
        words = b"\0" if cache_salt is None else b"\1" + cache_salt.encode()
        return blake2b(words, key=secret, digest_size=SALT_BYTES).digest()
    if cache_salt is None:
        return b""
    return blake2b(cache_salt.encode(), digest_size=SALT_BYTES).digest()


class Context(NamedTuple):
    """The maximum number of prompt and completion tokens together.

    Attributes:
      tokens: the maximum.
      source: what sets it, for errors.
    """

    tokens: int
    source: str


def context_of(model: ServedModel, plan: TenantPlan) -> Context:
    """Return the limit of a model and a tenant's plan."""
    most, max_model_len = plan.max_context_tokens, model.fleet.max_model_len
    if most is None or most >= max_model_len:
        return Context(max_model_len, f"model {model.name}'s context")
    return Context(most, f"the context of the plan {plan.name}")


def least(one: int | None, other: int | None) -> int | None:
    """Return the smaller of two limits; None means no limit."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def completion_budget(
    prompt_tokens: int, wanted: int | None, default: int | None, context: Context, param: str
) -> int:
    """Return the maximum number of completion tokens.

    Args:
      prompt_tokens: length of the prompt.
      wanted: the client's limit, which must fit.
      default: the limit without one, cut to what fits; None for as many as fit.
      context: the context that the request must fit into.
      param: the field that errors name.

    Raises:
      RequestError: 400 context_length_exceeded.
    """
    room = context.tokens - prompt_tokens
    place = "the prompt" if param == "prompt" else f"the prompt ({param})"
    if room < 1:
        # Claude Code compacts its conversation if it sees this phrase of Anthropic's API.
        too_long = (
            f"prompt is too long: {prompt_tokens} tokens > {context.tokens - 1} maximum; "
            f"{context.source} is {context.tokens} tokens, at least one of them for the answer. "
            f"Shorten {place}"
        )
    elif wanted is not None and wanted > room:
        too_long = (
            f"{context.source} is {context.tokens} tokens; the request has {prompt_tokens} in "
            f"{place} and {wanted} for the completion. Shorten the prompt or ask for fewer tokens"
        )
    elif wanted is not None:
        return wanted
    else:
        return room if default is None else min(default, room)
    raise invalid_request(too_long, param, code="context_length_exceeded")


STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """One request, ready to run.

    Attributes:
      model: the model that serves it.
      fields: the request.
      prompts: token ids of each prompt.
      max_tokens: maximum tokens per completion; None if not given.
      default_max_tokens: used if not given; None for as many as fit.
      param: the field that holds the prompts.
      logprobs: number of alternatives per token; None for no logprobs.
      grammar: the grammar of each completion; None for unconstrained.
      tool_form: the format of tool calls in the text; None without tools.
      reasoning: the reasoning before the answer; None without.
      watch: see GenerationRequest.
      auto: how its model was chosen; None if the request names it.
    """

    model: ServedModel
    fields: GenerationFields
    prompts: Sequence[tuple[int, ...]]
    max_tokens: int | None
    default_max_tokens: int | None
    param: str
    logprobs: int | None
    grammar: Grammar | None = None
    tool_form: CallsRead | None = None
    reasoning: ReasoningPlan | None = None
    watch: Callable[[], TextWatch] | None = None
    auto: AutoChoice | None = None

    @property
    def thinking(self) -> Thinking | None:
        """The format of reasoning in the completion; None if it is not separated."""
        return None if self.reasoning is None else self.reasoning.thinking

    @property
    def per_prompt(self) -> int:
        """Choices per prompt."""
        return self.fields.n or 1

    @property
    def count(self) -> int:
        """Total number of choices."""
        return len(self.prompts) * self.per_prompt


def warming(plan: GenerationPlan) -> GenerationPlan:
    """Return a plan that only computes the prompt's KV, for later requests with this prompt.

    It generates the shortest completion; its one token is not shown.
    """
    # A cached answer would not compute any KV.
    fields = plan.fields.model_copy(update={"response_cache": None})
    return replace(plan, fields=fields, max_tokens=1)


def check_fields(fields: GenerationFields, services: Services) -> ServedModel:
    """Refuse what can be refused before any text is processed.

    Returns:
      The model that the request names.

    Raises:
      RequestError: 400, 404, or 503 while the process shuts down.
    """
    check_is_open(services)
    model = named_model(fields.model, services)
    check_fields_for(fields, model, services)
    return model


def check_is_open(services: Services) -> None:
    """Raise RequestError (503) while the process shuts down, unless an answer may be joined."""
    if services.state.is_draining and not (has_request_context() and has_answer(services)):
        raise draining()


def check_fields_for(fields: GenerationFields, model: ServedModel, services: Services) -> None:
    """Refuse what can be refused of a request to a model before any text is processed.

    Raises:
      RequestError: 400, or 403 for a class outside of the tenant's plan.
    """
    current_scheduling(fields.service_tier)
    check_output(fields, current_tenant().plan)
    check_token_ids(fields, model)
    if (fields.n or 1) > services.config.max_choices:
        raise invalid_request(f"must be at most {services.config.max_choices}", "n")
    if fields.stream_options is not None and not fields.stream:
        raise invalid_request("is allowed only with stream: true", "stream_options")


def refuse_early(
    fields: GenerationFields, model: ServedModel, others: Iterable[ServedModel] = ()
) -> None:
    """Refuse a request before tokenizing it if it would wait too long whatever its prompt.

    A request that may join a running or stored answer is not refused here.

    Args:
      fields: the request.
      model: the model that refuses and counts it.
      others: models that may answer instead; the request is refused only if all would refuse it.

    Raises:
      RequestError: 503.
    """
    if not has_request_context() or current_key() is not None:
        return
    live, now = current_scope(), trio.current_time()
    scheduling = current_scheduling(fields.service_tier)
    asks = {}
    for one in (*others, model):
        if fields.response_cache == "allow" and one.config.response_cache.max_bytes:
            return
        within_s = deadline_s(one.config, is_streamed=bool(fields.stream))
        asks[one.name] = AdmissionAsk(scheduling, within_s, live.request_id, live.key)
    if all(one.fleet.admission.would_refuse(asks[one.name], now) for one in others):
        model.fleet.admission.admit(asks[model.name], now)


def current_ask_key() -> int:
    """Return the key that identifies the current request; 0 to use its prompt."""
    return current_scope().key if has_request_context() else 0


def capped(
    max_tokens: int,
    fields: GenerationFields,
    prompt_tokens: int,
    scheduling: Scheduling,
    model: ServedModel,
) -> int:
    """Return the brownout limit on an answer's tokens; the response headers show it."""
    admission = model.fleet.admission
    cap = admission.max_tokens(scheduling, prompt_tokens)
    if cap is None or max_tokens <= max(cap, fields.min_tokens or 0):
        return max_tokens
    cap = max(cap, fields.min_tokens or 0)
    if has_request_context():
        headers = current_scope().headers
        headers[LEVEL_HEADER] = str(admission.level)
        headers[CAP_HEADER] = str(cap)
    return cap


def generation_requests(
    plan: GenerationPlan, services: Services, *, within_s: float, client_request_id: str
) -> list[GenerationRequest]:
    """Return a generation request for each choice of a plan, in order.

    Args:
      plan: the plan.
      services: the server's parts.
      within_s: the deadline of each.
      client_request_id: the client's id for the request.

    Raises:
      RequestError: a prompt is too long for its completion.
    """
    model, fields, limits = plan.model, plan.fields, renew_tenant(services.tenancy).plan
    scheduling = current_scheduling(fields.service_tier, services.quotas.store.num_servers)
    context, assigned = context_of(model, limits), assigned_version(model)
    requests: list[GenerationRequest] = []
    for prompt_ids in plan.prompts:
        default = least(plan.default_max_tokens, limits.max_output_tokens)
        max_tokens = completion_budget(
            len(prompt_ids), plan.max_tokens, default, context, plan.param
        )
        max_tokens = capped(max_tokens, fields, len(prompt_ids), scheduling, model)
        params = sampling_params(
            fields,
            model.defaults,
            max_tokens=max_tokens,
            logprobs=plan.logprobs,
            grammar=plan.grammar,
            reasoning=None if plan.reasoning is None else plan.reasoning.tokens,
        )
        cache = requests[0].cache if requests else cache_ask(fields, params)
        request_ids = [new_request_id() for _ in range(plan.per_prompt)]
        requests += [
            GenerationRequest(
                request_id=request_id,
                prompt_ids=prompt_ids,
                sampling=of_choice(params, index),
                deadline_s=within_s,
                stop=fields.stop,
                priority=fields.priority or 0,
                skip_special_tokens=fields.skip_special_tokens is not False,
                include_stop=bool(fields.include_stop_str_in_output),
                client_request_id=client_request_id,
                cache_salt=salt_of(fields.cache_salt),
                origin_id=request_ids[0] if index else b"",
                scheduling=scheduling,
                key=current_ask_key(),
                cache=cache,
                markers=_markers(plan) or None,
                watch=plan.watch,
                auto=plan.auto,
                adapter=model.adapter_key,
                # Evidence counts requests, not their choices.
                assigned=None if requests or index else assigned,
            )
            for index, request_id in enumerate(request_ids)
        ]
    return requests


def _markers(plan: GenerationPlan) -> dict[int, str]:
    """Return the tokens that the reader of a completion must see, with their text."""
    of_reasoning = {} if plan.reasoning is None else plan.reasoning.markers
    return {**(plan.model.text.tool_markers if plan.tool_form else {}), **of_reasoning}


async def begin(
    requests: Sequence[GenerationRequest],
    model: ServedModel,
    services: Services,
    live: RequestScope,
) -> OutputStream:
    """Reserve quota for the choices and submit them; they end with `live`.

    Raises:
      RequestError: one of them was refused, and none was started.
    """
    with await reserved(requests, model, services):
        return submit_all(requests, model, live)


def submit_all(
    requests: Sequence[GenerationRequest], model: ServedModel, live: RequestScope
) -> OutputStream:
    """Submit choices after their quota was reserved. Does not wait."""
    stream = model.fleet.submit(*requests)
    live.hold(stream)
    return stream


def own_requests(
    plan: GenerationPlan, services: Services, *, is_streamed: bool = True
) -> list[GenerationRequest]:
    """Return the generation requests of a plan for the current HTTP request."""
    requests = generation_requests(
        plan,
        services,
        within_s=deadline_s(plan.model.config, is_streamed=is_streamed),
        client_request_id=shown_request_id(),
    )
    current_scope().cache = requests[0].cache
    return [replace(one, is_streamed=is_streamed) for one in requests]


def head(kind: str, prefix: str, model: ServedModel) -> dict[str, Any]:
    """Return the first fields of a response and of each chunk of a stream."""
    return {
        "id": f"{prefix}-{current_scope().request_id.hex()}",
        "object": kind,
        "created": int(time.time()),
        "model": model.name,
        **fingerprint_field(model),
    }


def fingerprint_field(model: ServedModel) -> dict[str, str]:
    """Return the model version's fingerprint as a response field; empty without a digest."""
    fingerprint = model.system_fingerprint
    return {} if fingerprint is None else {"system_fingerprint": fingerprint}


async def begin_stream(
    requests: Sequence[GenerationRequest],
    serializer: Serializer,
    fields: BaseModel,
    model: ServedModel,
    services: Services,
) -> Response:
    """Submit requests and return the streaming response. With an idempotency key, it may be a
    stream that is already running.

    Args:
      requests: the generation requests.
      serializer: writes the response.
      fields: the client's fields, which identify its retries.
      model: the model.
      services: the server's parts.
    """
    key = current_key()
    if key is None:
        stream = await begin(requests, model, services, current_scope())
        return event_stream(stream, serializer, services)
    response = await resumable_stream(key, fields, serializer, requests, model, services)
    response.headers.update(STREAM_HEADERS)
    return response


def event_stream(
    stream: OutputStream,
    serializer: Serializer,
    services: Services,
    headers: Mapping[str, str] = STREAM_HEADERS,
) -> Response:
    """Return the streaming response of a submitted stream."""
    body = EventStreamBody(
        stream,
        serializer,
        current_scope().connection,
        keep_alive_s=services.config.keep_alive_s,
    )
    return Response(body, headers=dict(headers))


async def begin_whole(
    requests: Sequence[GenerationRequest],
    serializer: Serializer,
    fields: BaseModel,
    model: ServedModel,
    services: Services,
) -> Response:
    """Submit requests, wait for their end and return the response. See `begin_stream`."""
    key = current_key()
    if key is not None:
        return await resumable_whole(key, fields, serializer, requests, model, services)
    stream = await begin(requests, model, services, current_scope())
    return Response(await whole_document(stream, serializer), content_type="application/json")


async def whole_document(stream: OutputStream, serializer: Serializer) -> bytes:
    """Wait for the end of a stream and return the response body.

    Raises:
      RequestError: it failed.
    """
    frames: list[bytes] = []
    async for events in stream:
        for index, event in events:
            if isinstance(event, Failed):
                raise event.error
            frames += serializer.event(index, event)
    return b"".join([*frames, *serializer.end()])


def json_response(document: object, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(msgspec.json.encode(document), status, content_type="application/json")

"""POST /v1/responses and its input_tokens: a conversation in, a response out, whole or as events.

Nothing is kept.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from triolet.errors import invalid_request

from ...contract.generation import Delta
from ..body import current_scope, read_fields
from ..generate import begin_stream, begin_whole, json_response, own_requests
from .responses_events import (
    ResponseDocument,
    ResponseEvents,
    message_frame,
    sse_frame,
)
from .responses_plan import plan_response, prompt_of_response
from .responses_schema import InputTokensRequest, ResponseRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quart import Response

    from ..services import Services
    from ..stream import Answer
    from .responses_schema import ResponseFields


async def create_response(services: Services) -> Response:
    """Answer a conversation in the words of the Responses API."""
    fields = await read_fields(ResponseRequest, services)
    _refuse_earlier(fields)
    if fields.stream_options is not None and not fields.stream:
        raise invalid_request("is for streams only; set stream to true", "stream_options")
    plan = await plan_response(fields, (), services)
    live = current_scope()
    (request,) = (
        replace(one, request_id=live.request_id)
        for one in own_requests(plan, services, is_streamed=bool(fields.stream))
    )
    response_id = f"resp_{live.request_id.hex()}"
    document = ResponseDocument(
        response_id, fields, request, services.config, plan.tool_form, plan.thinking
    )
    if fields.stream:
        events = ResponseEvents(document, sse_frame)
        return await begin_stream([request], events, fields, services)
    return await begin_whole([request], partial(_whole, document), fields, services)


async def count_input_tokens(services: Services) -> Response:
    """Return how many tokens a conversation has as a prompt."""
    fields = await read_fields(InputTokensRequest, services)
    _refuse_earlier(fields)
    prompt_ids = await prompt_of_response(fields, services)
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt_ids)})


def _refuse_earlier(fields: ResponseFields) -> None:
    if fields.previous_response_id is not None:
        raise invalid_request(
            "responses are not kept from one request to the next; send the whole conversation in "
            "input, or ask on one WebSocket, which remembers its own responses",
            "previous_response_id",
            code="unsupported_parameter",
        )


def _whole(document: ResponseDocument, answers: Sequence[Answer]) -> bytes:
    """Return what a stream would have ended with."""
    (answer,) = answers
    events = ResponseEvents(document, message_frame)
    events.begin()
    events.event(0, Delta(answer.text, tuple(answer.token_ids), tuple(answer.logprobs)))
    events.event(0, answer.finished)
    return msgspec.json.encode(events.response)

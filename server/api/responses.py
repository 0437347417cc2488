"""POST /v1/responses: a conversation in, a response out, whole or as events. Nothing is kept."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from triolet.errors import invalid_request

from ..generation import Delta
from .generate import begin_stream, begin_whole, own_requests
from .intake import live_request, read_fields
from .responses_document import ResponseDocument
from .responses_events import ResponseEvents, ResponseStream, message_frame, sse_frame
from .responses_plan import plan_response
from .responses_schema import ResponseRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quart import Response

    from .answers import Answer
    from .ports import Services


async def create_response(services: Services) -> Response:
    """Answer a conversation in the words of the Responses API."""
    fields = await read_fields(ResponseRequest, services)
    if fields.previous_response_id is not None:
        raise invalid_request(
            "responses are not kept from one request to the next; send the whole conversation in "
            "input, or ask on one WebSocket, which remembers its own responses",
            "previous_response_id",
            code="unsupported_parameter",
        )
    if fields.stream_options is not None and not fields.stream:
        raise invalid_request("is for streams only; set stream to true", "stream_options")
    plan = await plan_response(fields, (), services)
    live = live_request()
    (request,) = (
        replace(one, request_id=live.request_id)
        for one in own_requests(plan, services, is_streamed=bool(fields.stream))
    )
    response_id = f"resp_{live.request_id.hex()}"
    document = ResponseDocument(response_id, fields, request, services.config, plan.tool_form)
    if fields.stream:
        stream = ResponseStream(ResponseEvents(document, sse_frame))
        return begin_stream([request], stream, fields, services)
    return await begin_whole([request], partial(_whole, document), fields, services)


def _whole(document: ResponseDocument, answers: Sequence[Answer]) -> bytes:
    """Return what a stream would have ended with."""
    (answer,) = answers
    events = ResponseEvents(document, message_frame)
    events.begin()
    events.write(Delta(answer.text, tuple(answer.token_ids), tuple(answer.logprobs)))
    events.write(answer.finished)
    return msgspec.json.encode(events.response)

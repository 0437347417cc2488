"""POST /v1/responses: a conversation in, a response out, whole or as events. Nothing is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from triolet.errors import invalid_request

from ..generation import Delta
from .answers import collect
from .generate import event_stream, json_response, own_requests, submit_all
from .intake import live_request, read_fields
from .responses_document import ResponseDocument
from .responses_events import ResponseEvents, ResponseStream, sse_frame
from .responses_plan import plan_response
from .responses_schema import ResponseRequest

if TYPE_CHECKING:
    from quart import Response

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
    (request,) = (replace(one, request_id=live.request_id) for one in own_requests(plan, services))
    document = ResponseDocument(f"resp_{live.request_id.hex()}", fields, request, services.config)
    choices = submit_all([request], services, live)
    if fields.stream:
        events = ResponseEvents(document, sse_frame)
        return event_stream(choices, ResponseStream(events), services)
    (answer,) = await collect(choices, 1)
    document.add(Delta(answer.text, tuple(answer.token_ids), tuple(answer.logprobs)))
    return json_response(document.finished(answer.finished.reason, answer.finished.usage))

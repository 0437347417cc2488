"""Idempotency-Key and Last-Event-ID: HTTP requests with answers that outlive their connection.

A request with a key starts an answer, or joins the running or finished answer of an earlier request
with the same key and content. Its stream numbers the events, and a reconnecting client continues
after the last event that it received. Requests without a key are not affected.
"""

from __future__ import annotations

from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import trio
from quart import Response, request

from triolet.errors import RequestError, invalid_request

from ..contract.generation import Failed, Usage
from ..tenants.tenancy import current_tenant
from .body import KEY, LAST_EVENT_ID, current_key, current_scope, show_version
from .errors import echo
from .limits import reserved
from .resume import Name, ResumableAnswer, ResumingReader
from .stream import StreamBody

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel

    from ..contract.generation import GenerationRequest
    from .served_models import ServedModel
    from .services import Services
    from .stream import Serializer

JOINED: Final = "idempotency-replayed"
"""Response header that marks an answer started by an earlier request."""


def _wanted_position() -> int | None:
    """Return the position after the client's last event, or None if it has none."""
    text = request.headers.get(LAST_EVENT_ID)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise invalid_request(f"must be an event id, not {echo(text)}", LAST_EVENT_ID)
    return int(text) + 1


def _fingerprint(fields: BaseModel) -> bytes:
    """Return a digest that is equal if and only if two requests have the same content."""
    content = request.path.encode() + b"\0" + fields.model_dump_json().encode()
    return blake2b(content, digest_size=16).digest()


async def kept_reader(
    key: str,
    fields: BaseModel,
    serializer: Serializer,
    requests: Sequence[GenerationRequest],
    model: ServedModel,
    services: Services,
) -> tuple[ResumingReader, bool]:
    """Start, join or continue an answer. Its reader ends with the current request.

    Args:
      key: its idempotency key.
      fields: the request.
      serializer: the endpoint's serializer.
      requests: the generation requests.
      model: the model.
      services: hold the answer.

    Returns:
      The reader, and whether the answer has just been started.

    Raises:
      RequestError: it was refused.
    """
    found = kept_answer(key, fields, services)
    with await reserved(() if found else requests, model, services):
        # Nothing waits from here on, so two requests with one key start one answer.
        position = _wanted_position()
        answer = found or kept_answer(key, fields, services)
        is_new = answer is None
        if answer is None:
            if position is not None:
                raise RequestError(
                    f"the answer of this {KEY} no longer exists; leave out {LAST_EVENT_ID} to "
                    "start again",
                    status=404,
                    code="not_found",
                    param=LAST_EVENT_ID,
                )
            fingerprint, config = _fingerprint(fields), services.config.resume
            answer = ResumableAnswer(serializer, fingerprint, config, model.name, model.digest)
            services.kept.begin(name_of(key), answer, partial(model.fleet.submit, *requests))
        # Of two `auto` requests with one key, the other one may have started first on another
        # model.
        show_version(answer.digest)
        reader = services.kept.join(answer, position or 0)
        current_scope().hold(reader)
    return reader, is_new


async def resumable_stream(
    key: str,
    fields: BaseModel,
    serializer: Serializer,
    requests: Sequence[GenerationRequest],
    model: ServedModel,
    services: Services,
) -> Response:
    """Return a stream that can be continued. See `kept_reader`."""
    reader, is_new = await kept_reader(key, fields, serializer, requests, model, services)
    body = ResumableBody(reader, serializer, services.config.keep_alive_s)
    return Response(body, headers={} if is_new else {JOINED: "true"})


async def resumable_whole(
    key: str,
    fields: BaseModel,
    serializer: Serializer,
    requests: Sequence[GenerationRequest],
    model: ServedModel,
    services: Services,
) -> Response:
    """Wait for a whole answer. See `kept_reader`."""
    if LAST_EVENT_ID in request.headers:
        raise invalid_request("is allowed only with stream: true", LAST_EVENT_ID)
    reader, is_new = await kept_reader(key, fields, serializer, requests, model, services)
    frames: list[bytes] = []
    while not reader.is_done:
        if taken := reader.take():
            frames += taken
        else:
            await reader.answer.wait_changed()
    if reader.answer.failure is not None:
        raise reader.answer.failure
    headers = {} if is_new else {JOINED: "true"}
    return Response(b"".join(frames), 200, headers=headers, content_type="application/json")


def has_answer(services: Services) -> bool:
    """Return whether an answer with the request's key exists, whatever the request was."""
    key = current_key()
    return key is not None and services.kept.find(name_of(key)) is not None


def kept_model(services: Services) -> str | None:
    """Return the name of the model on which the answer with the request's key was started; None
    without an answer."""
    key = current_key()
    answer = None if key is None else services.kept.find(name_of(key))
    return None if answer is None else answer.model


def kept_answer(key: str, fields: BaseModel, services: Services) -> ResumableAnswer | None:
    """Return the answer of a key if it can be joined, so that nothing new is started.

    Raises:
      RequestError: 409, the key was used for another request.
    """
    answer = services.kept.find(name_of(key), _fingerprint(fields))
    is_good = answer is not None and (_wanted_position() is not None or answer.failure is None)
    return answer if is_good else None


def name_of(key: str) -> Name:
    """Return the name of the answer of the current request's key."""
    # Keys of different clients never collide. Credentials are checked elsewhere.
    tenant = current_tenant().name
    keys = (request.headers.get(name, "") for name in ("authorization", "x-api-key"))
    client = f"tenant {tenant}" if tenant else "\0".join(keys)
    scope = blake2b(client.encode(), digest_size=16).digest()
    return Name(tenant, scope, key)


class ResumableBody(StreamBody):
    """Writes the events of an answer, each with its position as `id`.

    Args:
      reader: reads the events.
      serializer: writes the error for a reader that fell too far behind.
      keep_alive_s: silence after which a keep-alive is sent.
    """

    def __init__(self, reader: ResumingReader, serializer: Serializer, keep_alive_s: float) -> None:
        self._reader = reader
        self._serializer = serializer
        self._keep_alive_s = keep_alive_s

    async def __anext__(self) -> bytes:
        """Return the next bytes to write."""
        reader = self._reader
        await trio.lowlevel.checkpoint()
        deadline = trio.current_time() + self._keep_alive_s
        while True:
            if reader.is_done:
                raise StopAsyncIteration
            if reader.is_lost:
                reader.position = reader.answer.transcript.end
                lost = Failed(reader.answer.forgotten(), Usage(0, 0))
                return b"".join(self._serializer.event(0, lost))
            first = reader.position
            if events := reader.take():
                return b"".join(b"id: %d\n%b" % pair for pair in enumerate(events, first))
            with trio.move_on_at(deadline) as silence:
                await reader.answer.wait_changed()
            if silence.cancelled_caught:
                return reader.answer.serializer.keep_alive

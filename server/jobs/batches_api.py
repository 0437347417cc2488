"""/v1/batches: many requests in a file, run behind everybody else's."""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from triolet.errors import draining

from ..api.body import read_fields
from ..api.claims import check_may_batch
from ..api.fields import Metadata  # noqa: TC001 (pydantic reads the annotations)
from ..api.generate import json_response
from ..api.schemas import StrictModel
from .records import BatchRecord, BatchState
from .storage import time_of_day
from .stored import (
    batch_document,
    checked_id,
    missing,
    owner_of_request,
    page_arguments,
    page_document,
)

if TYPE_CHECKING:
    from quart import Response

    from ..api.services import Services
    from .storage import Storage

MAX_WINDOW_NUMBER: Final = 999_999
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_UNIT_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MAX_WINDOW_S: Final = 30 * 86_400


def _window(value: object) -> object:
    found = _WINDOW.fullmatch(value) if isinstance(value, str) else None
    if found is None or _seconds(found[0]) > MAX_WINDOW_S:
        raise ValueError("must be a time such as 24h: a number of s, m, h or d, up to 30d")
    return value


def _seconds(window: str) -> int:
    return int(window[:-1]) * _UNIT_S[window[-1]]


class BatchFields(StrictModel):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=64)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Annotated[
        str, BeforeValidator(_window), Field(pattern="^[1-9][0-9]{0,5}[smhd]$")
    ]
    metadata: Metadata | None = None


async def create_batch(storage: Storage, services: Services) -> Response:
    """Begin a batch; its file is looked at by whoever runs it."""
    check_may_batch()
    fields = await read_fields(BatchFields, services)
    if services.state.is_draining:
        raise draining()
    now = int(time_of_day())
    record = BatchRecord(
        id=f"batch_{secrets.token_hex(12)}",
        status=BatchState.VALIDATING,
        endpoint=fields.endpoint,
        input_file_id=checked_id(fields.input_file_id),
        completion_window=fields.completion_window,
        created_at=now,
        expires_at=now + _seconds(fields.completion_window),
        metadata=fields.metadata,
    )
    await storage.run(storage.batches.add, owner_of_request(), record)
    storage.changed.set()
    return json_response(batch_document(record, storage.paused))


async def list_batches(storage: Storage, services: Services) -> Response:
    """Return batches, newest first."""
    page = await storage.run(storage.batches.page, owner_of_request(), *page_arguments())
    items = [batch_document(one, storage.paused) for one in page.items]
    return json_response(page_document(page, items))


async def show_batch(storage: Storage, services: Services, batch_id: str) -> Response:
    """Return one batch."""
    record = await storage.run(storage.batches.get, checked_id(batch_id), owner_of_request())
    if record is None:
        raise missing(batch_id)
    return json_response(batch_document(record, storage.paused))


async def cancel_batch(storage: Storage, services: Services, batch_id: str) -> Response:
    """Let a batch end; what is answered stays."""
    record = await storage.run(
        storage.batches.cancel, owner_of_request(), checked_id(batch_id), int(time_of_day())
    )
    if record is None:
        raise missing(batch_id)
    storage.changed.set()
    return json_response(batch_document(record, storage.paused))

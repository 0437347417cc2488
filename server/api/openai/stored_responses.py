"""Responses that a client goes on from by an id: of one WebSocket, or of the whole server.

A stored response has the items of its own request and of its answer, and names the response that it
goes on from. The id of an item holds that of its response, so items need no index of their own.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio
from quart import Response, request

from triolet.errors import RequestError, invalid_request
from triolet.fair_lru import Keeper

from ...tenants.tenancy import current_tenant
from ...text.process import at_once
from ..body import INLINE_BYTES
from ..errors import CODES, UNSUPPORTED_PARAMETER, echo
from ..generate import json_response
from ..schemas import MAX_MESSAGES
from .responses_schema import InputItem, stored_items

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...cache.store import ResponseStore
    from ..services import Services
    from .responses_events import ResponseEvents
    from .responses_schema import ResponseFields

PREVIOUS: Final = "previous_response_id"
_ITEM_ID: Final = re.compile(r"\A[a-z]+_([0-9a-f]{32})(?:_[0-9]+)?\Z")
NOT_STORED: Final = (
    "responses are not stored here, beyond one WebSocket; start the server with "
    "--responses-ttl 3600"
)
_PARTS: Final = {"assistant": "output_text", None: "reasoning_text"}
"""Of what an item's text is, by the role; reasoning has none."""


class StoredResponse(msgspec.Struct, array_like=True):
    """One response.

    Attributes:
      previous: id of the one that it goes on from.
      input: the items of its own request, as JSON.
      response: as it is at its end, as JSON.
    """

    previous: str | None
    input: bytes
    response: bytes


def _read(shown: dict[str, Any]) -> InputItem:
    """Return an item that was checked before, or made here."""
    text = "".join(part["text"] for part in shown["content"]) if "content" in shown else None
    return InputItem.model_construct(**shown | {"content": text})


def _shown(item: InputItem, own_id: str) -> dict[str, Any]:
    """Return an item of a request as it is listed."""
    shown = item.model_dump(exclude_none=True) | {"id": item.id or own_id, "status": "completed"}
    if item.content is not None:
        part = {"type": _PARTS.get(item.role, "input_text"), "text": item.content}
        shown["content"] = [part | {"annotations": []}]
    return shown | ({"summary": []} if item.type == "reasoning" else {})


def keeper_here() -> Keeper:
    """Return the tenant that the running task's responses are kept for, and its share."""
    return Keeper(current_tenant().name.encode(), current_tenant().plan.cache_share)


def _name(keeper: Keeper, response_id: str) -> bytes:
    # An id has 128 random bits, so that where there are no tenants, to know it is to own it.
    return keeper.tenant + b" " + response_id.encode()


def keep_at_end(
    events: ResponseEvents, fields: ResponseFields, own: Sequence[InputItem], services: Services
) -> None:
    """Have a response kept once it has ended, where the server keeps any and its client wants it.

    Args:
      events: that it is written by.
      fields: what was asked for.
      own: the items of its request.
      services: of the server.
    """
    if services.config.responses.ttl_s and fields.store is not False:
        events.own_items = own  # an answer that is not stored does not keep its request in memory
        events.response["store"] = True
        events.on_end = partial(remember, services.responses, keeper_here())


def remember(store: ResponseStore, keeper: Keeper, events: ResponseEvents) -> None:
    """Keep a response that has ended."""
    response, encode = events.response, msgspec.json.encode
    own_id = response["id"].replace("resp", "item", 1)
    items = [_shown(item, f"{own_id}_{index}") for index, item in enumerate(events.own_items)]
    stored = StoredResponse(response[PREVIOUS], encode(items), encode(response))
    name = _name(keeper, response["id"])
    store.keep(name, msgspec.msgpack.encode(stored), keeper, trio.current_time())


def _found(
    response_id: str, asked: str, services: Services, param: str, *of_connection: ResponseStore
) -> StoredResponse:
    """Return a response of the running task's tenant, and restart its time to live.

    Args:
      response_id: of the response.
      asked: what its client named, which may be an item of it.
      services: with the responses of the server.
      param: by which it was named.
      of_connection: what is looked at first.

    Raises:
      RequestError: it is not there.
    """
    keeper, now = keeper_here(), trio.current_time()
    name = _name(keeper, response_id)
    for store in (*of_connection, services.responses):
        if (kept := store.find(name, now)) is not None:
            store.keep(name, kept.answer, keeper, now)
            return msgspec.msgpack.decode(kept.answer, type=StoredResponse)
    raise _not_here(asked, services, param)


def _not_here(name: str, services: Services, param: str) -> RequestError:
    """Return the error for a response or an item that is not kept."""
    ttl_s = services.config.responses.ttl_s
    why = (
        f"a response is kept in memory for {ttl_s:g} s after its last use, by the server process "
        "that gave it, unless it had store: false; it is gone sooner if it is deleted, if newer "
        "ones need its room, and with a restart of the server"
        if ttl_s
        else NOT_STORED
    )
    what = "item" if param.startswith("input") else "response"
    is_previous = param == PREVIOUS  # for which OpenAI has a status and a code of its own
    return RequestError(
        f"there is no {what} {echo(name)}: {why}. To go on without it, send the whole conversation "
        "in input",
        status=400 if is_previous else 404,
        code="previous_response_not_found" if is_previous else CODES[404],
        param=param,
    )


async def conversation_of(
    fields: ResponseFields, services: Services, *of_connection: ResponseStore
) -> tuple[list[InputItem], list[InputItem]]:
    """Return the items that a response is to be made from.

    Args:
      fields: what was asked for.
      services: with the responses of the server, where it keeps any.
      of_connection: what its WebSocket remembers.

    Returns:
      Those of the responses before it, and its own with those that it refers to.

    Raises:
      RequestError: 400 or 404, something of it is not here, or all of it is too much.
    """
    if fields.store and not services.config.responses.ttl_s:
        raise invalid_request(f"{NOT_STORED}, or leave store away", "store", UNSUPPORTED_PARAMETER)
    wanted = [
        (f"input.{place}.id", _ITEM_ID.sub(r"resp_\1", item.id or ""), item.id or "")
        for place, item in enumerate(fields.input)
        if item.type == "item_reference"
    ]
    if fields.previous_response_id is not None:
        wanted.append((PREVIOUS, fields.previous_response_id, fields.previous_response_id))
    if not wanted:
        return [], fields.input
    found: dict[str, StoredResponse] = {}
    num_bytes = 0
    while wanted:
        await trio.lowlevel.checkpoint()  # thousands of them take 50 ms
        param, response_id, name = wanted.pop()
        if response_id not in found:
            stored = _found(response_id, name, services, param, *of_connection)
            num_bytes += len(stored.input) + len(stored.response)
            _require_room(num_bytes, len(found), services)
            found[response_id] = stored
            if param == PREVIOUS and stored.previous is not None:
                wanted.append((PREVIOUS, stored.previous, stored.previous))
    do = at_once if num_bytes <= INLINE_BYTES else services.do
    items = {}
    for of_id, one in found.items():
        shown = await do(stored_items, one.input, one.response, param=PREVIOUS)
        items[of_id] = [_read(item) for item in shown]
    by_id = {item.id: item for of_one in items.values() for item in of_one}
    earlier: list[InputItem] = []
    before = fields.previous_response_id
    while before is not None:
        earlier[:0] = items[before]
        before = found[before].previous
    own = [by_id.get(i.id, i) if i.type == "item_reference" else i for i in fields.input]
    for place, item in enumerate(own):
        if item.type == "item_reference":
            raise _not_here(item.id or "", services, f"input.{place}.id")
    texts = [item.content or item.output or item.arguments or "" for item in (*earlier, *own)]
    _require_room(sum(map(len, texts)), len(texts), services)
    return earlier, own


def _require_room(num_bytes: int, num_items: int, services: Services) -> None:
    if num_bytes > services.config.max_body_bytes or num_items > MAX_MESSAGES:
        raise invalid_request(
            "with the stored responses that it goes on from it has more than "
            f"{services.config.max_body_bytes} bytes or {MAX_MESSAGES} items; begin a new "
            "conversation",
            "input",
        )


async def show_response(services: Services, response_id: str) -> Response:
    """Return a stored response."""
    response = _asked_for(response_id, services, "stream").response
    return Response(response, content_type="application/json")


async def delete_response(services: Services, response_id: str) -> Response:
    """Forget a stored response, and its items with it."""
    _asked_for(response_id, services)
    services.responses.drop(_name(keeper_here(), response_id))
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def list_input_items(services: Services, response_id: str) -> Response:
    """Return the items of a stored response's own request, the newest first, on one page."""
    stored = _asked_for(response_id, services, "after", "limit")
    items = msgspec.json.decode(stored.input, type=list[msgspec.Raw])
    if request.args.get("order") != "asc":
        items.reverse()
    first, last = (msgspec.json.decode(items[at])["id"] for at in (0, -1))
    ends = {"first_id": first, "last_id": last}
    return json_response({"object": "list", "data": items, "has_more": False, **ends})


def _asked_for(response_id: str, services: Services, *refused: str) -> StoredResponse:
    """Return a stored response, unless the query has what is refused."""
    for name in refused:
        if request.args.get(name, "false") != "false":
            raise invalid_request("is not served: stored responses come as a whole", name)
    return _found(response_id, response_id, services, "response_id")

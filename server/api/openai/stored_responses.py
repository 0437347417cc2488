"""Stored responses, which clients continue by id: those of one WebSocket, or of the whole server.

A stored response holds the items of its request and answer, and the id of the response that it
continues. An item's id contains its response's id, so items need no index.
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
    "this server stores no responses beyond one WebSocket; start it with --responses-ttl 3600"
)
_PARTS: Final = {"assistant": "output_text", None: "reasoning_text"}
"""The type of an item's text part, by role; reasoning has no role."""


class StoredResponse(msgspec.Struct, array_like=True):
    """A stored response.

    Attributes:
      previous: id of the response that it continues.
      input: the items of its request, as JSON.
      response: the final response, as JSON.
    """

    previous: str | None
    input: bytes
    response: bytes


def _read(shown: dict[str, Any]) -> InputItem:
    """Return an item that was validated or created here, without validation."""
    text = "".join(part["text"] for part in shown["content"]) if "content" in shown else None
    return InputItem.model_construct(**shown | {"content": text})


def _shown(item: InputItem, own_id: str) -> dict[str, Any]:
    """Return an item of a request in the form in which it is listed."""
    shown = item.model_dump(exclude_none=True) | {"id": item.id or own_id, "status": "completed"}
    if item.content is not None:
        part = {"type": _PARTS.get(item.role, "input_text"), "text": item.content}
        shown["content"] = [part | {"annotations": []}]
    return shown | ({"summary": []} if item.type == "reasoning" else {})


def keeper_here() -> Keeper:
    """Return the tenant that the running task's responses are stored for, and its share."""
    return Keeper(current_tenant().name.encode(), current_tenant().plan.cache_share)


def _name(keeper: Keeper, response_id: str) -> bytes:
    # Without tenants, the id's 128 random bits are the only protection.
    return keeper.tenant + b" " + response_id.encode()


def keep_at_end(
    events: ResponseEvents, fields: ResponseFields, own: Sequence[InputItem], services: Services
) -> None:
    """Store a response when it ends, if the server stores responses and the client wants it.

    Args:
      events: the response's serializer.
      fields: the request.
      own: the items of the request.
      services: the server's parts.
    """
    if services.config.responses.ttl_s and fields.store is not False:
        events.own_items = own  # only set if stored, to free the request's memory otherwise
        events.response["store"] = True
        events.on_end = partial(remember, services.responses, keeper_here())


def remember(store: ResponseStore, keeper: Keeper, events: ResponseEvents) -> None:
    """Store a response that has ended."""
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
      response_id: id of the response.
      asked: the id that the client sent, which may be an item's.
      services: hold the server's responses.
      param: the parameter that has the id.
      of_connection: stores to search first.

    Raises:
      RequestError: it does not exist.
    """
    keeper, now = keeper_here(), trio.current_time()
    name = _name(keeper, response_id)
    for store in (*of_connection, services.responses):
        if (kept := store.find(name, now)) is not None:
            store.keep(name, kept.answer, keeper, now)
            return msgspec.msgpack.decode(kept.answer, type=StoredResponse)
    raise _not_here(asked, services, param)


def _not_here(name: str, services: Services, param: str) -> RequestError:
    """Return the error for a response or item that is not stored."""
    ttl_s = services.config.responses.ttl_s
    why = (
        f"a response is stored in memory for {ttl_s:g} s after its last use, by the server process "
        "that created it, unless it had store: false; it is removed earlier when deleted, when "
        "newer ones need its room, or when the server restarts"
        if ttl_s
        else NOT_STORED
    )
    what = "item" if param.startswith("input") else "response"
    is_previous = param == PREVIOUS  # OpenAI uses a different status and code for it
    return RequestError(
        f"there is no {what} {echo(name)}: {why}. To continue without it, send the whole "
        "conversation in input",
        status=400 if is_previous else 404,
        code="previous_response_not_found" if is_previous else CODES[404],
        param=param,
    )


async def conversation_of(
    fields: ResponseFields, services: Services, *of_connection: ResponseStore
) -> tuple[list[InputItem], list[InputItem]]:
    """Return the items that a response is made from.

    Args:
      fields: the request.
      services: hold the server's responses, if any.
      of_connection: the responses of its WebSocket.

    Returns:
      The items of earlier responses, and its own items including referenced ones.

    Raises:
      RequestError: 400 or 404, an item or response does not exist, or there are too many.
    """
    if fields.store and not services.config.responses.ttl_s:
        raise invalid_request(f"{NOT_STORED}, or leave out store", "store", UNSUPPORTED_PARAMETER)
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
        await trio.lowlevel.checkpoint()  # thousands of items take 50 ms
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
            "with the stored responses that it continues it has more than "
            f"{services.config.max_body_bytes} bytes or {MAX_MESSAGES} items; start a new "
            "conversation",
            "input",
        )


async def show_response(services: Services, response_id: str) -> Response:
    """Return a stored response."""
    response = _asked_for(response_id, services, "stream").response
    return Response(response, content_type="application/json")


async def delete_response(services: Services, response_id: str) -> Response:
    """Delete a stored response with its items."""
    _asked_for(response_id, services)
    services.responses.drop(_name(keeper_here(), response_id))
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def list_input_items(services: Services, response_id: str) -> Response:
    """List the items of a stored response's own request, newest first, on one page."""
    stored = _asked_for(response_id, services, "after", "limit")
    items = msgspec.json.decode(stored.input, type=list[msgspec.Raw])
    if request.args.get("order") != "asc":
        items.reverse()
    first, last = (msgspec.json.decode(items[at])["id"] for at in (0, -1))
    ends = {"first_id": first, "last_id": last}
    return json_response({"object": "list", "data": items, "has_more": False, **ends})


def _asked_for(response_id: str, services: Services, *refused: str) -> StoredResponse:
    """Return a stored response, unless the query has a refused parameter."""
    for name in refused:
        if request.args.get(name, "false") != "false":
            raise invalid_request(
                "is not supported: stored responses are returned as a whole", name
            )
    return _found(response_id, response_id, services, "response_id")

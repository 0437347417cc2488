"""Tests that everything started for a client is freed with its connection, without the garbage
collector."""

from __future__ import annotations

import gc
import json
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import pytest
import trio
from quart_trio.wrappers import TrioRequest
from trio.testing import wait_all_tasks_blocked

from server.api.body import INLINE_BYTES
from server.api.openai.responses_socket import ResponsesSession
from server.api.request_scope import ClientConnection, RequestScope
from server.api.stream import EventStreamBody
from server.contract.generation import CancelReason
from server.contract.output_stream import OutputStream
from server.edge.http import PatchedH11Protocol, PatchedHTTPStream
from server.edge.tcp import PatchedTCPServer
from server.edge.websocket import PatchedWSStream
from tests.server.scheduling.fakes import make_request
from tests.server.support.fakes import FakeFleet, FakeGeneration, by_hand
from tests.server.support.surface import request_bytes, small_window, surface, until
from tests.server.support.websocket import CLOSE, PATH, Socket, begin, frame_bytes, handshake
from triolet.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from tests.server.support.surface import RawClient, Surface

    Visit: TypeAlias = Callable[[Surface], Awaitable[None]]

pytestmark = pytest.mark.slow

VISITS = 2
STALL_S = 0.2
LARGE = INLINE_BYTES + 1
"""Large enough to be parsed in a thread."""
BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
HELD = (
    PatchedTCPServer,
    PatchedH11Protocol,
    PatchedHTTPStream,
    PatchedWSStream,
    RequestScope,
    EventStreamBody,
    OutputStream,
    ResponsesSession,
    FakeGeneration,
    RequestError,
)
"""Objects that exist once per client, with everything they reference."""


@contextmanager
def no_collector() -> Iterator[None]:
    """Disable the garbage collector, after collecting earlier garbage."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def held() -> dict[int, object]:
    """Return these objects, by id."""
    return {id(one): one for one in gc.get_objects() if type(one) in HELD}


async def read_to_the_end(client: RawClient) -> None:
    try:
        while await client.stream.receive_some():
            pass
    except trio.BrokenResourceError:
        pass
    await trio.aclose_forcefully(client.stream)


async def read_nothing(generation: FakeGeneration) -> None:
    """Give a client more than any kernel buffers for it, until it is cut."""

    def is_cut() -> bool:
        if not generation.num_unread:
            generation.say("x" * 262_144)
        return generation.was_cancelled.is_set()

    await until(is_cut)


async def ask_for_health(server: Surface) -> None:
    await server.request("GET", "/health/live")


async def read_a_stream(server: Surface) -> None:
    client = await server.connect()
    generation = await begin(server, client, "sse")
    generation.say("hello")
    generation.finish()
    await client.until(b"[DONE]")
    await client.stream.aclose()


async def leave(kind: str, server: Surface) -> None:
    client = await server.connect()
    generation = await begin(server, client, kind)
    generation.say("hello")
    await client.stream.aclose()
    await generation.was_cancelled.wait()


async def stall(kind: str, server: Surface) -> None:
    client = await small_window(server)
    await read_nothing(await begin(server, client, kind))
    await read_to_the_end(client)


async def close_a_socket(server: Surface) -> None:
    client = await server.connect()
    generation = await begin(server, client, "ws")
    generation.say("hello")
    generation.finish()
    await Socket(client, {}).until("response.completed")
    await client.send(frame_bytes(CLOSE, b"\x03\xe8"))
    await read_to_the_end(client)


async def send_a_bad_event(server: Surface) -> None:
    client = await server.connect()
    await client.send(handshake())
    await client.head()
    socket = Socket(client, {})
    await socket.send({"type": "response.create", "input": [1] * LARGE})
    await socket.until("error")
    await client.send(frame_bytes(CLOSE, b"\x03\xe8"))
    await read_to_the_end(client)


async def ask_for_nothing_there(server: Surface) -> None:
    assert (await server.request("GET", "/nothing")).status == 404


async def ask_in_no_such_way(server: Surface) -> None:
    assert (await server.request("DELETE", "/v1/models")).status == 405


async def open_a_socket_nowhere(server: Surface) -> None:
    client = await server.connect()
    await client.send(handshake().replace(PATH.encode(), b"/nothing"))
    assert (await client.head())[0] == 404
    await read_to_the_end(client)


async def refuse(body: bytes, server: Surface) -> None:
    client = await server.connect()
    await client.send(request_bytes("POST", "/v1/chat/completions", body=body))
    status, _ = await client.head()
    assert status == 400
    await client.stream.aclose()


@pytest.mark.parametrize(
    "visit",
    [
        ask_for_health,
        ask_for_nothing_there,
        ask_in_no_such_way,
        open_a_socket_nowhere,
        read_a_stream,
        close_a_socket,
        *(pytest.param(partial(leave, kind), id=f"leave {kind}") for kind in ("sse", "ws")),
        *(pytest.param(partial(stall, kind), id=f"stall {kind}") for kind in ("sse", "ws")),
        pytest.param(partial(refuse, b'{"messages": [' + b" " * LARGE), id="bad json"),
        pytest.param(
            partial(refuse, json.dumps({"messages": "x" * LARGE}).encode()), id="wrong fields"
        ),
        pytest.param(partial(refuse, b'{"messages": 1}'), id="a wrong field"),
        send_a_bad_event,
    ],
)
async def test_nothing_of_a_client_outlives_its_connection(visit: Visit) -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet, stall_timeout_s=STALL_S) as server:
        with no_collector():
            before = held()  # by other parts of this process
            for _ in range(VISITS):
                await visit(server)
            await server.all_connections_closed()
            await wait_all_tasks_blocked()
            fleet.generations.clear()
            after = held()
            assert [one for number, one in after.items() if number not in before] == []


def requests_and_headers() -> list[object]:
    """Return Quart's requests, and headers of answers that are kept."""
    found: list[object] = []
    for one in gc.get_objects():
        if type(one) is TrioRequest:
            found.append(one)
        elif type(one) is PatchedHTTPStream and hasattr(one, "response"):
            found += one.response["headers"]
    return found


async def test_an_open_stream_holds_neither_its_request_nor_the_headers_of_its_answer() -> None:
    async with surface(FakeFleet(by_hand)) as server:
        with no_collector():
            client = await server.connect()
            await begin(server, client, "sse")
            assert requests_and_headers() == []
            await client.stream.aclose()


async def test_what_begins_when_its_client_is_gone_is_cancelled() -> None:
    live = RequestScope(ClientConnection())
    live.note_client_gone()
    with live.while_client_stays as scope:
        await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught


async def test_what_a_request_began_ends_in_the_call_that_finds_its_client_gone() -> None:
    began, late = FakeGeneration(make_request()), FakeGeneration(make_request())
    with RequestScope(ClientConnection()) as live:
        live.hold(began)
        live.note_client_gone()
        assert began.cancelled == [CancelReason.CLIENT_GONE]
        live.hold(late)
    assert (len(began.cancelled), len(late.cancelled)) == (1, 1)

"""The whole HTTP application for tests: on a real socket, in the test's event loop, over a fake
fleet."""

from __future__ import annotations

import json
import socket
import sys
import traceback
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Self

import structlog
import trio
from trio.testing import wait_all_tasks_blocked

from server.app import build_app
from server.edge.listen import Edge, base_url, open_listening_socket
from server.metrics.metrics import Metrics
from server.tenants.opening import quotas_in_memory
from server.tenants.tenancy import Tenancy
from server.text.process import at_once
from tests.server.support.fakes import PATIENCE_S as PATIENCE_S
from tests.server.support.fakes import FakeFleet, FakeGrammars, FakeText, fake_services
from triolet.config import ServerConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from structlog.typing import EventDict

    from server.api.served_models import ServedModel
    from server.api.services import Services
    from server.contract.generation import GenerationRequest
    from server.jobs.storage import Storage
    from server.tenants.quotas import Quotas
    from server.text.model_files import SamplingDefaults
    from server.text.process import Do
    from server.text.tokenizer import TextModel

MODEL = "demo"
CONFIG = ServerConfig(
    model_dir="",
    model_name=MODEL,
    prefill_addresses=(),
    decode_addresses=(),
    port=0,
)
LOOK_S: Final = 0.005
"""Something that is waited for is looked at when all tasks have been at rest for this long, or
have gone on for this long: to look between any two of their steps would take a core all along."""


async def until(is_so: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    """Wait until something holds."""
    with trio.fail_after(within_s):
        while not is_so():
            with trio.move_on_after(LOOK_S):
                await wait_all_tasks_blocked(LOOK_S)


@dataclass
class Surface:
    """A server that is up."""

    fleet: FakeFleet
    grammars: FakeGrammars
    services: Services
    edge: Edge
    listening: socket.socket
    url: str
    port: int

    async def all_connections_closed(self, within_s: float = PATIENCE_S) -> None:
        """Wait until the server holds no connection any more."""
        await until(lambda: not self.edge.connections, within_s)

    async def connect(self, source: str | None = None) -> RawClient:
        """Open a connection to write bytes on, perhaps from another address of this machine."""
        stream = await trio.open_tcp_stream("127.0.0.1", self.port, local_address=source)
        return RawClient(stream)

    async def sent(self, data: bytes, source: str | None = None) -> RawClient:
        """Open a connection and write some bytes on it."""
        client = await self.connect(source)
        await client.send(data)
        return client

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """Send one request on a connection of its own and read the whole answer."""
        async with await self.sent(
            request_bytes(method, path, body=body, headers=headers)
        ) as client:
            return await client.answer()

    async def post(
        self, path: str, body: object, *, headers: dict[str, str] | None = None
    ) -> Answer:
        """Send JSON."""
        return await self.request("POST", path, body=json.dumps(body).encode(), headers=headers)


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:  # noqa: ANN401
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error in it."""
        assert self.headers["content-type"] == "application/json"
        assert self.headers["x-request-id"]
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """The data of its Server-Sent Events, checked for their framing."""
        assert self.headers["content-type"] == "text/event-stream; charset=utf-8"
        return sse_events(self.body)

    @property
    def named_events(self) -> list[tuple[str, Any]]:
        """The names and the data of its Server-Sent Events, where they have names."""
        assert self.headers["content-type"] == "text/event-stream; charset=utf-8"
        return named_sse_events(self.body)


def named_sse_events(body: bytes) -> list[tuple[str, Any]]:
    """Return the names and the data of a stream of named events; comments are left out."""
    assert body.endswith(b"\n\n")
    events = []
    for frame in body.removesuffix(b"\n\n").split(b"\n\n"):
        if not frame.startswith(b":"):
            name, data = frame.split(b"\n")
            assert name.startswith(b"event: ")
            assert data.startswith(b"data: ")
            events.append((name[7:].decode(), json.loads(data[6:])))
    return events


def sse_events(body: bytes) -> list[Any]:
    """Return the data lines of a stream, as JSON but for [DONE]; comments are left out."""
    assert body.endswith(b"\n\n")
    found: list[Any] = []
    for frame in body.removesuffix(b"\n\n").split(b"\n\n"):
        assert b"\n" not in frame
        if frame.startswith(b":"):
            continue
        assert frame.startswith(b"data: ")
        data = frame.removeprefix(b"data: ")
        found.append("[DONE]" if data == b"[DONE]" else json.loads(data))
    return found


def request_bytes(
    method: str, path: str, *, body: bytes | None = None, headers: dict[str, str] | None = None
) -> bytes:
    """Return a request; a header that is given replaces the usual one, empty for none."""
    usual = {"Host": "127.0.0.1"}
    if body is not None:
        usual |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    lines = [f"{method} {path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in (usual | (headers or {})).items() if value]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b"")


class RawClient:
    """Bytes to and from the server; closed at the end of its block."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._buffer = bytearray()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stream.aclose()

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def until(self, mark: bytes) -> bytes:
        """Read up to and including `mark`."""
        with trio.fail_after(PATIENCE_S):
            while mark not in self._buffer:
                data = await self.stream.receive_some()
                assert data, f"closed before {mark!r}: {bytes(self._buffer)!r}"
                self._buffer += data
        end = self._buffer.index(mark) + len(mark)
        taken = bytes(self._buffer[:end])
        del self._buffer[:end]
        return taken

    async def exactly(self, count: int) -> bytes:
        """Read some bytes."""
        with trio.fail_after(PATIENCE_S):
            while len(self._buffer) < count:
                data = await self.stream.receive_some()
                assert data, "closed early"
                self._buffer += data
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    async def is_closed(self) -> bool:
        """Wait for the server's end of the connection; False if more bytes come instead."""
        if self._buffer:
            return False
        with trio.fail_after(PATIENCE_S):
            try:
                return not await self.stream.receive_some()
            except trio.BrokenResourceError:
                return True

    async def head(self) -> tuple[int, dict[str, str]]:
        """Read a status line and headers."""
        lines = (await self.until(b"\r\n\r\n")).decode().split("\r\n")
        pairs = (line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), {name.lower(): value for name, value in pairs}

    async def chunk(self) -> bytes:
        """Read one chunk of a chunked body; empty at its end."""
        size = int((await self.until(b"\r\n"))[:-2], 16)
        data = await self.exactly(size)
        assert await self.exactly(2) == b"\r\n"
        return data

    async def answer(self) -> Answer:
        """Read a whole answer."""
        status, headers = await self.head()
        if headers.get("transfer-encoding") == "chunked":
            body = bytearray()
            while data := await self.chunk():
                body += data
            return Answer(status, headers, bytes(body))
        return Answer(status, headers, await self.exactly(int(headers.get("content-length", 0))))


async def small_window(server: Surface) -> RawClient:
    """Connect with the smallest receive buffer, so that little hides in the kernel."""
    raw = trio.socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await raw.connect(("127.0.0.1", server.port))
    return RawClient(trio.SocketStream(raw))


@asynccontextmanager
async def only_known_exceptions_logged(fault: str) -> AsyncIterator[None]:
    """Clients may have got their answers; a traceback in the log is a bug all the same, unless it
    has the words of a fault that the test has made."""
    logged: list[str] = []

    def note(_: object, __: str, entry: EventDict) -> EventDict:
        if entry.get("exc_info"):
            said = "".join(traceback.format_exception(*sys.exc_info()))
            if not fault or fault not in said:
                logged.append(said)
        return entry

    processors = structlog.get_config()["processors"]
    processors.insert(0, note)
    try:
        yield
    finally:
        if note in processors:  # it is not if a test has configured logs
            processors.remove(note)
    assert not logged, "".join(logged)


@asynccontextmanager
async def surface(
    fleet: FakeFleet | None = None,
    defaults: SamplingDefaults | None = None,
    tenancy: Tenancy | None = None,
    text: FakeText | TextModel | None = None,
    quotas: Quotas | None = None,
    storage: Storage | None = None,
    do: Do = at_once,
    others: Sequence[ServedModel] = (),
    fault: str = "",
    **changes: object,
) -> AsyncIterator[Surface]:
    """Run a server with some settings changed; nothing may be left of it at the end, and nothing
    but a `fault` may have gone wrong inside."""
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    fleet = fleet or FakeFleet()
    grammars = FakeGrammars()
    metrics = Metrics(MODEL, config.metrics_compat, *(model.name for model in others))
    services = fake_services(
        config,
        fleet,
        metrics,
        grammars,
        text,
        defaults=defaults,
        others=others,
        count_connections=lambda: edge.connections,
        tenancy=tenancy or Tenancy(),
        quotas=quotas or quotas_in_memory(),
        do=do,
    )
    edge = Edge(build_app(services, storage), config)
    metrics.watch(
        fleet.status,
        *edge.counters,
        others={model.name: model.fleet.status for model in others},
    )
    listening = open_listening_socket(config)
    url, port = base_url(listening), listening.getsockname()[1]
    async with only_known_exceptions_logged(fault), trio.open_nursery() as nursery:
        await nursery.start(edge.run, listening)
        await nursery.start(services.kept.run)
        yield Surface(fleet, grammars, services, edge, listening, url, port)
        edge.stop(within_s=0.5)
        await edge.wait_closed()
        nursery.cancel_scope.cancel()
    assert edge.connections == 0


async def posted(
    path: str,
    body: object,
    *,
    headers: dict[str, str] | None = None,
    **options: Any,  # noqa: ANN401
) -> Answer:
    """Run a server only to send it this, and return the answer."""
    async with surface(**options) as server:
        return await server.post(path, body, headers=headers)


async def requested(
    method: str,
    path: str,
    *,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
    **options: Any,  # noqa: ANN401
) -> Answer:
    """Run a server only to ask it this, and return the answer."""
    async with surface(**options) as server:
        return await server.request(method, path, body=body, headers=headers)


async def asked_of(
    path: str,
    body: object,
    *,
    headers: dict[str, str] | None = None,
    **options: Any,  # noqa: ANN401
) -> GenerationRequest:
    """Return the one request that a server makes of this for its fleet."""
    async with surface(**options) as server:
        answer = await server.post(path, body, headers=headers)
        assert answer.status == 200, answer.body
    (generation,) = server.fleet.generations
    return generation.request


async def refused_at(
    path: str,
    body: object,
    *,
    headers: dict[str, str] | None = None,
    **options: Any,  # noqa: ANN401
) -> Answer:
    """Return the answer of a server that begins nothing for this."""
    async with surface(**options) as server:
        answer = await server.post(path, body, headers=headers)
        assert not server.fleet.generations
        assert not server.fleet.inputs
    return answer

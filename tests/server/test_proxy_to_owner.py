"""Tests of idempotency keys on servers that share a port: a retry joins the first request wherever
it lands."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import trio

from server.app import build_app
from server.edge.listen import Edge, base_url, open_listening_socket, open_own_socket
from server.metrics.metrics import Metrics
from server.peers.peers import Peers
from server.tenants.tenancy import Tenancy
from tests.server.support.fakes import FakeFleet, FakeGrammars, by_hand, fake_services
from tests.server.support.surface import CONFIG, PATIENCE_S, Surface, request_bytes
from tests.server.support.tenants import tenancy_of
from triolet.config import PeerServersConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.server.support.fakes import FakeGeneration
    from tests.server.support.surface import RawClient

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hi"}]}
STREAM = ASK | {"stream": True}
NAMES = ("server-0", "server-1")
BEGUN = (
    b"HTTP/1.1 200 OK\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
WORDS = [f"word{number} " for number in range(20)]


def tell(generation: FakeGeneration) -> None:
    """Generate some words."""
    generation.say(*WORDS)
    generation.finish()


class Pair:
    """Two servers that share clients, each with its own fleet for counting."""

    def __init__(self, servers: list[Surface]) -> None:
        self.servers = servers
        ring = Peers(PeerServersConfig(NAMES[0], 0, tuple((name, "") for name in NAMES)))
        self.owned = {ring.owner_of(f"key{n}"): f"key{n}" for n in range(64)}

    def by_key(self, owner: int) -> tuple[str, Surface, Surface]:
        """Return a key owned by one server, that server, and the other one."""
        key = self.owned[NAMES[owner] if owner else None]
        return key, self.servers[owner], self.servers[1 - owner]

    @property
    def num_begun(self) -> int:
        """Number of generations started on either server."""
        return sum(len(server.fleet.generations) for server in self.servers)


@asynccontextmanager
async def pair(
    folder: Path,
    script: Callable[[FakeGeneration], object] = tell,
    tenancy: Tenancy | None = None,
    **changes: object,
) -> AsyncIterator[Pair]:
    """Run two servers, each on its own port, so that a test chooses the server."""
    own_config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    paths = tuple((name, str(folder / name)) for name in NAMES)
    servers: list[Surface] = []
    async with trio.open_nursery() as nursery:
        with ExitStack() as held:
            for name, path in paths:
                door = held.enter_context(socket.socket(socket.AF_UNIX))
                door.bind(path)
                config = PeerServersConfig(name, door.fileno(), paths)
                fleet, grammars, metrics = (
                    FakeFleet(script),
                    FakeGrammars(),
                    Metrics("demo", "none"),
                )
                services = fake_services(
                    own_config,
                    fleet,
                    metrics,
                    grammars,
                    peers=Peers(config),
                    tenancy=tenancy or Tenancy(),
                )
                edge = Edge(build_app(services), own_config)
                own, listening = open_own_socket(config), open_listening_socket(CONFIG)
                door.detach()  # now owned by the edge
                await nursery.start(edge.run, own, listening)
                await nursery.start(services.kept.run)
                url, port = base_url(listening), listening.getsockname()[1]
                servers.append(Surface(fleet, grammars, services, edge, listening, url, port))
        yield Pair(servers)
        for server in servers:
            server.edge.stop(within_s=0.5)
        for server in servers:
            await server.edge.wait_closed()
        nursery.cancel_scope.cancel()


async def begin(server: Surface, key: str, body: dict[str, Any]) -> RawClient:
    """Send a request and leave its answer unread."""
    client = await server.connect()
    content = json.dumps(body).encode()
    await client.send(request_bytes("POST", CHAT, body=content, headers={"idempotency-key": key}))
    return client


@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("body", [ASK, STREAM])
async def test_whoever_is_asked_gives_the_same_answer(
    tmp_path: Path, owner: int, body: dict[str, Any]
) -> None:
    async with pair(tmp_path) as both:
        key, *servers = both.by_key(owner)
        answers = [
            await server.post(CHAT, body, headers={"idempotency-key": key})
            for server in (*servers, *reversed(servers))
        ]
        assert {answer.status for answer in answers} == {200}
        assert len({answer.body for answer in answers}) == 1
        assert len({answer.headers["content-type"] for answer in answers}) == 1
        assert len({answer.headers["x-request-id"] for answer in answers}) == 4
        replayed = [answer.headers.get("idempotency-replayed") for answer in answers]
        assert replayed == [None, "true", "true", "true"]
        assert both.num_begun == 1


async def test_a_retry_beside_the_first_reads_along(tmp_path: Path) -> None:
    async with pair(tmp_path, by_hand) as both:
        key, owner, other = both.by_key(1)
        through = await begin(other, key, STREAM)
        generation = await owner.fleet.nth(0)
        generation.say("one ")
        await through.until(b"one ")
        direct = await begin(owner, key, STREAM)
        await direct.until(b"one ")
        generation.say("two ")
        generation.finish()
        for client in (through, direct):
            await client.until(b"two ")
            await client.until(b"[DONE]")
            await client.stream.aclose()
        assert both.num_begun == 1


async def test_a_stream_that_was_cut_goes_on_at_another_server(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        key, owner, other = both.by_key(0)
        uncut = (await owner.post(CHAT, STREAM, headers={"idempotency-key": key})).body
        events = [event + b"\n\n" for event in uncut.split(b"\n\n") if event]
        headers = {"idempotency-key": key, "last-event-id": "7"}
        assert (await other.post(CHAT, STREAM, headers=headers)).body == b"".join(events[8:])


async def test_a_client_that_leaves_is_seen_to_leave_by_the_owner(tmp_path: Path) -> None:
    async with pair(tmp_path, by_hand) as both:
        key, owner, other = both.by_key(1)
        client = await begin(other, key, STREAM)
        (await owner.fleet.nth(0)).say("one ")
        await client.until(b"one ")
        await client.stream.aclose()
        for server in both.servers:
            await server.all_connections_closed()
        assert not owner.fleet.generations[0].cancelled  # within its grace period


async def test_who_leaves_waits_for_what_it_passes_on(tmp_path: Path) -> None:
    async with pair(tmp_path, by_hand) as both:
        key, owner, other = both.by_key(0)
        peers = other.services.peers
        assert isinstance(peers, Peers)
        client = await begin(other, key, STREAM)
        generation = await owner.fleet.nth(0)
        generation.say("one ")
        await client.until(b"one ")
        is_drained = trio.Event()

        async def drain() -> None:
            await peers.answers.drain(PATIENCE_S)
            is_drained.set()

        with trio.fail_after(PATIENCE_S / 2):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(drain)
                other.services.state.drain()
                refused = await other.post(CHAT, ASK, headers={"idempotency-key": key})
                assert (refused.status, refused.error["code"]) == (503, "draining")
                assert not is_drained.is_set()
                generation.finish()
                await client.until(b"[DONE]")
        await client.stream.aclose()
        await peers.answers.drain(0.0)


async def test_errors_come_back_as_they_are(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        key, _, other = both.by_key(1)
        headers = {"idempotency-key": key}
        bad = await other.post(CHAT, ASK | {"temperature": 9}, headers=headers)
        assert (bad.status, bad.error["param"]) == (400, "temperature")
        assert (await other.post(CHAT, ASK, headers=headers)).status == 200
        conflict = await other.post(CHAT, ASK | {"seed": 1}, headers=headers)
        assert (conflict.status, conflict.headers["x-should-retry"]) == (409, "false")
        assert both.num_begun == 1


async def test_without_its_owner_a_key_begins_nothing(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        key, _, other = both.by_key(1)
        (tmp_path / NAMES[1]).unlink()
        answer = await other.post(CHAT, ASK, headers={"idempotency-key": key})
        assert (answer.status, answer.error["code"]) == (503, "overloaded")
        assert float(answer.headers["retry-after"]) <= 120
        assert both.num_begun == 0
        assert (await other.post(CHAT, ASK)).status == 200


async def test_an_answer_that_breaks_off_at_its_owner_does_not_end_well(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        key, _, other = both.by_key(1)
        (tmp_path / NAMES[1]).unlink()
        with trio.socket.socket(socket.AF_UNIX) as door:
            await door.bind(str(tmp_path / NAMES[1]))
            door.listen()
            with trio.fail_after(PATIENCE_S):
                client = await begin(other, key, STREAM)
                peer, _ = await door.accept()
                with peer:
                    await peer.send(BEGUN + b"3\r\none\r\n")
                    await client.until(b"one\r\n")
                assert await client.is_closed()
            await client.stream.aclose()


async def test_a_key_of_the_api_is_asked_for_on_the_way(tmp_path: Path) -> None:
    async with pair(tmp_path, tenancy=tenancy_of(alice="secret")) as both:
        key, _, other = both.by_key(1)
        for secret, status in (("wrong", 401), ("secret", 200)):
            headers = {"idempotency-key": key, "authorization": f"Bearer {secret}"}
            assert (await other.post(CHAT, ASK, headers=headers)).status == status
        assert both.num_begun == 1

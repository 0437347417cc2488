"""Tests of idempotency keys on two hosts with a real Redis: a retry joins the first request on
either host."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest
import trio

from server.app import build_app
from server.edge.listen import Edge, base_url, open_listening_socket
from server.metrics.metrics import Metrics
from server.peers.answer_directory import PREFIX
from server.peers.host_secret import SECRET_HEADER
from server.peers.other_hosts import OtherHosts
from server.tenants.tenancy import Tenancy
from tests.server.support.fakes import FakeFleet, FakeGrammars, by_hand, fake_services
from tests.server.support.surface import CONFIG, PATIENCE_S, RawClient, Surface, request_bytes
from tests.server.support.tenants import tenancy_of, tenant, tenants_of
from tests.server.test_proxy_to_owner import ASK, CHAT, STREAM, tell
from triolet.config import HostsConfig, QuotaConfig, TenantsConfig
from triolet.tenants.plans import Plan

from .conftest import lease_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.server.support.fakes import FakeGeneration
    from tests.server.tenants.redis_server import RedisServer

KEY: Final = {"idempotency-key": "one"}
SECRET: Final = "s" * 32
OTHER_SECRET: Final = "t" * 32
STRANGER: Final = "203.0.113.9"


@asynccontextmanager
async def two_hosts(
    folder: Path,
    redis: RedisServer,
    script: Callable[[FakeGeneration], object] = tell,
    tenancy: Tenancy | None = None,
    secrets: tuple[str, str] = (SECRET, SECRET),
    *,
    advertised_url: str = "",
    renew_s: float = 60.0,
) -> AsyncIterator[tuple[Surface, Surface]]:
    """Run two servers on two addresses, with leases that outlast the test.

    Args:
      folder: for secrets.
      redis: the directory.
      script: generates answers.
      tenancy: the tenants.
      secrets: secret of each server.
      advertised_url: URL of both servers; by default each has its own.
      renew_s: interval at which keys of dropped answers are freed.
    """
    servers: list[Surface] = []
    async with trio.open_nursery() as nursery:
        for number, secret in enumerate(secrets, 1):
            config = replace(CONFIG, host=f"127.0.0.{number}")
            listening = open_listening_socket(config)
            url, port = base_url(listening), listening.getsockname()[1]
            file = folder / f"secret-{number}"
            file.write_text(secret)
            hosts = HostsConfig(
                advertised_url=advertised_url or url,
                secret_file=str(file),
                lease_s=90,
                renew_s=renew_s,
                timeout_s=30,
            )
            quotas = QuotaConfig(limits=redis.url, connect_timeout_s=30)
            config = replace(config, hosts=hosts, tenants=TenantsConfig(quotas=quotas))
            fleet, grammars, metrics = FakeFleet(script), FakeGrammars(), Metrics("demo", "none")
            others = OtherHosts(config)
            tenants = tenancy or Tenancy()
            services = fake_services(
                config, fleet, metrics, grammars, hosts=others, tenancy=tenants
            )
            edge = Edge(build_app(services), config, others.secret)
            for run in (others.directory.run, services.kept.run):
                await nursery.start(run)
            await nursery.start(edge.run, listening)
            servers.append(Surface(fleet, grammars, services, edge, listening, url, port))
        redis.command("DEL", f"{PREFIX}settling")
        with trio.fail_after(PATIENCE_S):
            yield servers[0], servers[1]
        for server in servers:
            server.edge.stop(within_s=0.5)
        for server in servers:
            await server.edge.wait_closed()
        nursery.cancel_scope.cancel()


async def ask(
    server: Surface, body: dict[str, Any], path: str = CHAT, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Send a request with the key; return the answer's status, headers and body."""
    sent = KEY | {name.replace("_", "-"): value for name, value in headers.items()}
    client = await begin(server, body, path, **sent)
    async with client:
        answer = await client.answer()
    return answer.status, answer.headers, answer.body


async def begin(
    server: Surface, body: dict[str, Any], path: str = CHAT, **headers: str
) -> RawClient:
    """Send a request and leave its answer unread."""
    host = server.services.config.host
    client_headers = {"Host": host} | (headers or KEY)
    stream = await trio.open_tcp_stream(host, server.port)
    client = RawClient(stream)
    content = json.dumps(body).encode()
    await client.send(request_bytes("POST", path, body=content, headers=client_headers))
    return client


def num_begun(*servers: Surface) -> int:
    """Number of generations started on the servers."""
    return sum(len(server.fleet.generations) for server in servers)


@pytest.mark.parametrize("body", [ASK, STREAM])
async def test_both_hosts_give_the_same_answer(
    tmp_path: Path, redis: RedisServer, body: dict[str, Any]
) -> None:
    async with two_hosts(tmp_path, redis) as both:
        answers = [await ask(server, body) for server in (*both, *reversed(both))]
        assert {status for status, _, _ in answers} == {200}
        assert len({content for _, _, content in answers}) == 1
        replayed = [headers.get("idempotency-replayed") for _, headers, _ in answers]
        assert replayed == [None, "true", "true", "true"]
        assert num_begun(both[0]) == 1
        assert num_begun(both[1]) == 0


async def test_of_two_requests_at_once_one_begins_and_the_other_joins(
    tmp_path: Path, redis: RedisServer
) -> None:
    bodies: set[bytes] = set()

    async def retry(server: Surface) -> None:
        status, _, content = await ask(server, ASK)
        assert status == 200
        bodies.add(content)

    async with two_hosts(tmp_path, redis) as both:
        async with trio.open_nursery() as nursery:
            for server in (*both, *both):
                nursery.start_soon(retry, server)
        assert num_begun(*both) == 1
    assert len(bodies) == 1


async def test_a_cut_stream_goes_on_at_the_other_host(tmp_path: Path, redis: RedisServer) -> None:
    async with two_hosts(tmp_path, redis) as (first, second):
        _, _, uncut = await ask(first, STREAM)
        events = [event + b"\n\n" for event in uncut.split(b"\n\n") if event]
        assert (await ask(second, STREAM, last_event_id="7"))[2] == b"".join(events[8:])
        assert num_begun(first, second) == 1


async def test_a_client_that_leaves_is_seen_to_leave_by_the_owner(
    tmp_path: Path, redis: RedisServer
) -> None:
    async with two_hosts(tmp_path, redis, by_hand) as (first, second):
        direct, through = await begin(first, STREAM), None
        generation = await first.fleet.nth(0)
        through = await begin(second, STREAM)
        generation.say("one ")
        for client in (direct, through):
            await client.until(b"one ")
            await client.stream.aclose()
        for server in (first, second):
            await server.all_connections_closed()
        assert not generation.cancelled  # within its grace period


async def test_after_the_death_of_its_owner_an_answer_is_lost_or_computed_again(
    tmp_path: Path, redis: RedisServer
) -> None:
    async with two_hosts(tmp_path, redis) as (first, second):
        _, _, before = await ask(first, STREAM)
        redis.command("DEL", lease_of(redis, first.url))
        status, headers, content = await ask(second, STREAM, last_event_id="3")
        error = json.loads(content)["error"]
        assert (status, error["code"], error["param"]) == (410, "answer_lost", "last-event-id")
        assert headers["x-should-retry"] == "false"
        assert "without last-event-id" in error["message"]
        status, headers, after = await ask(second, STREAM)
        assert (status, headers.get("idempotency-replayed")) == (200, None)
        assert len(after) == len(before)
        assert (num_begun(first), num_begun(second)) == (1, 1)


async def test_the_error_has_the_form_of_the_api(tmp_path: Path, redis: RedisServer) -> None:
    body = STREAM | {"max_tokens": 4, "model": "demo"}
    async with two_hosts(tmp_path, redis) as (first, second):
        await ask(first, body, "/v1/messages")
        redis.command("DEL", lease_of(redis, first.url))
        status, _, content = await ask(second, body, "/v1/messages", last_event_id="3")
    assert (status, json.loads(content)["type"]) == (410, "error")


async def test_a_refused_request_leaves_its_key_free(tmp_path: Path, redis: RedisServer) -> None:
    async with two_hosts(tmp_path, redis) as (first, second):
        status, _, _ = await ask(first, ASK | {"temperature": 9})
        assert status == 400
        while redis.command("EXISTS", *_entries(redis)) != b":0\r\n":
            await trio.lowlevel.checkpoint()
        assert (await ask(second, ASK))[0] == 200
        assert (num_begun(first), num_begun(second)) == (0, 1)


def _entries(redis: RedisServer) -> list[str]:
    """Return the names of all entries, and of one that does not exist."""
    found = redis.command("KEYS", f"{PREFIX}answer:*").decode().split("\r\n")
    return ["none", *(name for name in found if name.startswith(PREFIX))]


async def test_errors_come_back_as_they_are(tmp_path: Path, redis: RedisServer) -> None:
    async with two_hosts(tmp_path, redis) as (first, second):
        assert (await ask(first, ASK))[0] == 200
        status, headers, _ = await ask(second, ASK | {"seed": 1})
        assert (status, headers["x-should-retry"]) == (409, "false")


async def test_an_owner_that_cannot_be_reached_is_waited_for(
    tmp_path: Path, redis: RedisServer
) -> None:
    async with two_hosts(tmp_path, redis) as (first, second):
        assert (await ask(first, ASK))[0] == 200
        first.edge.stop(within_s=0.0)
        await first.edge.wait_closed()
        status, headers, content = await ask(second, ASK)
        assert (status, json.loads(content)["error"]["code"]) == (503, "overloaded")
        assert float(headers["retry-after"]) >= second.services.config.hosts.lease_s
        assert num_begun(second) == 0


async def test_a_request_is_never_proxied_twice(tmp_path: Path, redis: RedisServer) -> None:
    async with two_hosts(tmp_path, redis) as (first, second):
        assert (await ask(first, ASK))[0] == 200
        status, _, content = await ask(second, ASK, x_triolet_host_secret=SECRET)
        assert (status, json.loads(content)["error"]["code"]) == (503, "overloaded")


async def test_a_draining_server_gives_the_answers_that_it_has(
    tmp_path: Path, redis: RedisServer
) -> None:
    async with two_hosts(tmp_path, redis, by_hand) as (first, second):
        direct = await begin(first, STREAM)
        generation = await first.fleet.nth(0)
        generation.say("one ")
        await direct.until(b"one ")
        first.services.state.drain()
        joined = await begin(second, STREAM)
        await joined.until(b"one ")
        generation.finish()
        for client in (direct, joined):
            async with client:
                await client.until(b"[DONE]")
        for server in (first, second):
            status, headers, _ = await ask(server, STREAM)
            assert (status, headers["idempotency-replayed"]) == (200, "true")
        assert num_begun(first, second) == 1


async def test_what_a_draining_server_refuses_another_host_may_begin(
    tmp_path: Path, redis: RedisServer
) -> None:
    async with two_hosts(tmp_path, redis) as (first, second):
        assert (await ask(first, ASK))[0] == 200
        first.services.state.drain()
        assert (await ask(first, ASK, idempotency_key="two"))[0] == 503
        with trio.fail_after(PATIENCE_S):
            while (await ask(second, ASK, idempotency_key="two"))[0] != 200:
                await trio.lowlevel.checkpoint()
        assert (num_begun(first), num_begun(second)) == (1, 1)


async def test_what_a_predecessor_still_computes_is_not_computed_again(
    tmp_path: Path, redis: RedisServer
) -> None:
    url = "http://127.0.0.1:9"  # a successor has the same URL, which leads only to the successor
    async with two_hosts(tmp_path, redis, by_hand, advertised_url=url, renew_s=0.02) as both:
        old, new = both
        direct = await begin(old, STREAM)
        generation = await old.fleet.nth(0)
        old.services.state.hand_over()
        for _ in range(3):
            status, _, content = await ask(new, STREAM)
            assert (status, json.loads(content)["error"]["code"]) == (503, "overloaded")
        generation.say("one ")
        generation.finish()
        async with direct:
            await direct.until(b"[DONE]")
        retries = [await begin(new, STREAM)]
        with trio.fail_after(PATIENCE_S):
            while num_begun(new) == 0:
                retries.append(await begin(new, STREAM))
                await trio.sleep(0.02)
        for client in retries:
            await client.stream.aclose()


async def test_another_secret_is_refused(tmp_path: Path, redis: RedisServer) -> None:
    async with two_hosts(tmp_path, redis, secrets=(SECRET, OTHER_SECRET)) as (first, second):
        assert (await ask(first, ASK))[0] == 200
        status, _, content = await ask(second, ASK)
        assert status == 403
        assert SECRET not in content.decode()
        assert OTHER_SECRET not in content.decode()


@pytest.mark.parametrize(("secret", "is_trusted"), [(SECRET, True), (OTHER_SECRET, False)])
async def test_only_another_host_may_name_the_client(
    tmp_path: Path,
    redis: RedisServer,
    secret: str,
    is_trusted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("server.api.access.enter_line", lines.append)
    async with two_hosts(tmp_path, redis) as (first, _):
        headers = {SECRET_HEADER: secret, "X-Forwarded-For": STRANGER}
        client = await begin(first, ASK, **headers)
        async with client:
            assert (await client.answer()).status == 200
    assert lines == [STRANGER if is_trusted else "127.0.0.1"]


async def test_a_server_gives_the_answer_that_it_has_whatever_redis_says(
    tmp_path: Path, redis: RedisServer
) -> None:
    async with two_hosts(tmp_path, redis) as (first, second):
        _, _, before = await ask(first, ASK)
        lease = lease_of(redis, first.url)
        redis.command("DEL", lease)
        _, _, after = await ask(second, ASK)
        redis.command("SET", lease, first.url)  # it was stopped, and continues
        assert before != after
        assert (await ask(first, ASK))[2] == before
        assert (await ask(second, ASK))[2] == after


async def test_an_answer_on_another_host_costs_nothing_here(
    tmp_path: Path, redis: RedisServer
) -> None:
    plan = Plan("p", requests_per_minute=1.0)
    alice = tenant("alice", "secret", plan=plan)
    tenancy = Tenancy(tenants_of(alice))
    async with two_hosts(tmp_path, redis, tenancy=tenancy) as (first, second):
        headers = {"authorization": "Bearer secret"}
        assert (await ask(first, ASK, **headers))[0] == 200
        second.services.quotas.count_request(alice)
        assert (await ask(second, ASK, idempotency_key="two", **headers))[0] == 429
        assert (await ask(second, ASK, **headers))[0] == 200
        assert requests_counted(first) == 1  # the other host counted its own
        assert requests_counted(second) == 2


def requests_counted(server: Surface) -> float:
    """Return the requests of all routes that a server has counted."""
    lines = server.services.metrics.exposition().decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("triolet_http_requests_total{")
    )


async def test_the_owner_checks_the_key_of_the_api_again(
    tmp_path: Path, redis: RedisServer
) -> None:
    tenancy = tenancy_of(alice="secret", bob="other")
    async with two_hosts(tmp_path, redis, tenancy=tenancy) as (first, second):
        alice, bob = "Bearer secret", "Bearer other"
        assert (await ask(first, ASK, authorization=alice))[0] == 200
        status, headers, _ = await ask(second, ASK, authorization=alice)
        assert (status, headers["idempotency-replayed"]) == (200, "true")
        status, headers, _ = await ask(second, ASK, authorization=bob)  # another client's key
        assert (status, headers.get("idempotency-replayed")) == (200, None)
        assert (await ask(first, ASK, authorization="Bearer wrong"))[0] == 401
        assert (num_begun(first), num_begun(second)) == (1, 1)


async def test_without_redis_keys_work_on_each_host(tmp_path: Path, redis: RedisServer) -> None:
    async with two_hosts(tmp_path, redis) as both:
        redis.stop()
        try:
            for server in both:
                bodies = {(await ask(server, ASK))[2] for _ in range(2)}
                assert len(bodies) == 1
                assert num_begun(server) == 1
        finally:
            redis.start()

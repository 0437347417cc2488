"""Tests that workers join and leave through DNS, Redis and a file, while the store dies and comes
back, without affecting a stream."""

from __future__ import annotations

import signal
import socket
import subprocess
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import httpx2
import pytest
import trio

from loadtest.campaign.client import ask_all
from loadtest.harness.servers import FleetLog
from loadtest.restart import long_asks
from ops.ports import bind_port
from tests import forked
from tests.server.membership.dns_server import DnsServer
from tests.server.tenants.redis_server import RedisServer, running_redis
from transport.zmq_curve import make_keys
from triolet.config.members import Member, Members, written_members
from triolet.ids import Role

from . import paced
from .conftest import PATIENT
from .fleet_process import METRIC

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection
    from pathlib import Path

    from loadtest.campaign.answers import Ask
    from loadtest.campaign.client import Story

pytestmark = [pytest.mark.slow, pytest.mark.long]

PATIENCE_S: Final = 120.0
TEST_S: Final = 1200.0
STREAMS: Final = 3
TOKENS: Final = 24
CHANGES: Final = 2
CHANGES_WHOLE: Final = 20
OUTAGE_S: Final = 1.5
OUTAGE_WHOLE_S: Final = 60.0
SMALL: Final = (
    *("--set", "worker.engine.kv_pool_bytes=16MiB", "--set", "worker.engine.threads=1"),
    *("--set", "worker.engine.dtype=float32"),
)
HOSTS: Final = {"prefill-0": "127.0.0.2", "decode-0": "127.0.0.3", "decode-1": "127.0.0.4"}
STRANGER: Final = "127.0.0.9"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        port: int = found.getsockname()[1]
        return port


class Roles:
    """The processes of a fleet without a supervisor, on several addresses of this host.

    Attributes:
      keys: their key directory.
      port: port of every worker's control socket.
      url: of the server.
      log: file with the logs of all processes.
    """

    def __init__(self, folder: Path) -> None:
        self.keys = folder / "keys"
        make_keys(self.keys)
        self.port, self._kv_port = free_port(), free_port()
        self._kept = bind_port("127.0.0.1", 0)
        self._server_port = self._kept.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._server_port}"
        self._path = folder / "all.log"
        self._output = self._path.open("wb")
        self.log = FleetLog(self._path)
        self._running: dict[str, forked.Popen] = {}

    def address(self, name: str) -> str:
        return f"tcp://{HOSTS[name]}:{self.port}"

    def member(self, name: str) -> Member:
        return Member(Role(name.partition("-")[0]), self.address(name))

    def start_server(self, *options: str) -> None:
        port = ("--set", f"server.port={self._server_port}")
        keys = ("--set", f"server.curve_dir={self.keys}")
        self._start("server", "server", *port, *keys, *options)

    def start_worker(
        self, name: str, *options: str, host: str = "", keys: Path | None = None
    ) -> None:
        role, host = name.partition("-")[0], host or HOSTS[name]
        kv = ("--set", f"decode.kv_address=tcp://{host}:{self._kv_port}")
        self._start(
            name,
            role,
            *("--set", f"{role}.name={name}", "--set", f"{role}.curve_dir={keys or self.keys}"),
            *("--set", f"{role}.control_address=tcp://{host}:{self.port}"),
            *(kv if role == "decode" else ()),
            *SMALL,
            *options,
        )

    def _start(self, name: str, role: str, *options: str) -> None:
        options = tuple(one.replace("worker.", f"{role}.") for one in options)
        self._running[name] = forked.Popen(
            [*paced.COMMAND, role, "demo", *options, *PATIENT],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
        )

    def stop(self, name: str) -> None:
        """Drain a process and wait for its end."""
        process = self._running.pop(name)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0

    def stop_all(self) -> None:
        for process in self._running.values():
            process.send_signal(signal.SIGKILL)
            process.wait()
        self._output.close()
        self._kept.close()

    async def get(self, path: str) -> httpx2.Response:
        return await trio.to_thread.run_sync(lambda: httpx2.get(self.url + path, timeout=60))

    async def alive(self) -> set[str]:
        """Return the names of the workers that the server uses."""
        with suppress(httpx2.TransportError):
            workers = (await self.get("/fleet/status")).json()["workers"]
            return {one["name"] for one in workers if one["state"] == "alive"}
        return set()

    async def wait_for(self, names: Collection[str]) -> None:
        with trio.fail_after(PATIENCE_S):
            while await self.alive() != {*names}:
                ended = [name for name, one in self._running.items() if one.poll() is not None]
                assert not ended, self._path.read_text()[-2000:]
                await trio.sleep(0.05)

    async def age_s(self) -> float | None:
        """Return the age of the store's last answer."""
        text = (await self.get("/metrics")).text
        ages = [m["value"] for m in METRIC.finditer(text) if m["name"] == AGE]
        return float(ages[0]) if ages else None


AGE: Final = "triolet_membership_age_seconds"


class ByDns:
    """Membership by two names in a DNS server; processes run all the time."""

    def __init__(self, roles: Roles, folder: Path, nursery: trio.Nursery) -> None:
        self._roles, self._nursery = roles, nursery
        self._server = DnsServer()
        self._scope = trio.CancelScope()
        self._stranger_keys = folder / "others"
        make_keys(self._stranger_keys)

    async def start(self) -> None:
        roles = self._roles
        for name in HOSTS:
            roles.start_worker(name)
        roles.start_worker("decode-9", host=STRANGER, keys=self._stranger_keys)
        srv = [f"0 0 {roles.port} p0.test."]
        self._server.records = {("_control._tcp.p.test", "SRV"): srv}
        self._server.addresses("p0.test", HOSTS["prefill-0"])
        await self.use(HOSTS)
        await self.up()
        dns = "server.membership.dns"
        roles.start_server(
            *("--set", f"{dns}.nameserver={self._server.address}"),
            *("--set", f"{dns}.prefill=_control._tcp.p.test"),
            *("--set", f"{dns}.decode=d.test:{roles.port}", "--set", f"{dns}.resolve_s=0.2"),
        )

    async def use(self, names: Collection[str]) -> None:
        decodes = [HOSTS[name] for name in names if name.startswith("decode")]
        self._server.addresses("d.test", *decodes, STRANGER)

    async def up(self) -> None:
        self._scope = await self._nursery.start(self._serve)

    async def _serve(self, *, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._server.run)
                task_status.started(scope)

    async def down(self) -> None:
        self._scope.cancel()


class ByFile:
    """Membership by a file; processes run all the time. It counts as down while its content is
    invalid."""

    def __init__(self, roles: Roles, folder: Path, nursery: trio.Nursery) -> None:
        self._roles, self._path = roles, folder / "members.json"
        self._names: Collection[str] = ()

    async def start(self) -> None:
        for name in HOSTS:
            self._roles.start_worker(name)
        await self.use(HOSTS)
        self._roles.start_server("--set", f"server.members_file={self._path}")

    async def use(self, names: Collection[str]) -> None:
        self._names = names
        self._write(written_members(Members(tuple(map(self._roles.member, names)))))

    async def up(self) -> None:
        await self.use(self._names)

    async def down(self) -> None:
        self._write(b"nonsense")

    def _write(self, content: bytes) -> None:
        (new := self._path.with_suffix(".new")).write_bytes(content)
        new.replace(self._path)


class ByRedis:
    """Membership by Redis: workers register while they run."""

    def __init__(self, roles: Roles, folder: Path, nursery: trio.Nursery) -> None:
        self._roles, self._folder, self._names = roles, folder, set[str]()
        self._held = ExitStack()
        self._redis: RedisServer = self._held.enter_context(running_redis(folder))
        nursery.start_soon(self._close_in_the_end)

    async def _close_in_the_end(self) -> None:
        with self._held:
            await trio.sleep_forever()

    def _url(self, role: str) -> tuple[str, str]:
        (place := self._folder / "redis.url").write_text(self._redis.url)
        return ("--set", f"{role}.membership.redis.url=@{place}")

    async def start(self) -> None:
        await self.use(HOSTS)
        poll = ("--set", "server.membership.redis_poll_s=0.2")
        self._roles.start_server(*self._url("server"), *poll)

    async def use(self, names: Collection[str]) -> None:
        brief = ("worker.membership.renew_s=0.2", "worker.membership.ttl_s=1")
        options = [*self._url("worker"), *(word for one in brief for word in ("--set", one))]
        for name in {*names} - self._names:
            self._roles.start_worker(name, *options)
        for name in self._names - {*names}:
            await trio.to_thread.run_sync(self._roles.stop, name)
        self._names = {*names}

    async def up(self) -> None:
        await trio.to_thread.run_sync(self._redis.start)

    async def down(self) -> None:
        self._redis.stop()


@asynccontextmanager
async def started(kind: Any, folder: Path) -> AsyncIterator[tuple[Roles, Any]]:  # noqa: ANN401
    roles = Roles(folder)
    try:
        async with trio.open_nursery() as nursery:
            store = kind(roles, folder, nursery)
            await store.start()
            await roles.wait_for(HOSTS)
            yield roles, store
            nursery.cancel_scope.cancel()
    finally:
        roles.stop_all()


class Load:
    """Clients that request streams repeatedly.

    Attributes:
      stories: what happened to each ended stream.
    """

    def __init__(self, url: str, asks: list[Ask], nursery: trio.Nursery) -> None:
        self.stories: list[Story] = []
        self._url = url
        for ask in asks:
            nursery.start_soon(self._keep_asking, ask)

    async def _keep_asking(self, ask: Ask) -> None:
        while True:
            self.stories.extend(await ask_all(self._url, [ask], 1, lambda _: None))

    async def wait_for_more(self, count: int = STREAMS) -> None:
        before = len(self.stories)
        with trio.fail_after(PATIENCE_S):
            while len(self.stories) < before + count:  # noqa: ASYNC110
                await trio.sleep(0.05)


async def outage(roles: Roles, store: Any, load: Load, outage_s: float) -> None:  # noqa: ANN401
    """Stop the store and start it again; the server must keep its workers."""
    before, has_age = await roles.alive(), await roles.age_s() is not None
    await store.down()
    ends_at = trio.current_time() + outage_s
    while trio.current_time() < ends_at or (has_age and (await roles.age_s() or 0) < OUTAGE_S):
        await load.wait_for_more(1)
    assert await roles.alive() == before
    await store.up()
    with trio.fail_after(PATIENCE_S):
        while has_age and (await roles.age_s() or 0) > OUTAGE_S:  # noqa: ASYNC110
            await trio.sleep(0.05)
    assert await roles.alive() == before


def have_answered(roles: Roles) -> bool:
    """Return whether the store answers again for all processes that missed it, except three that
    may have been stopped meanwhile."""
    roles.log.entries()
    failed = len(roles.log.of("membership_store_failed"))
    return failed - 3 <= len(roles.log.of("membership_store_answers"))


@pytest.mark.proof
@pytest.mark.parametrize("kind", [ByDns, ByRedis, ByFile])
async def test_workers_join_and_leave_by_a_store_that_dies_and_no_stream_fails(
    kind: Callable[..., Any], tmp_path: Path, whole: bool
) -> None:
    asks = long_asks(STREAMS, max_tokens=TOKENS, seed=3)
    with trio.fail_after(TEST_S):
        async with started(kind, tmp_path) as (roles, store):
            undisturbed = await ask_all(roles.url, asks, len(asks), lambda _: None)
            expected = {story.ask.number: story.answer for story in undisturbed}
            async with trio.open_nursery() as asking:
                load = Load(roles.url, asks, asking)
                for change in range(CHANGES_WHOLE if whole else CHANGES):
                    gone = f"decode-{change // 2 % 2}"
                    names = [name for name in HOSTS if name != gone or change % 2]
                    await store.use(names)
                    await roles.wait_for(names)
                    await load.wait_for_more()
                    if change % 4 == 0:
                        await outage(roles, store, load, OUTAGE_S)
                if whole:
                    await outage(roles, store, load, OUTAGE_WHOLE_S)
                with trio.fail_after(PATIENCE_S):
                    while not have_answered(roles):  # noqa: ASYNC110 (logs of several processes)
                        await trio.sleep(0.05)
                asking.cancel_scope.cancel()
    stories = [*undisturbed, *load.stories]
    assert [story.failure for story in stories if story.failure] == []
    assert all(story.answer == expected[story.ask.number] for story in stories)
    assert have_answered(roles)
    assert not roles.log.of("crashed")
    failed = len(roles.log.of("membership_store_failed"))
    print(f"{kind.__name__}: {len(load.stories)} streams, {failed} outages logged")  # noqa: T201
    assert len(roles.log.of("membership_store_answers")) <= failed
    assert bool(roles.log.of("members_refused")) is (kind is ByFile)
    strangers = [one for one in roles.log.of("handshake_failed") if STRANGER in one["peer"]]
    assert bool(strangers) is (kind is ByDns)

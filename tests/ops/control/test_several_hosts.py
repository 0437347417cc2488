"""Tests of control without a supervisor: servers on several hosts follow its routes over tcp with
keys, and of two controls the later one wins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import structlog
import trio

from ops.control import journal
from ops.control.process import run_control
from ops.ports import bind_port
from server.scheduling import control_link
from server.scheduling.control_link import ControlLink
from server.scheduling.presence import Presence
from tests.forked import TRIOLET, Popen
from tests.ops.control.fleets import (
    PATIENCE_S,
    ask_soon,
    config_of,
    ended,
    fleet_folder,
)
from transport import frames, handshake
from transport.control_protocol import Models
from transport.rollout_protocol import WorkDone
from transport.zmq_curve import make_keys
from transport.zmq_network import ZmqNetwork
from triolet.config import LinkConfig, ServerConfig
from triolet.config.routes import Route
from triolet.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from transport.link import Connection
    from triolet.ids import PeerId

LINK = LinkConfig(
    heartbeat_interval_s=0.05, local_reconnect_s=0.01, peer_timeout_s=50.0, lease_ttl_s=60.0
)
IMPATIENT = LinkConfig(
    heartbeat_interval_s=0.02, local_reconnect_s=0.01, peer_timeout_s=0.1, lease_ttl_s=0.2
)
"""Timeout of a server that quickly considers control silent."""
DIALS = 5
VERSIONS = ("chat", "chat-v2", "chat-v3")


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(control_link, "REDIAL_S", 0.01)


@pytest.fixture
def keys(tmp_path: Path) -> str:
    make_keys(tmp_path / "keys")
    return str(tmp_path / "keys")


def free_address() -> str:
    with bind_port("127.0.0.1", 0) as bound:
        return f"tcp://127.0.0.1:{bound.getsockname()[1]}"


class FakeLinks:
    """A model whose workers are ready."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.admission = SimpleNamespace(presence=Presence())
        self.adapters = SimpleNamespace(held=())
        self.is_ready = True

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(
            queued=0,
            running=0,
            received=0,
            is_ready=self.is_ready,
            lost_zones=frozenset(),
            work=WorkDone(),
        )


class FakeServer:
    """A server on another host: a real link to control, and models that are ready.

    Attributes:
      routes: the routes in use.
      seen: revisions of `chat` used so far, in order.
      models: its models by name.
      dials: number of connections made.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        keys: str,
        fleet: str = "triolet",
        link: LinkConfig = LINK,
    ) -> None:
        self.dials = 0
        self.models = {name: FakeLinks(f"/models/{name}") for name in VERSIONS}
        self.routes: dict[str, Route] = {}
        self.seen: list[tuple[int, str]] = []
        self._network = ZmqNetwork(link, keys)
        config = ServerConfig(
            link=link, control_addresses=tuple(addresses), control_fleet=fleet, curve_dir=keys
        )
        self.link = ControlLink(
            config,
            self,  # type: ignore[arg-type]
            "server",
            self.models,  # type: ignore[arg-type]
            {},
            lambda: self.routes,
            self._use,
        )

    def connect(self, *given: Any, **bounds: Any) -> Connection:  # noqa: ANN401
        """Connect, and count it."""
        self.dials += 1
        return self._network.connect(*given, **bounds)

    def _use(self, routes: Mapping[str, Route]) -> None:
        for name, route in routes.items():
            if route.may_follow(self.routes.get(name)) and route != self.routes.get(name):
                self.routes[name] = route
                self.seen.append((route.revision, route.stable))

    @property
    def stable(self) -> str:
        """The version to which `chat` is routed."""
        return self.routes["chat"].stable if "chat" in self.routes else ""

    def close(self) -> None:
        self._network.close()


@asynccontextmanager
async def servers(
    addresses: Sequence[str], keys: str, number: int = 2
) -> AsyncIterator[list[FakeServer]]:
    with ExitStack() as stack, trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            made = [FakeServer(addresses, keys) for _ in range(number)]
            for one in made:
                stack.callback(one.close)
                nursery.start_soon(one.link.run)
            yield made
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def control(keys: str | None, address: str) -> AsyncIterator[Path]:
    """Run a control without a supervisor in this process, and yield its folder."""
    with fleet_folder() as folder:
        config = replace(config_of(folder), address=address, curve_dir=keys, link=LINK)
        async with trio.open_nursery() as nursery:
            await nursery.start(run_control, config)
            yield folder
            nursery.cancel_scope.cancel()


async def switch(folder: Path, to: str, name: str = "chat") -> dict[str, Any]:
    """Move a name and return the finished operation."""
    path = f"/admin/models/{name}/switch"
    status, operation = await ask_soon(folder, "POST", path, json={"ref": to})
    assert status == 202, operation
    return await ended(folder, operation["id"])


def are_at(followers: Sequence[FakeServer], version: str) -> bool:
    return all(one.stable == version for one in followers)


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for a condition; a server may connect late."""
    while not is_so():
        await trio.lowlevel.checkpoint()


async def until_known(folder: Path) -> None:
    """Wait until control has heard from a server."""
    while not (await ask_soon(folder, "GET", "/admin/models"))[1]["models"]:
        await trio.lowlevel.checkpoint()


async def test_a_name_moves_at_all_servers_and_back(keys: str) -> None:
    address = free_address()
    async with control(keys, address) as folder, servers([address], keys) as followers:
        await until_known(folder)
        for to in ("chat-v2", "chat-v3", "chat"):
            done = await switch(folder, to)
            assert (done["status"], done["progress"]) == ("done", "chat is switched")
            await until(partial(are_at, followers, to))
        assert followers[0].routes["chat"].shares == {"chat": 1.0, "chat-v2": 0.0, "chat-v3": 0.0}
        moved = [(1, "chat-v2"), (2, "chat-v3"), (3, "chat")]
        assert [one.seen for one in followers] == [moved, moved], "each order was taken once"
        assert (await switch(folder, "chat"))["status"] == "done"
        assert followers[0].seen == moved, "there was nothing to do"


async def test_what_needs_a_supervisor_and_unknown_versions_are_refused(keys: str) -> None:
    address = free_address()
    async with control(keys, address) as folder, servers([address], keys, 1):
        await until_known(folder)
        for method, path, body in (
            ("POST", "chat/sleep", None),
            ("POST", "chat/load", None),
            ("DELETE", "chat", None),
            ("POST", "", {"name": "code", "ref": "code"}),
            ("POST", "chat/adapters", {"name": "sql", "ref": "sql"}),
        ):
            whole = f"/admin/models/{path}".rstrip("/")
            status, answer = await ask_soon(folder, method, whole, json=body)
            assert (status, answer["error"]["code"]) == (409, "conflict"), (path, answer)
            assert "runs without `triolet serve`" in answer["error"]["message"]
        for name, ref in (("chat", "chat-v9"), ("code", "chat")):
            path = f"/admin/models/{name}/switch"
            status, answer = await ask_soon(folder, "POST", path, json={"ref": ref})
            assert (status, "this fleet has chat, chat-v2" in str(answer)) == (404, True), answer
        await switch(folder, "chat-v2")
        path = "/admin/models/chat-v3/switch"
        status, answer = await ask_soon(folder, "POST", path, json={"ref": "chat-v2"})
        assert (status, answer["error"]["code"]) == (409, "conflict"), answer
        assert "chat-v2 is a version of chat" in answer["error"]["message"]


async def test_a_later_control_adopts_the_routes_of_servers(keys: str) -> None:
    address = free_address()
    async with servers([address], keys) as followers:
        async with control(keys, address) as folder:
            await until_known(folder)
            assert (await switch(folder, "chat-v2"))["status"] == "done"
            await until(lambda: all(one.stable == "chat-v2" for one in followers))
        followers[1].routes.clear()  # the server was restarted while control was away
        async with control(keys, address) as folder:
            await until(lambda: followers[1].stable == "chat-v2")
            assert (await switch(folder, "chat-v3"))["status"] == "done"
            await until(lambda: all(one.stable == "chat-v3" for one in followers))
        assert followers[0].seen == [(1, "chat-v2"), (2, "chat-v3")]


async def test_news_of_an_earlier_control_are_ignored(keys: str) -> None:
    with closing(FakeServer([free_address()], keys)) as server:
        server.link._use(Models((), {"chat": Route({"chat-v2": 1.0}, "chat-v2", 1)}, 7))
        server.link._use(Models((), {"chat": Route({"chat-v3": 1.0}, "chat-v3", 2)}, 6))
        assert server.seen == [(1, "chat-v2")]
        server.link._use(Models((), {"chat": Route({"chat-v3": 1.0}, "chat-v3", 2)}, 8))
        assert server.stable == "chat-v3"
        with pytest.raises(ConfigError, match="clock is ahead"):
            server.link._use(Models((), {}, 10**15))


async def test_orders_of_two_controls_for_one_revision_end_in_one_route(keys: str) -> None:
    address = free_address()
    async with control(keys, address) as folder, servers([address], keys) as followers:
        await until_known(folder)
        assert (await switch(folder, "chat-v2"))["status"] == "done"
        await until(lambda: all(one.stable == "chat-v2" for one in followers))
        followers[1].routes["chat"] = Route({"chat-v3": 1.0}, "chat-v3", 1)  # another control's
        await until(lambda: followers[0].routes == followers[1].routes)
        assert followers[1].routes["chat"].stable == "chat-v2"


@pytest.mark.parametrize("given", ["tcp://127.0.0.1:0", "tcp://0.0.0.0:0"])
async def test_a_port_without_keys_is_refused_on_both_sides(given: str) -> None:
    with pytest.RaisesGroup(
        pytest.RaisesExc(ConfigError, match="there are no CURVE keys"), flatten_subgroups=True
    ):
        async with control(None, given):
            pass
    with closing(ZmqNetwork(LINK)) as network:
        config = ServerConfig(link=LINK, control_addresses=("tcp://127.0.0.1:1",))
        with pytest.raises(ConfigError, match="there are no CURVE keys"):
            ControlLink(config, network, "server", {})


@asynccontextmanager
async def logged(
    address: str, keys: str, fleet: str = "triolet", link: LinkConfig = LINK
) -> AsyncIterator[tuple[FakeServer, list[Any]]]:
    """Run a server; yield it, its log and control's log."""
    with structlog.testing.capture_logs() as lines, trio.fail_after(PATIENCE_S):
        server = FakeServer([address], keys, fleet, link)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.link.run)
            yield server, lines
            nursery.cancel_scope.cancel()
        server.close()


async def until_dialled_often(server: FakeServer) -> None:
    await until(lambda: server.dials >= DIALS)


def reasons(lines: Sequence[Mapping[str, Any]], event: str) -> list[str]:
    return [one["reason"] for one in lines if one["event"] == event]


async def test_a_server_of_another_fleet_is_refused_once_on_both_sides(keys: str) -> None:
    address = free_address()
    async with control(keys, address), logged(address, keys, "other") as (server, lines):
        await until_dialled_often(server)
        for event in ("server_refused", "control_lost"):
            (reason,) = reasons(lines, event)
            assert "is of fleet 'other'" in reason
            assert "set server.control_fleet" in reason


async def test_a_server_of_another_release_is_refused_once_on_both_sides(
    keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = free_address()
    newer = handshake.PROTOCOL_VERSION + 1

    def hello(me: PeerId, fleet: str) -> frames.Hello:
        made = handshake.make_hello(me, fleet)
        return msgspec.structs.replace(made, version=newer, oldest_version=newer)

    monkeypatch.setattr("server.scheduling.control_link.make_hello", hello)
    async with control(keys, address), logged(address, keys) as (server, lines):
        await until_dialled_often(server)
        for event in ("server_refused", "control_lost"):
            (reason,) = reasons(lines, event)
            assert "upgrade the older by one release at a time" in reason


async def test_a_server_with_a_wrong_key_is_refused_on_both_sides(
    keys: str, tmp_path: Path
) -> None:
    address, others = free_address(), tmp_path / "others"
    make_keys(others)
    host, port = address.removeprefix("tcp://").split(":")
    bound = others / "bound" / f"{host}_{port}.public"
    bound.write_bytes((tmp_path / "keys" / "key.public").read_bytes())
    async with control(keys, address), logged(address, str(others), link=IMPATIENT) as (_, lines):
        while not (reasons(lines, "key_refused") and reasons(lines, "control_lost")):
            await trio.lowlevel.checkpoint()
        (refused,) = reasons(lines, "key_refused")
        (failed,) = reasons(lines, "handshake_failed")
        (lost,) = reasons(lines, "control_lost")
        assert "is not authorised" in refused
        assert "refused our key" in failed
        assert "refused our key" in lost


async def test_an_address_where_nothing_listens_is_told_once_and_found_later(keys: str) -> None:
    address = free_address()
    async with logged(address, keys, link=IMPATIENT) as (server, lines):
        await until_dialled_often(server)
        assert len(reasons(lines, "control_lost")) == 1
        async with control(keys, address):
            while not any(one["event"] == "control_found" for one in lines):
                await trio.lowlevel.checkpoint()


class ControlRole:
    """`triolet control` as a process of its own."""

    def __init__(self, address: str, keys: str, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        settings = {"control.address": address, "control.curve_dir": keys}
        settings |= {"control.state_dir": folder / "state", "control.tick_s": 0.01}
        command = [TRIOLET, "control"]
        for name, value in settings.items():
            command += ["--set", f"{name}={value}"]
        self.process = Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "XDG_STATE_HOME": str(folder)},  # each host has its own audit log
        )

    async def wait_ready(self) -> Path:
        """Wait until it is ready; return the folder of its sockets."""
        line = await trio.to_thread.run_sync(self.process.stdout.readline)
        assert line, await self.said_at_the_end()
        said = json.loads(line)
        assert said["event"] == "control_ready", said
        return Path(said["admin"]).parent

    async def said_at_the_end(self) -> tuple[int, str]:
        """Wait until it exits; return its exit code and stderr."""
        _, said = await trio.to_thread.run_sync(self.process.communicate)
        return self.process.returncode, said.decode()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            pipe.close()


@pytest.mark.slow
async def test_of_two_controls_the_later_one_counts_also_after_a_pause_of_the_other(
    keys: str, tmp_path: Path
) -> None:
    """Takes seconds: starts three processes."""
    addresses = [free_address(), free_address()]
    with ExitStack() as stack:

        def start(number: int) -> ControlRole:
            role = ControlRole(addresses[number], keys, tmp_path / f"control-{number}")
            stack.callback(role.close)
            return role

        async with servers(addresses, keys) as followers:
            for one in followers:
                one.models["chat-v3"].is_ready = False
            first = start(0)
            folder = await first.wait_ready()
            await until_known(folder)
            assert (await switch(folder, "chat-v2"))["status"] == "done"
            await until(partial(are_at, followers, "chat-v2"))
            body = {"ref": "chat-v3"}
            path = "/admin/models/chat/switch"
            status, waiting = await ask_soon(folder, "POST", path, json=body)
            assert (status, waiting["status"]) == (202, "running")
            first.process.send_signal(signal.SIGSTOP)
            second = start(1)
            folder = await second.wait_ready()
            await until_known(folder)
            assert (await switch(folder, "chat"))["status"] == "done"
            orders = [(1, "chat-v2"), (2, "chat")]
            await until(lambda: all(one.seen == orders for one in followers))
            for one in followers:
                one.models["chat-v3"].is_ready = True
            first.process.send_signal(signal.SIGCONT)
            code, said = await first.said_at_the_end()
            assert (code, "follows a control that was started later" in said) == (2, True), said
            # Started again from its journal it wins, and does not repeat its old order.
            again = start(0)
            folder = await again.wait_ready()
            ended_so = await ended(folder, waiting["id"])
            assert (ended_so["status"], ended_so["progress"]) == (
                "failed",
                "chat was switched to chat meanwhile",
            )
            assert (await second.said_at_the_end())[0] == 2
            assert [one.seen for one in followers] == [orders, orders]


async def test_a_second_control_with_the_same_folder_is_refused(
    keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "BUSY_S", 0.1)
    async with control(keys, free_address()) as folder:
        again = replace(
            config_of(folder), address=free_address(), curve_dir=keys, state_dir=str(folder)
        )
        with pytest.raises(ConfigError, match="stop the fleet that has it open"):
            await run_control(again)

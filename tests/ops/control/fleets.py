"""Fakes for tests of control: clients, and a supervisor that runs sleeping processes as workers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import trio

from ops.audit.recording import default_folder
from ops.audit.verification import read_entries, take_snapshot
from ops.running_fleets import SUPERVISOR_SOCKET
from tests.forked import TRIOLET, Popen
from transport.control_protocol import (
    ADMIN_SOCKET,
    CONTROL_SOCKET,
    MAX_FRAME_BYTES,
    decode_told,
    encoded,
)
from transport.frames import ControlNews, Goodbye, ServerReport, Welcome
from transport.handshake import make_hello
from transport.zmq_network import ZmqNetwork
from triolet.config import ControlConfig, ControlledModelConfig, LinkConfig
from triolet.ids import PeerId, Role, new_epoch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from transport.control_protocol import Activity, ModelNews, Models, Wake
    from transport.frames import AnyFrame
    from transport.link import Connection

PATIENCE_S = 60.0
READ_BYTES = 65_536
LINK = LinkConfig(local_reconnect_s=0.01)
WORKERS = ("prefill", "decode")


class FakeSupervisor:
    """A fake supervisor that runs sleeping processes as workers.

    Attributes:
      processes: running processes by model.
      failures: why a model cannot be started or added, by name.
      fail_start: why a model can be added but not started, by name.
      gate: called before each answer, so that tests can stop there.
      requests: received requests: kind and model.
      worker_seconds: reported worker-seconds of each model.
      busy: number of requests to refuse before one succeeds, by kind.
      run_id: id of the run.
      added: directory of each added model by name.
      reference_only: whether an added model had to be a version in the store, by name.
      withdrawn: models that servers are told to drop.
      on_served: called when the models of servers change.
      loaded: adapters in the workers of each model: reference by name.
      named: adapters that requests may use.
      alike: refs of versions with the same compute digest as the one they replace.
      beside: of these, versions that the workers of another one serve, too.
      refs: refs of versions that replaced another one, by name.
      before: the model and its previous ref, by the name drawn for the new version.
      routes: current routes by public name.
    """

    def __init__(self) -> None:
        self.processes: dict[str, list[subprocess.Popen[bytes]]] = {}
        self.failures: dict[str, str] = {}
        self.fail_start: dict[str, str] = {}
        self.gate: Callable[[str, str], Awaitable[None]] | None = None
        self.requests: list[tuple[str, str]] = []
        self.names: list[str] = []
        self.worker_seconds: dict[str, float] = {}
        self.busy: dict[str, int] = {}
        self.run_id = "run"
        self.added: dict[str, str] = {}
        self.reference_only: dict[str, bool] = {}
        self.withdrawn: set[str] = set()
        self.on_served: Callable[[], object] = int
        self.loaded: dict[str, dict[str, str]] = {}
        self.named: dict[str, set[str]] = {}
        self.alike: set[str] = set()
        self.beside: set[str] = set()
        self.refs: dict[str, str] = {}
        self.before: dict[str, tuple[str, str | None]] = {}
        self.routes: dict[str, dict[str, Any]] = {}

    def pids(self, name: str) -> list[int]:
        return [one.pid for one in self.processes.get(name, ())]

    def start(self, name: str) -> None:
        if name not in self.processes:
            self.processes[name] = [subprocess.Popen(["sleep", "3600"]) for _ in WORKERS]

    def stop(self, name: str) -> None:
        for process in self.processes.pop(name, ()):
            process.kill()
            process.wait()

    def close(self) -> None:
        for name in list(self.processes):
            self.stop(name)

    async def run(
        self, path: Path, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        listening = trio.socket.socket(trio.socket.AF_UNIX)
        await listening.bind(str(path))
        listening.listen()
        task_status.started()
        await trio.serve_listeners(self._serve, [trio.SocketListener(listening)])

    async def _serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            request = await stream.receive_some(READ_BYTES)
            if not request:
                return  # control ended before its request
            asked = json.loads(request)
            try:
                for line in await self._answer(asked["request"], asked):
                    await stream.send_all(json.dumps(line).encode() + b"\n")
            except trio.BrokenResourceError:
                return  # control was killed

    async def _answer(self, kind: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
        if kind == "models":
            models = [self._listed(one) for one in self.names]
            configs = [self._config(one) for one in self.added]
            served = [one for one in self.added if one not in self.withdrawn]
            told = {"run": self.run_id, "configs": configs, "served": served}
            told["routes"] = self.routes
            return [{"event": "models", "models": models, **told}]
        name = next(asked[key] for key in ("name", "version", "model") if key in asked)
        self.requests.append((kind, name))
        if self.gate is not None:
            await self.gate(kind, name)
        if self.busy.get(kind, 0):
            self.busy[kind] -= 1
            return [{"event": "refused", "message": "a restart of code is under way"}]
        if kind == "start_model":
            why = self.fail_start.get(name) or self.failures.get(name)
            if why is not None:
                return [{"event": "refused", "message": why}]
            self.start(name)
        elif kind in ("add_version", "route") and (gone := self._lacking(asked)):
            return [{"event": "refused", "message": f"no model is called {gone!r}"}]
        elif kind == "add_version" and asked["ref"] in self.alike and not asked["is_beside"]:
            self.before[name] = asked["replaced"], self.refs.get(asked["replaced"])
            name = asked["replaced"]
            self.refs[name] = asked["ref"]
        elif kind == "route" and name in self.beside and asked["is_moved"]:
            self.refs[asked["replaced"]] = self.refs[name]
            self.on_served()
        elif kind == "route":
            self._route(name, asked["replaced"], asked["revision"], is_moved=asked["is_moved"])
        elif kind in ("add_model", "add_version"):
            self.reference_only[name] = asked["is_reference_only"]
            if name in self.failures:
                return [{"event": "refused", "message": self.failures[name]}]
            self._add(name, asked["ref"] if "ref" in asked else asked["model"]["ref"])
        elif kind == "serve_model" and name in self.before:
            replaced, ref = self.before[name]
            self.refs[replaced] = ref or replaced
        elif kind == "serve_model":
            (self.withdrawn.discard if asked["is_served"] else self.withdrawn.add)(name)
            if not asked["is_served"]:
                self._narrow(name)
            self.on_served()
        elif kind.endswith("_adapter"):
            why = self._change_adapter(kind, name, asked)
            if why is not None:
                return [{"event": "refused", "message": why}]
        else:
            self.stop(name)
            self.before.pop(name, None)
        if kind == "drop_model" and name in self.added:
            self._drop(name)
        if self.gate is not None:
            await self.gate("done", name)
        end = {"event": "finished"}
        if kind in ("add_model", "add_version", "load_adapter", "drop_adapter"):
            end = {"event": "added", "config": self._config(name)}
        return [{"event": "step", "text": f"{name}: {kind}"}, end]

    def _lacking(self, asked: dict[str, Any]) -> str:
        names = [asked[key] for key in ("version", "replaced") if key in asked]
        return next((name for name in names if name not in self.added), "")

    def _add(self, name: str, ref: str) -> None:
        if name in self.added:
            return
        self.added[name] = ref
        self.withdrawn.add(name)
        if ref in self.alike:
            self.beside.add(name)
            self.refs[name] = ref
        else:
            self.names.append(name)

    def _drop(self, name: str) -> None:
        del self.added[name]
        if name in self.beside:
            self.beside.remove(name)
            del self.refs[name]
        else:
            self.names.remove(name)

    def _route(self, version: str, replaced: str, revision: int, *, is_moved: bool) -> None:
        """Execute a request like the supervisor."""
        owners = {one: name for name, route in self.routes.items() for one in route["shares"]}
        public = owners.get(replaced, replaced)
        shares = {version: 1.0} if is_moved else {replaced: 1.0, version: 0.0}
        now = self.routes.get(public, {"shares": {}, "stable": replaced, "revision": 0})
        if now["shares"] == shares or now["stable"] == version:
            return
        assert now["revision"] == revision, "no other one changes routes"
        stable = version if is_moved else replaced
        self.routes[public] = {"shares": shares, "stable": stable, "revision": revision + 1}
        self.withdrawn.discard(version)
        if is_moved:
            self.withdrawn.add(replaced)
        self.on_served()

    def _narrow(self, version: str) -> None:
        """Remove a version without requests from its route, like the supervisor."""
        for route in self.routes.values():
            if version in route["shares"] and len(route["shares"]) > 1:
                route["shares"] = {route["stable"]: 1.0}
                route["revision"] += 1

    def version(self, name: str) -> str:
        """Return the digest of a model's version."""
        return version_of(self.refs.get(name, name))

    def _change_adapter(self, kind: str, model: str, asked: dict[str, Any]) -> str | None:
        """Execute a request like the supervisor; return why it failed, if so."""
        adapter, loaded = asked["adapter"], self.loaded.setdefault(model, {})
        full, named = f"{model}:{adapter}", self.named.setdefault(model, set())
        if kind == "load_adapter":
            self.reference_only[full] = asked["is_reference_only"]
            if loaded.get(adapter, asked["ref"]) != asked["ref"]:
                return f"{full} is another one"
            if full in self.failures:
                return self.failures[full]
            loaded[adapter] = asked["ref"]
            named.add(adapter)
        elif kind == "withdraw_adapter":
            named.discard(adapter)
        elif adapter in named:
            return f"requests may name {adapter}"
        elif adapter in loaded and full in self.failures:
            named.add(adapter)
            return self.failures[full]
        else:
            loaded.pop(adapter, None)
        return None

    def _config(self, name: str) -> dict[str, Any]:
        told = {"name": name, "model_dir": self.added[name], "digest": self.version(name)}
        named = sorted(self.named.get(name, ()))
        size_bytes = 1000 * len(self.loaded.get(name, ()))
        if name in self.beside:
            told |= {"num_workers": 0, "workers_of": "chat"}
        adapters = {one: version_of(self.loaded[name][one]) for one in named}
        return told | {"adapters": adapters, "adapter_bytes": size_bytes}

    def _listed(self, name: str) -> dict[str, Any]:
        workers = [
            {"name": f"{name}.{role}-0", "role": role, "pid": one.pid, "is_ready": True}
            for role, one in zip(WORKERS, self.processes.get(name, ()), strict=False)
        ]
        state = "running" if workers else "stopped"
        seconds = self.worker_seconds.get(name, 0.0)
        shown = {"workers": workers, "failure": None, "worker_seconds": seconds}
        return {"name": name, "state": state, **shown}


def version_of(name: str) -> str:
    """Return the digest of a model's version."""
    return f"sha256:{sha256(name.encode()).hexdigest()}"


@contextmanager
def fleet_folder() -> Iterator[Path]:
    """Yield a private directory with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="control-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        yield folder


def config_of(folder: Path, *models: str, **fields: float) -> ControlConfig:
    """Return settings of control for models that need almost no memory."""
    described = tuple(
        ControlledModelConfig(name, str(folder / "model"), version_of(name)) for name in models
    )
    defaults = {"memory_bytes": 1 << 40, "min_residency_s": 0.0, "tick_s": 0.01, "poll_s": 0.05}
    own = ControlConfig(directory=str(folder), address=address_in(folder), models=described)
    return replace(own, **(defaults | fields))  # type: ignore[arg-type]


def address_in(folder: Path) -> str:
    """Return control's address."""
    return f"ipc://{folder / CONTROL_SOCKET}"


class ServerEnd:
    """A server's end of its link to control."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.frames: list[AnyFrame] = []

    async def next_frame(self) -> AnyFrame:
        while not self.frames:
            self.frames += [one.frame for one in await self.connection.receive_many()]
        return self.frames.pop(0)

    async def greet(self, fleet: str = "triolet") -> AnyFrame:
        """Send HELLO and return the answer."""
        me = PeerId(Role.SERVER, "server", new_epoch())
        await self.connection.send(make_hello(me, fleet))
        return await self.next_frame()

    async def say(self, message: Activity | Wake) -> None:
        await self.connection.send(ServerReport(encoded(message)))

    async def told(self) -> Models:
        """Wait for the next news."""
        while not isinstance(frame := await self.next_frame(), ControlNews):
            assert not isinstance(frame, Goodbye), frame.reason
        return decode_told(frame.body)

    async def hear(self, state: str) -> ModelNews:
        """Wait until the only model is in this state."""
        while True:
            (news,) = (await self.told()).models
            if news.state == state:
                return news


@asynccontextmanager
async def server_end(
    address: str, *, greets: bool = True, identity: bytes = b"server"
) -> AsyncIterator[ServerEnd]:
    """Connect to control as a server does."""
    with (
        closing(ZmqNetwork(LINK)) as network,
        closing(
            network.connect(address, identity, hwm=100, max_frame_bytes=MAX_FRAME_BYTES)
        ) as connection,
    ):
        end = ServerEnd(connection)
        if greets:
            assert isinstance(await end.greet(), Welcome)
        yield end


@asynccontextmanager
async def supervised(folder: Path, *models: str) -> AsyncIterator[FakeSupervisor]:
    """Run a fake supervisor."""
    supervisor = FakeSupervisor()
    supervisor.names = list(models)
    supervisor.added = {name: str(folder / "model") for name in models}
    try:
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                await nursery.start(supervisor.run, folder / SUPERVISOR_SOCKET)
                yield supervisor
                nursery.cancel_scope.cancel()
    finally:
        supervisor.close()


class ControlProcess:
    """Runs `triolet control` as a process that tests kill and restart."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._folder = folder
        own = {name: value for name, value in config.items() if name != "link"}
        self._config = json.dumps({"control": own, "link": config["link"]}).encode() + b"\n"
        self._process: Popen | None = None

    def start(self) -> None:
        """Start it and wait until it reports ready."""
        self._process = Popen(
            [TRIOLET, "control", "--config", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(self._config)
        self._process.stdin.close()
        line = self._process.stdout.readline()
        assert json.loads(line)["event"] == "control_ready", line

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal and return the exit code."""
        assert self._process is not None
        self._process.send_signal(number)
        code = self._process.wait(PATIENCE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code


def admin(folder: Path) -> httpx2.Client:
    """Return a client of the admin API."""
    transport = httpx2.HTTPTransport(uds=str(folder / ADMIN_SOCKET))
    return httpx2.Client(transport=transport, base_url="http://localhost", timeout=PATIENCE_S)


def ask(folder: Path, method: str, path: str, **given: object) -> tuple[int, Any]:
    """Send one request to the admin API."""
    with admin(folder) as client:
        answer = client.request(method, path, **given)  # type: ignore[arg-type]
        return answer.status_code, answer.json()


async def ask_soon(folder: Path, method: str, path: str, **given: object) -> tuple[int, Any]:
    """Send one request to the admin API from a Trio test."""
    return await trio.to_thread.run_sync(lambda: ask(folder, method, path, **given))


async def ended(folder: Path, operation_id: str) -> dict[str, Any]:
    """Wait until an operation ends."""
    while True:
        status, operation = await ask_soon(folder, "GET", f"/admin/operations/{operation_id}")
        assert status == 200, operation
        if operation["status"] in ("done", "failed"):
            return dict(operation)
        await trio.lowlevel.checkpoint()


async def states(folder: Path) -> dict[str, str]:
    """Return the state of each model."""
    _, listed = await ask_soon(folder, "GET", "/admin/models")
    return {model["name"]: model["state"] for model in listed["models"]}


async def recorded(operation_id: str) -> list[tuple[str, str]]:
    """Wait until the end of an operation is in the audit log; return its entries."""
    while True:
        entries = read_entries(take_snapshot(default_folder()))
        found = [(e.action, e.outcome) for _, e in entries if e.request_id == operation_id]
        if len(found) == 2:
            return found
        await trio.lowlevel.checkpoint()

"""Test helper: a Kubernetes cluster with a real control plane, kubelets that run processes instead
of containers, DNS and a Service. Clients of the Service learn late that a pod is gone, as with
kube-proxy."""

from __future__ import annotations

import base64
import random
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio

from loadtest.campaign.client import Story, tell
from loadtest.restart import long_asks
from tests import forked
from tests.end_to_end.tenants import key_of, write_tenants
from tests.server.membership.dns_server import DnsServer
from tests.server.tenants.redis_server import running_redis
from transport.zmq_curve import make_keys

from .control_plane import control_plane
from .metrics_adapter import OBJECTS, running_adapter
from .old_api import overlay_for_1_20
from .process_kubelet import Kubelet

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from loadtest.campaign.answers import Ask

    from .control_plane import Api, Json
    from .process_kubelet import PodProcess
    from .rendering import Manifest

SPACE: Final = "triolet"
TENANT: Final = "tests"
PATIENCE_S: Final = 180.0
POLL_S: Final = 0.25
LATE_S: Final = 2.0
"""How long clients keep using a pod that has left the Service."""
START_S: Final = 2.0
NUM_NODES: Final = 3
DOMAIN: Final = f"{SPACE}.svc.cluster.local"
RESOLV_CONF: Final = f"nameserver 127.0.0.1\nsearch {DOMAIN} svc.cluster.local\noptions ndots:5\n"
DEPLOYMENTS: Final = f"/apis/apps/v1/namespaces/{SPACE}/deployments"


class Cluster:
    """Nodes, DNS and the Service of the servers.

    Args:
      api: the API server.
      folder: for all files.
      kubeconfig: for kubectl.

    Attributes:
      kubelets: the nodes.
      desired: desired number of workers by role; 1 where none is set.
    """

    def __init__(self, api: Api, folder: Path, kubeconfig: Path) -> None:
        self.api, self.folder, self.kubeconfig = api, folder, kubeconfig
        numbers = range(1, NUM_NODES + 1)
        self.kubelets = [Kubelet(api, n, made(folder / f"node-{n}"), START_S) for n in numbers]
        self.desired: dict[str, int] = {}
        self._dns = DnsServer(53)
        self._seen_at: dict[str, float] = {}

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled; reports `started` once the nodes exist."""
        async with trio.open_nursery() as nursery:
            redis = made(self.folder / "redis")
            with running_redis(redis) as server, running_adapter(self.folder) as self.desired:
                (redis / "url").write_text(server.url)
                await nursery.start(self._run_all)
                task_status.started()
                await trio.sleep_forever()

    async def _run_all(self, *, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self._dns.run)
            for kubelet in self.kubelets:
                nursery.start_soon(kubelet.run)
            await self.apply_all(overlay_for_1_20())
            nursery.start_soon(self._follow)
            task_status.started()

    async def apply_all(self, objects: list[Manifest]) -> None:
        """Create the namespace, the Secrets and everything else."""
        [space] = (one for one in objects if one["kind"] == "Namespace")
        await self.api.apply(space)
        account = f"/api/v1/namespaces/{SPACE}/serviceaccounts/default"
        await until(lambda: self._is_there(account))
        write_tenants(self.folder / "tenants.toml", {TENANT: ""})
        await self.secret("triolet-tenants", [self.folder / "tenants.toml"])
        await self.secret("triolet-redis", [self.folder / "redis" / "url"])
        make_keys(keys := self.folder / "keys")
        await self.secret("triolet-keys", [keys / "key.secret", keys / "key.public"])
        for one in (*OBJECTS, *sorted(objects, key=lambda one: one["kind"] == "Deployment")):
            if one is not space:
                await self.api.apply(one)

    async def secret(self, name: str, files: list[Path]) -> None:
        """Create or replace a Secret from files."""
        data = {path.name: base64.b64encode(path.read_bytes()).decode() for path in files}
        meta = {"name": name, "namespace": SPACE}
        await self.api.apply({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data})

    async def _is_there(self, path: str) -> bool:
        return (await self.api.call("GET", path)).get("status") != "Failure"

    async def _follow(self) -> None:
        """Keep DNS and the endpoints that clients see up to date."""
        while True:
            for one in (await self.api.get(f"/api/v1/namespaces/{SPACE}/endpoints"))["items"]:
                parts = one.get("subsets", ())
                found = [ip["ip"] for part in parts for ip in part.get("addresses", ())]
                name = one["metadata"]["name"]
                self._dns.addresses(f"{name}.{DOMAIN}", *found)
                if name == "triolet":
                    now = trio.current_time()
                    self._seen_at |= dict.fromkeys(found, now)
            await trio.sleep(POLL_S)

    async def url(self) -> str:
        """Return a server's address, chosen as for a client's connection."""
        while True:
            since = trio.current_time() - LATE_S
            if usable := [ip for ip, seen_at in self._seen_at.items() if seen_at >= since]:
                return f"http://{random.choice(usable)}:8000"
            await trio.sleep(POLL_S)

    async def deployment(self, name: str) -> Json:
        """Return a Deployment."""
        return await self.api.get(f"{DEPLOYMENTS}/{name}")

    async def wait_rolled_out(self, *names: str) -> None:
        """Wait until Deployments have only ready pods of their newest version."""
        for name in names:
            await until(partial(self._is_rolled_out, name))

    async def _is_rolled_out(self, name: str) -> bool:
        one = await self.deployment(name)
        status, wanted = one.get("status", {}), one["spec"]["replicas"]
        counts = [status.get(f"{kind}eplicas", 0) for kind in ("r", "updatedR", "availableR")]
        is_seen = status.get("observedGeneration") == one["metadata"]["generation"]
        return is_seen and counts == [wanted] * 3 and len(await self.pods(name)) == wanted

    async def scale(self, name: str, number: int) -> None:
        """Set a number of workers; wait until the autoscaler has followed."""
        self.desired[name] = number
        await until(partial(self._is_scaled, name, number))
        await self.wait_rolled_out(name)

    async def _is_scaled(self, name: str, number: int) -> bool:
        return bool((await self.deployment(name))["spec"]["replicas"] == number)

    async def change_pods(self, name: str, pod: Json) -> None:
        """Change the specification of a Deployment's pods."""
        await self.api.patch(f"{DEPLOYMENTS}/{name}", {"spec": {"template": {"spec": pod}}})

    async def pods(self, name: str) -> list[Json]:
        """Return the pods of a role, including ending ones."""
        label = f"labelSelector=app.kubernetes.io/component={name}"
        found = (await self.api.get(f"/api/v1/namespaces/{SPACE}/pods?{label}"))["items"]
        assert isinstance(found, list)
        return found

    def process(self, pod: Json) -> tuple[Kubelet, PodProcess]:
        """Return the process of a pod."""
        uid = pod["metadata"]["uid"]
        [kubelet] = (one for one in self.kubelets if uid in one.pods)
        return kubelet, kubelet.pods[uid]

    async def roll_out(self, name: str, version: str) -> None:
        """Change a Deployment's pods, as a new image would."""
        template = {"metadata": {"annotations": {"triolet/version": version}}}
        await self.api.patch(f"{DEPLOYMENTS}/{name}", {"spec": {"template": template}})


class Load:
    """Clients that send requests repeatedly, without retries.

    Attributes:
      stories: what happened to each ended request.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.stories: list[Story] = []
        self._cluster = cluster
        self._is_over = False
        # Short streams find every server that refuses; long ones last longer than preStop.
        asks = [*long_asks(3, max_tokens=24, seed=3), *long_asks(2, max_tokens=200, seed=4)]
        key = key_of(TENANT)
        self._asks = [replace(ask, number=n, key=key) for n, ask in enumerate(asks)]

    async def run(self) -> None:
        """Send requests until `end` is called, then wait for the last streams."""
        async with trio.open_nursery() as nursery:
            for ask in self._asks:
                nursery.start_soon(self._repeat, ask)

    def end(self) -> None:
        """Stop sending requests."""
        self._is_over = True

    async def _repeat(self, ask: Ask) -> None:
        while not self._is_over:
            story = Story(ask)
            await tell(await self._cluster.url(), story, retries_broken=False)
            self.stories.append(story)

    @property
    def failures(self) -> list[str]:
        """Reasons why streams failed."""
        return [story.failure for story in self.stories if story.failure]

    @property
    def is_exact(self) -> bool:
        """Whether every repetition of a request got the same answer."""
        answers = [(story.ask.number, story.answer) for story in self.stories if story.answer]
        first = dict(reversed(answers))
        return all(first[number] == answer for number, answer in answers)


async def under_load(cluster: Cluster, change: Callable[[], Awaitable[None]]) -> Load:
    """Make a change under load; return what the clients saw."""
    load = Load(cluster)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load.run)
        with trio.fail_after(PATIENCE_S):
            await until(lambda: is_true(len(load.stories) >= 3))
            await change()
            seen = len(load.stories)
            await until(lambda: is_true(len(load.stories) >= seen + 3))
        load.end()
    return load


async def is_true(value: bool) -> bool:
    return value


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until a condition holds."""
    with trio.fail_after(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110
            await trio.sleep(POLL_S)


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


class Portal:
    """A cluster in a thread of its own, shared by several tests."""

    def __init__(self, folder: Path) -> None:
        self.cluster: Cluster
        self._folder = folder
        self._is_up = threading.Event()
        self._error: BaseException | None = None
        self._token: trio.lowlevel.TrioToken
        self._scope = trio.CancelScope()

    def do(self, call: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:  # noqa: ANN401
        """Run something in the cluster's thread."""
        try:
            return trio.from_thread.run(call, *arguments, trio_token=self._token)
        except trio.RunFinishedError:
            raise RuntimeError("the cluster has ended") from self._error

    @contextmanager
    def running(self) -> Iterator[Portal]:
        """Run the cluster."""
        # Fork once here: the first fork waits for the template's imports, and kubelets must not
        # wait.
        forked.Popen([sys.executable, "-c", "pass"]).wait()
        # After an early interrupt it cannot be cancelled; the namespace then ends its processes.
        thread = threading.Thread(target=self._run, name="cluster", daemon=True)
        thread.start()
        self._is_up.wait()
        if self._error is not None:
            raise self._error
        try:
            yield self
        finally:
            self.do(self._cancel)
            thread.join()

    async def _cancel(self) -> None:
        self._scope.cancel()

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:  # noqa: BLE001 (shown by the tests' thread)
            self._error = error
        self._is_up.set()

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with control_plane(self._folder) as (api, kubeconfig), trio.open_nursery() as nursery:
            self.cluster = Cluster(api, self._folder, kubeconfig)
            with self._scope:
                async with trio.open_nursery() as inner:
                    await inner.start(self.cluster.run)
                    self._is_up.set()
            for kubelet in self.cluster.kubelets:
                kubelet.lose()
            nursery.cancel_scope.cancel()


def prepare_network(folder: Path) -> None:
    """Set up addresses and the cluster's resolv.conf in this network and mount namespace."""
    (folder / "resolv.conf").write_text(RESOLV_CONF)
    for command in (
        "ip link set lo up",
        "ip addr add 10.96.255.1/32 dev lo",
        f"mount --bind {folder / 'resolv.conf'} /etc/resolv.conf",
    ):
        subprocess.run(command.split(), check=True, timeout=30)

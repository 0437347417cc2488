"""Test helper: a kubelet that runs each container as a process on this machine.

For the pods of one node it expands the container's arguments, writes its volumes to folders, starts
`triolet …`, probes it, and honours preStop, SIGTERM and the grace period. Nothing is mounted: mount
paths in arguments, environment and settings are replaced by these folders.
"""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import httpx2
import trio

from tests import forked
from tests.end_to_end import paced

from .rendering import expanded

if TYPE_CHECKING:
    from pathlib import Path

    from .control_plane import Api, Json

POLL_S: Final = 0.25
HEARTBEAT_S: Final = 1.0
BACK_OFF_S: Final = 2.0
MIN_GRACE_S: Final = 2.0
"""Minimum grace after preStop, as in the real kubelet."""
MAX_MESSAGE: Final = 2048
READY_NODE: Final = {"type": "Ready", "status": "True", "reason": "KubeletReady"}


@dataclass
class Ignored:
    """What a broken kubelet would ignore; a proof must fail with each of these."""

    readiness: bool = False
    pre_stop: bool = False
    grace: bool = False


@dataclass
class Kubelet:
    """One node.

    Args:
      api: the API server.
      number: number of the node; its pods have addresses 10.244.number.m.
      folder: for volumes and logs.
      start_s: delay before a container's first instruction. It stands for imports, because the
        tests' processes are forked from one that has done these.

    Attributes:
      ignored: what this kubelet ignores.
      pods: by uid.
    """

    api: Api
    number: int
    folder: Path
    start_s: float
    ignored: Ignored = field(default_factory=Ignored)
    pods: dict[str, PodProcess] = field(default_factory=dict)
    _scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    _num_pods: int = 0

    @property
    def name(self) -> str:
        """The node's name."""
        return f"node-{self.number}"

    async def run(self) -> None:
        """Register the node and run its pods until the node is lost."""
        with self._scope:
            await self._register()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._report)
                while True:
                    await self._take_pods(nursery)
                    await trio.sleep(POLL_S)

    def lose(self) -> None:
        """Lose the node: kill its processes, and stop reporting."""
        self._scope.cancel()
        for pod in self.pods.values():
            pod.kill()

    async def _register(self) -> None:
        meta = {"name": self.name, "labels": {"kubernetes.io/hostname": self.name}}
        # Ready from the start, because a node that was once not ready may block the controller that
        # evicts pods from lost nodes.
        node = {"apiVersion": "v1", "kind": "Node", "metadata": meta, "status": self._status()}
        await self.api.apply(node)

    def _status(self) -> Json:
        capacity = {"cpu": "64", "memory": "256Gi", "pods": "110"}
        ready = {**READY_NODE, "lastHeartbeatTime": now()}
        return {"capacity": capacity, "allocatable": capacity, "conditions": [ready]}

    async def _report(self) -> None:
        """Report the node as ready, periodically."""
        while True:
            await self.api.patch(f"/api/v1/nodes/{self.name}/status", {"status": self._status()})
            await trio.sleep(HEARTBEAT_S)

    async def _take_pods(self, nursery: trio.Nursery) -> None:
        found = await self.api.get(f"/api/v1/pods?fieldSelector=spec.nodeName={self.name}")
        for one in found["items"]:
            uid, meta = one["metadata"]["uid"], one["metadata"]
            if uid not in self.pods:
                self._num_pods += 1
                address = f"10.244.{self.number}.{self._num_pods}"
                self.pods[uid] = PodProcess(self, one, address)
                nursery.start_soon(self.pods[uid].run)
            elif meta.get("deletionTimestamp"):
                self.pods[uid].grace_s = float(meta["deletionGracePeriodSeconds"])
                self.pods[uid].is_deleted.set()
        there = {one["metadata"]["uid"] for one in found["items"]}
        for uid in self.pods.keys() - there:
            self.pods.pop(uid).kill()


class PodProcess:
    """The only container of a pod.

    Args:
      kubelet: its node.
      pod: the pod object of the API server.
      address: the pod's address.

    Attributes:
      grace_s: the grace period of its deletion.
      is_deleted: event set when the pod is deleted.
      process: the running process, if there is one.
      log: file with its output.
    """

    def __init__(self, kubelet: Kubelet, pod: Json, address: str) -> None:
        self.grace_s = 0.0
        self.is_deleted = trio.Event()
        self.process: forked.Popen | None = None
        self._kubelet, self._meta, self._spec = kubelet, pod["metadata"], pod["spec"]
        [self._container] = self._spec["containers"]
        self._address = address
        self._path = f"/api/v1/namespaces/{self._meta['namespace']}/pods/{self._meta['name']}"
        self._folder = kubelet.folder / self._meta["name"]
        self.log = self._folder / "log"
        self._client = httpx2.AsyncClient(base_url=f"http://{address}")
        self._is_ready = self._is_started = False
        self._num_restarts = 0
        self._last: Json = {}
        self._ended = trio.Event()

    async def run(self) -> None:
        """Run the container, and restart it until the pod is deleted."""
        self._folder.mkdir()
        run_ip("addr", "add", f"{self._address}/32", "dev", "lo")
        places = await self._write_volumes()
        async with self._client, trio.open_nursery() as nursery:
            nursery.start_soon(self._repeat, places)
            await self.is_deleted.wait()
            await self._stop()
            nursery.cancel_scope.cancel()
        run_ip("addr", "del", f"{self._address}/32", "dev", "lo")
        await self._kubelet.api.call("DELETE", self._path, {"gracePeriodSeconds": 0})

    def kill(self) -> None:
        """Kill the process."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def _repeat(self, places: dict[str, str]) -> None:
        while not self.is_deleted.is_set():
            self._is_ready = self._kubelet.ignored.readiness
            self._is_started = False
            await self._tell({"running": {"startedAt": now()}})
            await trio.sleep(self._kubelet.start_s)
            self._start(places)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._probe)
                await self._exit()
                nursery.cancel_scope.cancel()
            if self.is_deleted.is_set():
                return
            self._num_restarts += 1
            self._is_ready = False
            await self._tell({"waiting": {"reason": "CrashLoopBackOff"}})
            await trio.sleep(BACK_OFF_S)

    def _start(self, places: dict[str, str]) -> None:
        values = {one["name"]: self._value(one) for one in self._container.get("env", ())}
        arguments = [elsewhere(expanded(text, values), places) for text in self._container["args"]]
        home = {"HOME": places["/data"], "XDG_DATA_HOME": places["/data"]}
        self._ended = trio.Event()
        with self.log.open("ab") as output:
            self.process = forked.Popen(
                [*paced.COMMAND, *arguments],
                cwd=places["/data"],
                env=os.environ | home | values,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    async def _exit(self) -> None:
        """Wait for the process to exit, and record the end of its output as Kubernetes does."""
        assert self.process is not None
        await trio.lowlevel.wait_readable(self.process.ended)
        code = self.process.wait()
        self._ended.set()
        words = self.log.read_text(errors="replace")[-MAX_MESSAGE:]
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "message": words}
        self._last = {"terminated": ended}

    async def _stop(self) -> None:
        """Stop the process: preStop, SIGTERM, and SIGKILL after the grace period."""
        ends_at = trio.current_time() + self.grace_s
        hook = self._container["lifecycle"]["preStop"]["exec"]["command"]
        if self.process is None:
            return
        if self._kubelet.ignored.grace:
            await self._kill()
            return
        if not self._kubelet.ignored.pre_stop:
            with trio.move_on_at(ends_at):
                await trio.run_process(hook)
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            left_s = max(ends_at - trio.current_time(), MIN_GRACE_S)
            with trio.move_on_after(left_s):
                await self._ended.wait()
            await self._kill()

    async def _kill(self) -> None:
        """Kill the process, and wait until its connections have closed."""
        self.kill()
        await self._ended.wait()

    async def _probe(self) -> None:
        startup = self._container["startupProbe"]
        if not await self._passes(startup, until=True):
            self.kill()
            return
        self._is_started = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._heed_liveness)
            while True:
                probe = self._container["readinessProbe"]
                self._is_ready = self._kubelet.ignored.readiness or await self._passes(
                    probe, until=True
                )
                await self._tell({"running": {"startedAt": now()}})
                if not self._kubelet.ignored.readiness:
                    await self._passes(probe, until=False)
                    self._is_ready = False
                    await self._tell({"running": {"startedAt": now()}})
                await trio.sleep(probe["periodSeconds"])

    async def _heed_liveness(self) -> None:
        await self._passes(self._container["livenessProbe"], until=False)
        self.kill()

    async def _passes(self, probe: Json, *, until: bool) -> bool:
        """Repeat a probe until it succeeds or reaches its failure threshold; return the last
        result."""
        failures = 0
        while True:
            is_ok = await self._ask(probe["httpGet"], probe.get("timeoutSeconds", 1))
            failures = 0 if is_ok else failures + 1
            if is_ok and until:
                return True
            if failures >= probe["failureThreshold"]:
                return False
            await trio.sleep(probe["periodSeconds"])

    async def _ask(self, get: Json, timeout_s: float) -> bool:
        ports = {one["name"]: one["containerPort"] for one in self._container["ports"]}
        url = f"http://{self._address}:{ports[get['port']]}{get['path']}"
        with suppress(httpx2.TransportError):
            return (await self._client.get(url, timeout=timeout_s)).is_success
        return False

    async def _tell(self, state: Json) -> None:
        """Report the pod's status."""
        ready = {True: "True", False: "False"}[self._is_ready]
        types = {"PodScheduled": "True", "Initialized": "True", "ContainersReady": ready}
        conditions = [{"type": t, "status": s} for t, s in (types | {"Ready": ready}).items()]
        own = {
            **{"name": self._container["name"], "image": "", "imageID": "", "state": state},
            **{"ready": self._is_ready, "started": self._is_started, "lastState": self._last},
            "restartCount": self._num_restarts,
        }
        ip = self._address
        status = {
            **{"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "startTime": now()},
            **{"conditions": conditions, "containerStatuses": [own]},
        }
        await self._kubelet.api.call("PATCH", f"{self._path}/status", {"status": status})

    def _value(self, variable: Json) -> str:
        source = variable.get("valueFrom", {})
        if field_ref := source.get("fieldRef"):
            known = {
                "metadata.name": self._meta["name"],
                "status.podIP": self._address,
                "spec.nodeName": self._kubelet.name,
            }
            return str(known[field_ref["fieldPath"]])
        if resource := source.get("resourceFieldRef"):
            part, _, kind = resource["resource"].partition(".")
            return str(self._container["resources"][part][kind])
        return str(variable.get("value", ""))

    async def _write_volumes(self) -> dict[str, str]:
        """Write each volume to a folder; return the folders by mount path."""
        folders = {one["name"]: self._folder / one["name"] for one in self._spec["volumes"]}
        mounts = self._container["volumeMounts"]
        places = {one["mountPath"]: str(folders[one["name"]]) for one in mounts}
        for volume in self._spec["volumes"]:
            (folder := folders[volume["name"]]).mkdir(mode=0o700)
            for name, content in (await self._content_of(volume)).items():
                text = elsewhere(content.decode(), places)
                (folder / name).write_text(text)
                (folder / name).chmod(0o400)
        return places

    async def _content_of(self, volume: Json) -> dict[str, bytes]:
        space = f"/api/v1/namespaces/{self._meta['namespace']}"
        if source := volume.get("configMap"):
            found = await self._kubelet.api.get(f"{space}/configmaps/{source['name']}")
            return {name: text.encode() for name, text in found["data"].items()}
        if source := volume.get("secret"):
            found = await self._kubelet.api.get(f"{space}/secrets/{source['secretName']}")
            return {name: base64.b64decode(text) for name, text in found["data"].items()}
        return {}


def elsewhere(text: str, places: dict[str, str]) -> str:
    """Replace mount paths by their folders."""
    paths = "|".join(map(re.escape, sorted(places, key=len, reverse=True)))
    return re.sub(rf"(?<![\w/.-])(?:{paths})(?![\w-])", lambda match: places[match[0]], text)


def now() -> str:
    """Return the current time in the API's format."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def run_ip(*arguments: str) -> None:
    """Change an address of this network namespace."""
    subprocess.run(["ip", *arguments], check=True, timeout=30)

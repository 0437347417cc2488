"""Test helper that runs a Ray cluster with one node for each zone, and a fleet on it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import httpx2
import psutil

from tests.end_to_end.fleet_process import wait_until
from tests.server.tenants.redis_server import running_redis
from transport.zmq_curve import make_keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.server.tenants.redis_server import RedisServer

ROOT: Final = Path(__file__).parents[3]
PATIENCE_S: Final = 120.0
CPUS: Final = 8
"""CPUs of each node; the tests' processes reserve half of one."""
STORE_BYTES: Final = 80 * 2**20
QUICK: Final = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "300",
    "RAY_health_check_timeout_ms": "700",
    "RAY_health_check_failure_threshold": "2",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""The settings of docs/operations/ray.md."""
LINE: Final = re.compile(r"(?P<role>\w+)(?: --zone (?P<zone>\w+))?: (?P<alive>\d+) of (?P<all>\d+)")


class RayFleet:
    """A fleet on a cluster whose nodes are processes of this machine.

    Args:
      folder: for keys, settings and the audit log.
      redis: where the workers register.
      zones: zones; one node is started for each.
      settings: further settings, as TOML by section.

    Attributes:
      cluster: the cluster.
      nodes: node of each zone.
    """

    def __init__(
        self,
        folder: Path,
        redis: RedisServer,
        zones: Sequence[str],
        settings: Mapping[str, Mapping[str, object]],
    ) -> None:
        from ray.cluster_utils import Cluster

        self.folder = folder
        make_keys(folder / "keys")
        (folder / "redis.url").write_text(redis.url)
        self._write(zones, settings)
        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self.cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self.nodes: dict[str, Any] = {}
        self._agents: list[psutil.Process] = []
        for zone in zones:
            self.add_node(zone)

    def _write(self, zones: Sequence[str], settings: Mapping[str, Mapping[str, object]]) -> None:
        links = {
            "curve_dir": str(self.folder / "keys"),
            "membership.redis.url": f"@{self.folder / 'redis.url'}",
        }
        memory = {"engine.kv_pool_bytes": "64MiB", "engine.dtype": "float32", "engine.threads": 1}
        sections: dict[str, dict[str, object]] = {
            "fleet": {"model": "demo"},
            "worker": links | memory,
            "server": links | {"port": 0, "scale.poll_s": 0.5},
            "link": {"peer_timeout_s": 6, "progress_timeout_s": 6, "lease_ttl_s": 8},
            "ray": {"zones": list(zones), "cpus": 0.5},
        }
        lines = []
        for section, fields in sections.items():
            lines.append(f"[{section}]")
            every = fields | dict(settings.get(section, {}))
            lines += [f"{name} = {json.dumps(value)}" for name, value in every.items()]
        (self.folder / "triolet.toml").write_text("\n".join(lines))

    def add_node(self, zone: str) -> None:
        """Start the node of a zone."""
        resources = {"num_cpus": CPUS, "object_store_memory": STORE_BYTES}
        self.nodes[zone] = self.cluster.add_node(**resources, labels={"zone": zone})

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command of `triolet` on this cluster."""
        settings = () if "--config" in words else ("--config", str(self.folder / "triolet.toml"))
        log = () if "status" in words else ("--audit", str(self.folder / "audit"))
        command = [sys.executable, "-m", "tests.end_to_end.ray.paced_fleet"]
        return subprocess.Popen(
            [*command, *words, *settings, *log],
            cwd=ROOT,
            env={**os.environ, "RAY_ADDRESS": self.cluster.address},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, code: int = 0) -> str:
        """Run a command of `triolet`; return its output, or its error if it must fail."""
        process = self.start(*words)
        output, error = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == code, output + error
        return error if code else output

    def status(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return alive and desired numbers by role and zone."""
        output = self.run("fleet", "status", "--on", "ray")
        return {
            (one["role"], one["zone"] or ""): (int(one["alive"]), int(one["all"]))
            for one in LINE.finditer(output)
        }

    def url(self, zone: str) -> str:
        """Return the address of a zone's server."""
        output = self.run("fleet", "status", "--on", "ray")
        found = re.search(rf"server --zone {zone}: .*\n\s+(http\S+)", output)
        assert found is not None, output
        return found[1]

    def workers(self, url: str) -> dict[str, dict[str, str]]:
        """Return the labels of the workers that a server uses, by name."""
        with suppress(httpx2.TransportError):
            found = httpx2.get(f"{url}/fleet/status", timeout=PATIENCE_S).json()["workers"]
            return {one["name"]: one["labels"] for one in found if one["state"] == "alive"}
        return {}

    def wait_for_workers(self, url: str, names: set[str]) -> None:
        """Wait until a server uses exactly these workers."""
        wait_until(
            lambda: self.workers(url).keys() == names,
            PATIENCE_S,
            f"the workers are {sorted(names)}",
        )

    def kill_raylet(self, zone: str) -> None:
        """Kill a node's raylet, and nothing else."""
        self._kill(self.nodes[zone], "raylet")

    def kill_head(self) -> None:
        """Kill Ray's control service and the raylet of its node."""
        for name in ("gcs_server", "raylet"):
            self._kill(self.cluster.head_node, name)

    def kill_zone(self, zone: str) -> None:
        """Kill all processes of a node at once."""
        for process in self.processes(zone):
            process.kill()
        self.kill_raylet(zone)

    def processes(self, zone: str) -> list[psutil.Process]:
        """Return the actors of a node and what they started."""
        [info] = self.nodes[zone].all_processes["raylet"]
        own = [one for one in psutil.process_iter() if raylet_of(one) == info.process.pid]
        # What a template has forked shows its title in place of its environment.
        return list({*own, *(child for one in own for child in one.children(recursive=True))})

    def _kill(self, node: Any, name: str) -> None:  # noqa: ANN401 (Ray's)
        [info] = node.all_processes[name]
        # Agents of a killed raylet live on.
        self._agents += psutil.Process(info.process.pid).children() if name == "raylet" else []
        info.process.send_signal(signal.SIGKILL)
        info.process.wait()

    def stop(self) -> None:
        """Kill the cluster and everything on it."""
        mine = {
            info.process.pid
            for node in (self.cluster.head_node, *self.nodes.values())
            for info in node.all_processes.get("raylet", ())
        }
        left = [one for one in psutil.process_iter() if raylet_of(one) in mine]
        self.cluster.shutdown()
        for process in (*left, *self._agents):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def raylet_of(process: psutil.Process) -> int | None:
    """Return the process id of the raylet of the node on which an actor started this process."""
    with suppress(psutil.Error, KeyError):
        if process.status() != psutil.STATUS_ZOMBIE:
            return int(process.environ()["RAY_RAYLET_PID"])
    return None


@contextmanager
def ray_fleet(
    folder: Path, zones: Sequence[str], **settings: Mapping[str, object]
) -> Iterator[RayFleet]:
    """Run a cluster, and leave no process behind."""
    before = {name: os.environ.get(name) for name in (*QUICK, "PYTHONPATH", "RAY_TMPDIR")}
    os.environ |= QUICK | {"PYTHONPATH": str(ROOT)}
    try:
        # Short: paths of Ray's sockets are below it.
        with TemporaryDirectory(prefix="ray-") as place, running_redis(folder) as redis:
            os.environ["RAY_TMPDIR"] = place
            fleet = RayFleet(folder, redis, zones, settings)
            try:
                yield fleet
            finally:
                fleet.stop()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

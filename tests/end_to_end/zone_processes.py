"""Test helper that starts zones: each has a server, a prefill and a decode worker of the demo model
as separate processes. All servers know all workers."""

from __future__ import annotations

import signal
import subprocess
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import httpx2

from ops.models.model_directory import demo_model_path
from ops.ports import bind_port
from tests import forked

from .fleet_process import START_TIMEOUT_S, STOP_TIMEOUT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path


class Zones:
    """The processes of all zones.

    Args:
      folder: for sockets, logs and files.
      hosts: loopback addresses of the servers, by zone.
      settings: settings of all processes.
      of_servers: returns further settings of a zone's server.
      of_workers: further settings of workers.
      command: command that runs `triolet`.

    Attributes:
      urls: URLs of the servers, by zone.
      processes: decode worker, prefill worker and server, by zone.
    """

    def __init__(
        self,
        folder: Path,
        hosts: Mapping[str, str],
        settings: Mapping[str, object],
        of_servers: Callable[[str, str], Mapping[str, object]],
        of_workers: Mapping[str, object],
        command: Sequence[str] = (forked.TRIOLET,),
    ) -> None:
        self.folder = folder
        self._command = command
        self._settings = settings
        self.ports = {zone: bind_port(host, 0) for zone, host in hosts.items()}
        self.urls = {
            zone: f"http://{hosts[zone]}:{port.getsockname()[1]}"
            for zone, port in self.ports.items()
        }
        self.processes: dict[str, list[forked.Popen]] = {zone: [] for zone in hosts}
        self._hosts = hosts
        self._of_servers = of_servers
        self._of_workers = of_workers

    def start(self) -> None:
        """Start all processes."""
        for zone, host in self._hosts.items():
            (self.folder / zone).mkdir(mode=0o700)
            kv = {"decode.kv_address": f"{self._address('d', zone)}.kv"}
            self._start(zone, "decode", self._worker("d", zone) | kv)
            self._start(zone, "prefill", self._worker("p", zone))
            server = {
                "server.zone": zone,
                "server.host": host,
                "server.port": self.ports[zone].getsockname()[1],
                "server.decode_addresses": self._addresses("d"),
                "server.prefill_addresses": self._addresses("p"),
            }
            self._start(zone, "server", server | dict(self._of_servers(zone, self.urls[zone])))

    def _address(self, role: str, zone: str) -> str:
        return f"ipc://{self.folder}/{role}-{zone}"

    def _addresses(self, role: str) -> str:
        return ",".join(self._address(role, zone) for zone in self.ports)

    def _worker(self, role: str, zone: str) -> dict[str, object]:
        return {
            "worker.name": f"{role}-{zone}",
            "worker.control_address": self._address(role, zone),
            "worker.labels.zone": zone,
            **self._of_workers,
        }

    def _start(self, zone: str, role: str, own: Mapping[str, object]) -> None:
        command = [*self._command, role, str(demo_model_path())]
        for name, value in (*own.items(), *self._settings.items()):
            command += ["--set", f"{name}={value}"]
        with (self.folder / zone / f"{role}.log").open("wb") as log:
            self.processes[zone].append(
                forked.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    cwd=self.folder / zone,
                )
            )

    def send(self, zone: str, number: signal.Signals) -> None:
        """Send a signal to all processes of a zone at once."""
        for process in self.processes[zone]:
            process.send_signal(number)

    def files(self, zone: str) -> list[bytes]:
        """Return the contents of all files of a zone."""
        return [path.read_bytes() for path in (self.folder / zone).rglob("*") if path.is_file()]

    def is_ready(self, zone: str) -> bool:
        """Return whether a zone's server accepts requests; fail if a process has ended."""
        dead = [p.args for p in self.processes[zone] if p.poll() is not None]
        logs = b"".join(self.files(zone)).decode(errors="replace")[-4000:]
        assert not dead, f"{dead} ended: {logs}"
        with suppress(httpx2.TransportError):
            return httpx2.get(f"{self.urls[zone]}/health/ready").status_code == 200
        return False

    def stop(self) -> None:
        """Kill all processes."""
        for zone in self.ports:
            self.send(zone, signal.SIGKILL)
        for process in [process for own in self.processes.values() for process in own]:
            process.wait(STOP_TIMEOUT_S)
        for port in self.ports.values():
            port.close()


@contextmanager
def started(zones: Zones) -> Iterator[Zones]:
    """Start all zones and wait until they are ready; stop them at the end."""
    try:
        zones.start()
        for zone in zones.ports:
            wait_until(lambda zone=zone: zones.is_ready(zone), START_TIMEOUT_S, f"{zone} is ready")
        yield zones
    finally:
        zones.stop()

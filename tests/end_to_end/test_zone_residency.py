"""Two zones with real processes: a canary text of a tenant that is bound to one zone is in no
process memory and no file of the other."""

from __future__ import annotations

import re
import secrets
import signal
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest

from ops.models.model_directory import demo_model_path
from ops.ports import bind_port
from tests import forked

from .fleet_process import PATIENCE_S, START_TIMEOUT_S, STOP_TIMEOUT_S, wait_until
from .tenants import headers_of, write_tenants

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

ZONES = ("eu", "us")
NUM_ROWS = 2
NUM_AT_ONCE = 12
"""Far more than the rows of a zone: without its zones some of them would go elsewhere."""
LIGHT = (
    *("--set", "worker.engine.dtype=float32"),
    *("--set", "worker.engine.kv_pool_bytes=64MiB"),
    *("--set", f"worker.engine.max_num_seqs={NUM_ROWS}"),
)
LINK = (
    *("--set", "link.peer_timeout_s=6", "--set", "link.progress_timeout_s=6"),
    *("--set", "link.lease_ttl_s=8"),
)
WRITABLE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw")
PIECE_BYTES = 1 << 24


def children_of(pid: int) -> Iterator[int]:
    """Yield a process and all of its descendants."""
    yield pid
    with suppress(FileNotFoundError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from children_of(int(child))


def is_in_memory(pid: int, needles: list[bytes]) -> bool:
    """Return whether one of these byte strings is in a process's writable memory."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in maps:
            if (region := WRITABLE.match(line)) is None:
                continue
            begin, end = (int(bound, 16) for bound in region.groups())
            kept = b""
            for at in range(begin, end, PIECE_BYTES):
                try:
                    memory.seek(at)
                    piece = kept + memory.read(min(PIECE_BYTES, end - at))
                except (OSError, OverflowError):
                    break  # a device's, or gone
                if any(needle in piece for needle in needles):
                    return True
                kept = piece[-1024:]
    return False


class Zones:
    """A server, a prefill and a decode worker in each of two zones; both servers know all workers.

    Attributes:
      urls: of the servers, by zone.
      processes: by zone.
    """

    def __init__(self, folder: Path, tenants: Path) -> None:
        self.folder = folder
        self.ports = {zone: bind_port("127.0.0.1", 0) for zone in ZONES}
        self.urls = {
            zone: f"http://127.0.0.1:{port.getsockname()[1]}" for zone, port in self.ports.items()
        }
        self.processes: dict[str, list[forked.Popen]] = {zone: [] for zone in ZONES}
        for zone in ZONES:
            (folder / zone).mkdir(mode=0o700)
            label = ("--set", f"worker.labels.zone={zone}")
            address = self.address("d", zone)
            self.start(
                zone, "decode", *label, *self.named("d", zone), f"decode.kv_address={address}.kv"
            )
            self.start(zone, "prefill", *label, *self.named("p", zone)[:-1])
            self.start(
                zone,
                "server",
                *("--set", f"server.zone={zone}"),
                *("--set", f"server.tenants.file={tenants}"),
                *("--set", f"server.batches.directory={folder / zone / 'jobs'}"),
                *("--set", f"server.port={self.ports[zone].getsockname()[1]}"),
                *("--set", f"server.decode_addresses={self.addresses('d')}"),
                *("--set", f"server.prefill_addresses={self.addresses('p')}"),
                *("--set", f"server.stall_timeout_s={PATIENCE_S}"),
            )

    def address(self, role: str, zone: str) -> str:
        return f"ipc://{self.folder}/{role}-{zone}"

    def addresses(self, role: str) -> str:
        return ",".join(self.address(role, zone) for zone in ZONES)

    def named(self, role: str, zone: str) -> tuple[str, ...]:
        address = f"worker.control_address={self.address(role, zone)}"
        return ("--set", f"worker.name={role}-{zone}", "--set", address, "--set")

    def start(self, zone: str, role: str, *options: str) -> None:
        command = [forked.TRIOLET, role, str(demo_model_path()), *options, *LINK]
        command += () if role == "server" else LIGHT
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

    def pids(self, zone: str) -> list[int]:
        """Return the processes of a zone, including those of servers that read texts."""
        return [pid for process in self.processes[zone] for pid in children_of(process.pid)]

    def files(self, zone: str) -> list[bytes]:
        """Return the contents of all files of a zone."""
        return [path.read_bytes() for path in (self.folder / zone).rglob("*") if path.is_file()]


@contextmanager
def running_zones(folder: Path, tenants: Path) -> Iterator[Zones]:
    zones = Zones(folder, tenants)
    try:
        for zone, url in zones.urls.items():

            def is_ready(zone: str = zone, url: str = url) -> bool:
                dead = [p.args for p in zones.processes[zone] if p.poll() is not None]
                logs = b"".join(zones.files(zone)).decode(errors="replace")[-4000:]
                assert not dead, f"{dead} ended: {logs}"
                with suppress(httpx2.TransportError):
                    return httpx2.get(f"{url}/health/ready").status_code == 200
                return False

            wait_until(is_ready, START_TIMEOUT_S, f"{zone} is ready")
        yield zones
    finally:
        running = [process for of_zone in zones.processes.values() for process in of_zone]
        for process in running:
            process.send_signal(signal.SIGKILL)
        for process in running:
            process.wait(STOP_TIMEOUT_S)
        for port in zones.ports.values():
            port.close()


def ask_once(client: httpx2.Client, question: dict[str, object], url: str, tenant: str) -> int:
    """Ask for a completion; return the status. Free tenants do not send the canary."""
    more = {} if tenant == "bound" else {"prompt": "once upon a time"}
    answer = client.post(f"{url}/v1/completions", json=question | more, headers=headers_of(tenant))
    return answer.status_code


def test_a_canary_is_in_no_memory_and_no_file_of_another_zone(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("z")
    tenants = write_tenants(folder / "tenants.toml", {"bound": 'zones = ["eu"]', "free": ""})
    canary = " ".join(f"canary{secrets.token_hex(8)}" for _ in range(4))
    with running_zones(folder, tenants) as zones, httpx2.Client(timeout=PATIENCE_S) as client:
        eu, us, bound = zones.urls["eu"], zones.urls["us"], headers_of("bound")
        refused = client.post(f"{us}/v1/completions", json={"prompt": "harmless"}, headers=bound)
        assert (refused.status_code, refused.json()["error"]["code"]) == (421, "wrong_zone")

        answer = client.post(f"{eu}/tokenize", json={"prompt": canary}, headers=bound)
        ids = answer.raise_for_status().json()["tokens"][2:-2]
        tokens = [struct.pack(f"<{len(ids)}{size}", *ids) for size in "Iq"]
        needles = [canary.encode(), *tokens]
        upload = {"file": ("lines.jsonl", canary.encode()), "purpose": (None, "batch")}
        client.post(f"{eu}/v1/files", files=upload, headers=bound).raise_for_status()
        question = {"prompt": canary, "max_tokens": 64, "ignore_eos": True}
        ask = partial(ask_once, client, question)
        with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
            asked = [threads.submit(ask, eu, "bound") for _ in range(NUM_AT_ONCE)]
            asked += [threads.submit(ask, url, "free") for url in (eu, us) for _ in range(4)]
        assert [one.result() for one in asked] == [200] * len(asked)

        endless = question | {"max_tokens": 700, "stream": True}
        with client.stream("POST", f"{eu}/v1/completions", json=endless, headers=bound) as stream:
            next(stream.iter_lines())
            own = {pid: is_in_memory(pid, needles) for pid in zones.pids("eu")}
            decode, prefill, server = (process.pid for process in zones.processes["eu"])
            assert own[server], "the search finds what is there"
            assert own[decode] or own[prefill], "and also tokens"
            assert [pid for pid in zones.pids("us") if is_in_memory(pid, needles)] == []
    assert any(canary.encode() in content for content in zones.files("eu")), "the uploaded file"
    assert not any(needle in content for content in zones.files("us") for needle in needles)

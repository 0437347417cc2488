"""Tests data residency with real processes in two zones: a canary text of a tenant bound to one
zone never appears in the other zone's process memory or files."""

from __future__ import annotations

import re
import secrets
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest

from .fleet_process import PATIENCE_S
from .tenants import headers_of, write_tenants
from .zone_processes import Zones, started

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

ZONES = dict.fromkeys(("eu", "us"), "127.0.0.1")
NUM_ROWS = 2
NUM_AT_ONCE = 12
"""Far more requests than a zone has rows, so that without the restriction some would go
elsewhere."""
WORKERS = {
    "worker.engine.dtype": "float32",
    "worker.engine.kv_pool_bytes": "64MiB",
    "worker.engine.max_num_seqs": NUM_ROWS,
}
LINK = {
    "link.peer_timeout_s": 6,
    "link.progress_timeout_s": 6,
    "link.lease_ttl_s": 8,
}
WRITABLE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw")
PIECE_BYTES = 1 << 24


def children_of(pid: int) -> Iterator[int]:
    """Yield a process and all of its descendants."""
    yield pid
    with suppress(FileNotFoundError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from children_of(int(child))


def pids(zones: Zones, zone: str) -> list[int]:
    """Return the processes of a zone, including servers' text processes."""
    return [pid for process in zones.processes[zone] for pid in children_of(process.pid)]


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
                    break  # memory of a device, or gone
                if any(needle in piece for needle in needles):
                    return True
                kept = piece[-1024:]
    return False


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

    def of_server(zone: str, url: str) -> dict[str, object]:
        del url
        return {
            "server.tenants.file": tenants,
            "server.batches.directory": folder / zone / "jobs",
            "server.stall_timeout_s": PATIENCE_S,
        }

    started_zones = started(Zones(folder, ZONES, LINK, of_server, WORKERS))
    with started_zones as zones, httpx2.Client(timeout=PATIENCE_S) as client:
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
            own = {pid: is_in_memory(pid, needles) for pid in pids(zones, "eu")}
            decode, prefill, server = (process.pid for process in zones.processes["eu"])
            assert own[server], "the search finds what is there"
            assert own[decode] or own[prefill], "and also tokens"
            assert [pid for pid in pids(zones, "us") if is_in_memory(pid, needles)] == []
    assert any(canary.encode() in content for content in zones.files("eu")), "the uploaded file"
    assert not any(needle in content for content in zones.files("us") for needle in needles)

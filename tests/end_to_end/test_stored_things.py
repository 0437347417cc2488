"""Tests of files that a fleet writes: other users cannot read them, and a full disk causes no
repeated computing.

The fleet has all features that write files, and starts with a permissive umask.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from ops.private_directory import PREFIX

from .fleet_process import PATIENCE_S, FleetProcess, wait_until
from .tenants import NAMED, OPERATOR, headers_of, key_of, usage_of, write_tenants

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow
TENANT = "alice"
NUM_LINES = 60


class Place(NamedTuple):
    """A fleet and its directories.

    Attributes:
      fleet: the fleet.
      state: directory of persistent files.
      runtime: directory of its sockets.
    """

    fleet: FleetProcess
    state: Path
    runtime: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Start a fleet with umask 0."""
    top = tmp_path_factory.mktemp("stored")
    state = top / "state"
    state.mkdir(mode=0o700)
    tenants = write_tenants(state / "tenants.toml", {TENANT: ""})
    options = ("--tenants", str(tenants), "--batch-dir", str(state / "new" / "jobs"), *NAMED)
    with (
        TemporaryDirectory(prefix="t-", dir="/tmp") as runtime,  # its sockets need a short path
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", runtime)
        patch.setenv("XDG_RUNTIME_DIR", runtime)
        before = os.umask(0)
        try:
            fleet = FleetProcess(top / "log", *options, key=key_of(OPERATOR))
        finally:
            os.umask(before)
        try:
            fleet.wait_ready()
            yield Place(fleet, state, Path(runtime))
            fleet.wait_at_rest()
        finally:
            fleet.stop()


def modes_below(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield all files with the permissions of other users; links have none of their own."""
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        if not stat.S_ISLNK(status.st_mode):
            yield path, stat.S_IMODE(status.st_mode)


def open_files(pid: int) -> Iterator[tuple[Path, int]]:
    """Yield the regular files that a process may write, with their modes."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            status, flags = link.stat(), Path(f"/proc/{pid}/fdinfo/{link.name}").read_text()
            target = link.readlink()
        except FileNotFoundError:
            continue  # closed in the meantime
        access = int(flags.split("flags:")[1].split()[0], 8) & os.O_ACCMODE
        if stat.S_ISREG(status.st_mode) and access != os.O_RDONLY:
            yield target, stat.S_IMODE(status.st_mode)


def begin_batch(fleet: FleetProcess, num_lines: int) -> str:
    """Upload lines of a tenant and start a batch; return its URL."""
    lines = [
        json.dumps(
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": f"Once {number}", "max_tokens": 2, "ignore_eos": True},
            }
        )
        for number in range(num_lines)
    ]
    headers = headers_of(TENANT)
    upload = {"file": ("in.jsonl", "\n".join(lines).encode())}
    stored = fleet.client.post(
        "/v1/files", files=upload, data={"purpose": "batch"}, headers=headers
    ).raise_for_status()
    batch = fleet.client.post(
        "/v1/batches",
        json={
            "input_file_id": stored.json()["id"],
            "endpoint": "/v1/completions",
            "completion_window": "1h",
        },
        headers=headers,
    ).raise_for_status()
    return f"/v1/batches/{batch.json()['id']}"


def wait_for(fleet: FleetProcess, batch: str, what: str) -> dict[str, Any]:
    """Wait until a batch is completed, or paused; return it."""
    shown: dict[str, Any] = {}

    def is_so() -> bool:
        shown.update(fleet.client.get(batch, headers=headers_of(TENANT)).json())
        return bool(shown["errors"]) if what == "paused" else shown["status"] == what

    wait_until(is_so, PATIENCE_S, f"the batch is {what}")
    return shown


def charged(fleet: FleetProcess) -> int:
    """Return the tokens charged to the tenant this month."""
    tokens: int = usage_of(fleet, TENANT)["this_month"]["tokens"]
    return tokens


def test_no_file_of_a_fleet_is_for_others(place: Place) -> None:
    fleet, state, runtime = place
    wait_for(fleet, begin_batch(fleet, 1), "completed")
    named = {path.name for path, _ in modes_below(state)}
    assert {"jobs", "batches.sqlite3", "batches.sqlite3-wal"} <= named
    assert "tenants.toml.spend.sqlite3" in named
    (sockets,) = runtime.glob(f"{PREFIX}*")
    assert any(path.is_socket() for path in sockets.iterdir())
    roles = [pid for role in ("server", "prefill", "decode") for pid in fleet.pids(role)]
    assert len(roles) == 3
    found = [*modes_below(state), *modes_below(runtime)]
    for pid in (fleet.process.pid, *roles):
        found += [one for one in open_files(pid) if one[0] != fleet.log_path]
    assert sorted({(str(path), oct(mode)) for path, mode in found if mode & 0o077}) == []


def test_a_disk_that_fills_up_under_a_batch_charges_no_line_twice(place: Place) -> None:
    fleet, state, _ = place
    before = charged(fleet)
    (server,), (decode,) = fleet.pids("server"), fleet.pids("decode")
    limits = resource.prlimit(server, resource.RLIMIT_FSIZE)
    journal = state / "new" / "jobs" / "batches.sqlite3-wal"
    os.kill(decode, signal.SIGSTOP)  # no line ends before the disk is full
    try:
        batch = begin_batch(fleet, NUM_LINES)
        resource.prlimit(server, resource.RLIMIT_FSIZE, (journal.stat().st_size, limits[1]))
    finally:
        os.kill(decode, signal.SIGCONT)
    paused = wait_for(fleet, batch, "paused")
    assert paused["status"] in ("validating", "in_progress")
    assert paused["errors"]["data"][0]["code"] == "batches_paused"
    resource.prlimit(server, resource.RLIMIT_FSIZE, limits)
    done = wait_for(fleet, batch, "completed")
    assert done["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    content = fleet.client.get(
        f"/v1/files/{done['output_file_id']}/content", headers=headers_of(TENANT)
    ).text
    results = [json.loads(line)["response"]["body"] for line in content.splitlines()]
    used = sum(result["usage"]["total_tokens"] for result in results)
    wait_until(lambda: charged(fleet) - before >= used, PATIENCE_S, "everything is charged")
    fleet.wait_at_rest()
    assert charged(fleet) - before == used

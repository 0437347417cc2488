"""A fleet with everything on that stores anything, started where new files get all rights."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from ops.private_directory import PREFIX

from .fleet_process import PATIENCE_S, wait_until
from .tenants import NAMED, OPERATOR, headers_of, key_of, write_tenants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .fleet_process import FleetProcess

pytestmark = pytest.mark.slow
TENANT = "alice"


def modes_below(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield all there is and what others may do with it; links have no rights of their own."""
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        if not stat.S_ISLNK(status.st_mode):
            yield path, stat.S_IMODE(status.st_mode)


def open_files(pid: int) -> Iterator[tuple[Path, int]]:
    """Yield the regular files that a process may write, and their rights."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            status, flags = link.stat(), Path(f"/proc/{pid}/fdinfo/{link.name}").read_text()
            target = link.readlink()
        except FileNotFoundError:
            continue  # closed meanwhile
        access = int(flags.split("flags:")[1].split()[0], 8) & os.O_ACCMODE
        if stat.S_ISREG(status.st_mode) and access != os.O_RDONLY:
            yield target, stat.S_IMODE(status.st_mode)


def run_a_batch(fleet: FleetProcess) -> None:
    """Let a tenant store a file and results, and be charged for them."""
    line = {
        "custom_id": "one",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "Once", "max_tokens": 2},
    }
    headers = headers_of(TENANT)
    upload = {"file": ("in.jsonl", json.dumps(line).encode())}
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
    url = f"/v1/batches/{batch.json()['id']}"

    def has_ended() -> bool:
        return fleet.client.get(url, headers=headers).json()["status"] == "completed"

    wait_until(has_ended, PATIENCE_S, "the batch ends")


def test_no_file_of_a_fleet_is_for_others(
    start_fleet: Callable[..., FleetProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    tenants = write_tenants(state / "tenants.toml", {TENANT: ""})
    with TemporaryDirectory(prefix="t-", dir="/tmp") as runtime:  # its sockets need a short path
        monkeypatch.setenv("TMPDIR", runtime)
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        before = os.umask(0)
        try:
            fleet = start_fleet(
                *("--tenants", str(tenants), "--batch-dir", str(state / "new" / "jobs"), *NAMED),
                key=key_of(OPERATOR),
            )
        finally:
            os.umask(before)
        run_a_batch(fleet)
        named = {path.name for path, _ in modes_below(state)}
        assert {"jobs", "batches.sqlite3", "batches.sqlite3-wal"} <= named
        assert "tenants.toml.spend.sqlite3" in named
        (sockets,) = Path(runtime).glob(f"{PREFIX}*")
        assert any(path.is_socket() for path in sockets.iterdir())
        pids = [fleet.process.pid, *(p for r in ("server", "prefill", "decode") for p in fleet.pids(r))]
        assert len(pids) == 4
        found = [*modes_below(state), *modes_below(Path(runtime))]
        found += [one for pid in pids for one in open_files(pid) if one[0] != fleet.log_path]
        wide = sorted({(str(path), oct(mode)) for path, mode in found if mode & 0o077})
        fleet.stop()
        wide += [(str(path), oct(mode)) for path, mode in modes_below(state) if mode & 0o077]
    assert wide == []

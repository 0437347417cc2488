"""Tests of the systemd unit, and of what `triolet serve` reports to a service manager."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
import structlog
import trio

from ops.supervisor.serve import NOTIFY_VARIABLE, READY, run_fleet, tell_service_manager
from ops.supervisor.supervisor import Supervisor
from tests.house.test_layout import ROOT
from tests.ops.recording import Recorder, spec
from triolet.config import SupervisorConfig

from .command_lines import read_text, server_config
from .test_container import longest_stop_s

if TYPE_CHECKING:
    from collections.abc import Iterator

UNIT: Final = ROOT / "ops" / "deploy" / "triolet.service"
TEXT: Final = UNIT.read_text(encoding="utf-8").replace("\\\n", " ")
INSTALLED: Final = "/opt/triolet/bin/triolet"
TIMEOUT_S: Final = 60.0


def setting(name: str) -> str:
    """Return the single value of a setting."""
    (value,) = (
        line.removeprefix(f"{name}=") for line in TEXT.splitlines() if line.startswith(f"{name}=")
    )
    return value


@pytest.mark.slow
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    copy = tmp_path / UNIT.name
    installed = str(Path(sys.executable).with_name("triolet"))
    copy.write_text(UNIT.read_text(encoding="utf-8").replace(INSTALLED, installed))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_its_commands_are_real_ones_without_a_secret() -> None:
    arguments = setting("ExecStart").split()[1:]
    config = server_config(arguments)
    assert config.host == "127.0.0.1"
    state = Path("/var/lib") / setting("StateDirectory")
    for written in (config.tenants.file, config.batches.directory):
        assert written is not None
        assert Path(written).is_relative_to(state)
    assert setting("ReadWritePaths") == setting("WorkingDirectory") == str(state)
    command, _ = read_text(setting("ExecReload"))
    assert command == "restart"
    assert "://" not in " ".join(arguments), "an address may contain a password"


@pytest.mark.parametrize("page", ["ops/deploy/triolet.service", "docs/install.md"])
def test_what_keeps_a_gpu_away_is_named(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").replace("`", "").split())
    assert "remove PrivateDevices and ProtectClock" in text
    assert setting("PrivateDevices") == setting("ProtectClock") == "true"


def test_it_waits_as_long_as_the_fleet_may_take() -> None:
    config = server_config(setting("ExecStart").split()[1:])
    assert float(setting("TimeoutStopSec")) > longest_stop_s(config)
    assert setting("KillMode") == "mixed", "the supervisor stops the others cleanly"
    assert setting("RestartPreventExitStatus") == "2"


def test_commands_find_the_fleet_where_it_runs() -> None:
    environment = dict(pair.split("=", 1) for pair in setting("Environment").split())
    assert environment["XDG_RUNTIME_DIR"] == f"/run/{setting('RuntimeDirectory')}"
    assert setting("RuntimeDirectoryMode") == "0700"


@contextmanager
def service_manager(path: Path | str) -> Iterator[socket.socket]:
    """Listen like a service manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(TIMEOUT_S)
        yield manager


@pytest.mark.parametrize("is_abstract", [False, True])
def test_states_come_in_one_datagram(
    is_abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_abstract and sys.platform != "linux":
        pytest.skip("abstract socket names need Linux")
    name = f"triolet-test-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    with service_manager(f"\0{name}" if is_abstract else name) as manager:
        monkeypatch.setenv(NOTIFY_VARIABLE, f"@{name}" if is_abstract else name)
        tell_service_manager(READY, "STATUS=here")
        assert manager.recv(100) == b"READY=1\nSTATUS=here"


def test_a_service_manager_that_is_not_there_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NOTIFY_VARIABLE, str(tmp_path / "nobody"))
    with structlog.testing.capture_logs() as lines:
        tell_service_manager(READY)
        monkeypatch.delenv(NOTIFY_VARIABLE)
        tell_service_manager(READY)
    (line,) = lines
    assert (line["event"], line["log_level"]) == ("notify_failed", "warning")


class Stopping(Recorder):
    """A view that stops the fleet once it serves."""

    supervisor: Supervisor | None = None

    def __enter__(self) -> Stopping:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def serving(self, url: str) -> None:
        assert url
        assert self.supervisor is not None
        self.supervisor.stop()

    async def run(self) -> None:
        pass


async def answer_ready(stream: trio.SocketStream) -> None:
    async with stream:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")


@pytest.mark.slow
async def test_a_fleet_says_when_requests_are_taken_and_when_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = Stopping()
    config = SupervisorConfig()
    supervisor = Supervisor([spec("server-0", tmp_path / "journal")], config, 5.0, view)
    view.supervisor = supervisor
    with service_manager(tmp_path / "notify") as manager:
        monkeypatch.setenv(NOTIFY_VARIABLE, str(tmp_path / "notify"))
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(trio.serve_tcp, answer_ready, 0)
            port = listeners[0].socket.getsockname()[1]
            with trio.fail_after(TIMEOUT_S):
                assert await run_fleet(supervisor, config, f"http://127.0.0.1:{port}", view) is None
            nursery.cancel_scope.cancel()
        said = [manager.recv(200).decode().splitlines()[0] for _ in range(2)]
    assert said == ["READY=1", "STOPPING=1"]

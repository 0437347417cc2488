"""Tests of the server process as operators see it: start, signals, exit and start errors. Without
workers; tests/end_to_end has them."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from server.edge.listen import open_listening_socket
from server.main import EXIT_FORCED
from tests import forked
from tests.server.support.surface import CONFIG
from triolet.config import ServerConfig
from triolet.errors import ConfigError
from triolet.status import ServerReady, parse_report

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "triolet" / "demo"
START = """
import sys
from server.main import main
from triolet.config import ServerConfig
main(ServerConfig(model_dir=sys.argv[1], model_name="demo", port=int(sys.argv[3]),
    prefill_addresses=(f"ipc://{sys.argv[2]}/p",), decode_addresses=(f"ipc://{sys.argv[2]}/d",),
    drain_timeout_s=0.3, exit_grace_s=float(sys.argv[4]), worker_wait_s=30.0))
"""
PATIENCE_S = 60.0
"""Timeout for a clean exit. The process's own watchdog waits longer, so it cannot hide a failure,
except in the tests of the watchdog."""
SHORT_GRACE_S = 1.0


WEDGED = """
import time
from server.edge.listen import Edge
Edge.stop = lambda self, within_s: time.sleep(60)
"""
SLOW_DRAIN = """
import trio
from server.scheduling.links import Links
Links.drain = lambda self: trio.sleep(60)
"""
BURST = 300
MOST_FILES = 64
FEW_FILES = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({MOST_FILES}, {MOST_FILES}))
"""


def start(
    directory: Path,
    model: Path = DEMO,
    port: int = 0,
    fault: str = "",
    exit_grace_s: float = 2 * PATIENCE_S,
) -> subprocess.Popen[bytes]:
    """Start the process; `fault` is code that runs first and breaks something."""
    directory.chmod(0o700)
    options = [str(model), str(directory), str(port), str(exit_grace_s)]
    return forked.Popen(
        [sys.executable, "-c", fault + START, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def ready_url(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    # Its log goes there too; on a busy machine it may contain warnings before it is ready.
    for line in process.stdout:
        if isinstance(report := parse_report(line), ServerReady):
            return report.url
    raise AssertionError(process.communicate())


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with running(tmp_path) as started:
        yield started


@contextmanager
def running(directory: Path, **suffering: Any) -> Iterator[subprocess.Popen[bytes]]:  # noqa: ANN401
    """Start the process, and clean it up at the end."""
    started = start(directory, **suffering)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def test_it_says_where_it_listens_and_leaves_on_a_signal(
    process: subprocess.Popen[bytes],
) -> None:
    url = ready_url(process)
    with httpx2.Client(base_url=url, timeout=PATIENCE_S) as client:
        assert client.get("/health/live").status_code == 200
        ready = client.get("/health/ready")
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "no_worker")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_a_stream_without_workers_gets_its_terminal_event_at_the_end_of_the_drain(
    process: subprocess.Popen[bytes],
) -> None:
    url = ready_url(process)
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    with (
        httpx2.Client(base_url=url, timeout=PATIENCE_S) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as stream,
    ):
        assert stream.status_code == 200
        lines = stream.iter_lines()
        assert "assistant" in next(lines)
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert '"code":"draining"' in rest[-2]
    assert rest[-1] == "data: [DONE]"
    assert process.wait(PATIENCE_S) == 0


def test_a_client_that_reads_nothing_does_not_keep_it(process: subprocess.Popen[bytes]) -> None:
    port = int(ready_url(process).rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as silent:
        silent.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_an_event_loop_that_hangs_at_the_end_does_not_keep_the_process(tmp_path: Path) -> None:
    with running(tmp_path, fault=WEDGED, exit_grace_s=SHORT_GRACE_S) as process:
        ready_url(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == EXIT_FORCED


def test_a_drain_that_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    with running(tmp_path, fault=SLOW_DRAIN, exit_grace_s=SHORT_GRACE_S) as process:
        ready_url(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == EXIT_FORCED


def test_a_second_signal_ends_the_drain(tmp_path: Path) -> None:
    with running(tmp_path, fault=SLOW_DRAIN) as process:
        ready_url(process)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert any(b"signal" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0


def wait_out_of_files(pid: int) -> None:
    """Wait until a process has run out of descriptors. It may briefly have one free: a failed
    connection attempt releases a socket, and the next client takes it."""
    give_up = time.monotonic() + PATIENCE_S
    while len(list(Path(f"/proc/{pid}/fd").iterdir())) < MOST_FILES:
        assert time.monotonic() < give_up, "it did not run out of files"


def test_it_lives_through_a_time_without_files_and_accepts_again(tmp_path: Path) -> None:
    with running(tmp_path, fault=FEW_FILES) as process, ExitStack() as crowd:
        url = ready_url(process)
        address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        # A client that closes idle connections could not open another one.
        lasting = httpx2.Limits(keepalive_expiry=None)
        with httpx2.Client(base_url=url, timeout=PATIENCE_S, limits=lasting) as early:
            assert early.get("/health/live").status_code == 200
            for _ in range(2 * MOST_FILES):
                crowd.enter_context(socket.create_connection(address))
            wait_out_of_files(process.pid)
            # A connected client is unaffected, and reconnecting to workers continues.
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                assert early.get("/health/live").status_code == 200
                # hypercorn closes a connection after its 1,000th request. A fast machine gets
                # there, and a new connection cannot be opened now.
                time.sleep(0.01)
            wait_out_of_files(process.pid)
        crowd.close()
        with httpx2.Client(base_url=url, timeout=PATIENCE_S) as late:
            assert late.get("/health/live").status_code == 200
        assert process.poll() is None


def test_a_port_in_use_is_named_with_a_remedy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        _, stderr = start(tmp_path, port=port).communicate(timeout=PATIENCE_S)
    last = stderr.decode().strip().splitlines()[-1]
    assert "ConfigError" in last
    assert f"127.0.0.1:{port} is in use" in last
    assert "choose another port" in last


def test_a_model_without_a_chat_template_says_so_at_start_and_to_the_page(tmp_path: Path) -> None:
    model, sockets = tmp_path / "base", tmp_path / "sockets"
    model.mkdir()
    sockets.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "page.json"):
        (model / name).write_bytes((DEMO / name).read_bytes())
    with running(sockets, model=model) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if isinstance(report := parse_report(line), ServerReady):
                break
        assert isinstance(report, ServerReady)
        assert any(b"no_chat_template" in line and b"/v1/completions" in line for line in lines)
        (card,) = httpx2.get(f"{report.url}/v1/models", timeout=PATIENCE_S).json()["data"]
    assert card["page"]["has_chat_template"] is False
    assert card["page"]["cards"][0]["question"] == "Tell me a story about a dragon named Mia."


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    _, stderr = start(tmp_path, model=tmp_path / "none").communicate(timeout=PATIENCE_S)
    assert "none" in stderr.decode().strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"host": "no.such.host.invalid", "allow_remote_clients": True}, "cannot be resolved"),
        ({"host": "192.0.2.1", "allow_remote_clients": True}, "is not an address of this machine"),
    ],
)
def test_an_address_that_cannot_be_had_is_explained(changes: dict[str, object], word: str) -> None:
    config: ServerConfig = replace(CONFIG, **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=word):
        open_listening_socket(config)


@pytest.mark.parametrize(("stall_s", "user_s", "expected_ms"), [(1, 3, 3000), (20, 11, 21_000)])
@pytest.mark.parametrize("is_handed_down", [False, True])
def test_the_listening_socket_s_options_are_inherited(
    is_handed_down: bool, stall_s: float, user_s: float, expected_ms: int
) -> None:
    config = ServerConfig(
        "", "", (), (), port=0, stall_timeout_s=stall_s, tcp_user_timeout_s=user_s
    )
    with (
        socket.create_server(("127.0.0.1", 0)) as handed_down,
        open_listening_socket(
            replace(config, listen_fd=os.dup(handed_down.fileno())) if is_handed_down else config
        ) as listening,
    ):
        client = socket.create_connection(listening.getsockname())
        listening.setblocking(True)
        accepted, _ = listening.accept()
        with client, accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == expected_ms
            buffer_bytes = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            assert buffer_bytes <= 2 * config.send_buffer_bytes


def test_a_burst_of_connections_waits_in_the_kernel() -> None:
    """The usual backlog of a hundred would make the others retry after seconds."""
    config = ServerConfig("", "", (), (), port=0)
    with open_listening_socket(config) as listening, ExitStack() as crowd:
        poll = select.poll()
        for _ in range(BURST):
            client = crowd.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listening.getsockname())
            poll.register(client, select.POLLOUT)
        connected: set[int] = set()
        while len(connected) < BURST and (ready := poll.poll(int(1000 * PATIENCE_S))):
            for descriptor, _ in ready:
                poll.unregister(descriptor)
                connected.add(descriptor)
        assert len(connected) == BURST

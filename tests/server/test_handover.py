"""Tests of two server processes on one listening socket: the port stays open, and no client is cut
off."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest

from server.edge.listen import open_listening_socket
from tests import forked
from tests.server.support.surface import CONFIG
from triolet.config import ServerConfig
from triolet.errors import ConfigError
from triolet.status import SUCCESSOR_SIGNAL

from .test_main import ready_url

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "triolet" / "demo"
START = """
import sys
from server.main import main
from triolet.config import ServerConfig
main(ServerConfig(model_dir=sys.argv[1], model_name=sys.argv[4], listen_fd=int(sys.argv[3]),
    prefill_addresses=(f"ipc://{sys.argv[2]}/p",), decode_addresses=(f"ipc://{sys.argv[2]}/d",),
    drain_timeout_s=float(sys.argv[5]), handover_s=float(sys.argv[6]), exit_grace_s=60.0))
"""
PATIENCE_S = 60.0
HANDOVER_S = 5.0
"""Time for this process to send one more request on an open connection."""


@contextmanager
def server(
    directory: Path, listening: socket.socket, name: str, drain_s: float, handover_s: float
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server that listens on our socket; it is ready when this returns."""
    directory.chmod(0o700)
    number = listening.fileno()
    options = [str(DEMO), str(directory), str(number), name, str(drain_s), str(handover_s)]
    process = forked.Popen(
        [sys.executable, "-c", START, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(number,),
    )
    try:
        ready_url(process)
        yield process
    finally:
        process.kill()
        process.communicate()


def url_of(port: socket.socket) -> str:
    return f"http://127.0.0.1:{port.getsockname()[1]}"


def lasting_client(port: socket.socket) -> httpx2.Client:
    """Return a client that never closes an idle connection by itself."""
    limits = httpx2.Limits(keepalive_expiry=None)
    return httpx2.Client(base_url=url_of(port), timeout=PATIENCE_S, limits=limits)


def served_by(client: httpx2.Client) -> str:
    name = client.get("/health/live").raise_for_status().json()["model"]
    assert isinstance(name, str)
    return name


@pytest.mark.long
def test_a_successor_takes_over_the_port_while_streams_go_on(
    tmp_path: Path, port: socket.socket
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    with (
        server(tmp_path, port, "old", drain_s=2.0, handover_s=HANDOVER_S) as old,
        lasting_client(port) as known,
        known.stream("POST", "/v1/chat/completions", json=body) as stream,
        lasting_client(port) as idle,
    ):
        lines = stream.iter_lines()
        assert "assistant" in next(lines)
        assert served_by(idle) == "old"
        with server(tmp_path, port, "new", drain_s=0.5, handover_s=0.1):
            old.send_signal(SUCCESSOR_SIGNAL)
            # Its connection is still open; an answer tells it to reconnect for the next request.
            while (answer := idle.get("/health/live")).headers.get("connection") != "close":
                assert answer.json()["model"] == "old"
            assert answer.json()["model"] == "old"
            # For a moment both accept; then only the new one does, and no client is refused.
            served: list[str] = []
            while served[-20:] != ["new"] * 20:
                with httpx2.Client(base_url=url_of(port), timeout=PATIENCE_S) as newcomer:
                    served.append(served_by(newcomer))
            assert served_by(idle) == "new"
            # Without workers it cannot continue; it exits cleanly at the end of the drain.
            rest = [line for line in lines if line]
            assert '"code":"draining"' in rest[-2]
            assert rest[-1] == "data: [DONE]"
            assert old.wait(PATIENCE_S) == 0
            assert served_by(idle) == "new"


def test_a_request_to_end_cuts_the_handover_short(tmp_path: Path, port: socket.socket) -> None:
    with server(tmp_path, port, "old", drain_s=0.0, handover_s=3600.0) as old:
        old.send_signal(SUCCESSOR_SIGNAL)
        assert old.stdout is not None
        assert any(b"signal" in line for line in old.stdout)
        old.send_signal(signal.SIGTERM)
        assert old.wait(PATIENCE_S) == 0


def test_connections_wait_for_a_server_that_is_being_restarted(
    tmp_path: Path, port: socket.socket
) -> None:
    with server(tmp_path, port, "first", drain_s=0.0, handover_s=0.0) as first:
        first.kill()
        first.wait(PATIENCE_S)
    with socket.create_connection(port.getsockname()) as early:
        early.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        with server(tmp_path, port, "second", drain_s=0.0, handover_s=0.0):
            early.settimeout(PATIENCE_S)
            assert early.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_descriptor_that_is_no_socket_is_named() -> None:
    with Path(__file__).open() as file:
        config = ServerConfig("", "", (), (), listen_fd=file.fileno(), link=CONFIG.link)
        with pytest.raises(ConfigError, match=f"server.listen_fd {file.fileno()} is not a socket"):
            open_listening_socket(config)

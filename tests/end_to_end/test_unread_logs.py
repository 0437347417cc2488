"""Tests of a fleet with an unread log: it starts, serves, recovers and stops normally."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest

from ops.ports import bind_port
from tests import forked

from .fleet_process import PATIENCE_S, START_TIMEOUT_S, STOP_TIMEOUT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

ASK = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 1}
REQUESTS = 40
"""Number of requests; each writes some hundred bytes of log to a full pipe."""


@contextmanager
def full_pipe() -> Iterator[tuple[int, int]]:
    """Yield a full pipe, read end first."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writable, bytes(4096))
    os.set_blocking(writable, True)
    yield readable, writable
    os.close(readable)
    os.close(writable)


def unread_bytes(readable: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(readable, termios.FIONREAD, bytes(4)))[0])


@contextmanager
def mute_fleet(port: int, out: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run `triolet serve` without reading its output."""
    program = Path(sys.executable).with_name("triolet")
    process = forked.Popen(
        [str(program), "serve", "--port", str(port), "--log-level", "debug"],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def children(process: subprocess.Popen[bytes], role: str) -> list[int]:
    """Return the pids of running processes of a role."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    pids = [int(pid) for task in tasks for pid in task.read_text().split()]
    return [
        pid
        for pid in pids
        if f" {role} " in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    ]


def test_a_fleet_whose_log_nobody_reads_serves_and_mends_itself_and_ends() -> None:
    with (
        bind_port("127.0.0.1", 0) as kept,
        full_pipe() as (readable, writable),
        mute_fleet(port := kept.getsockname()[1], writable) as process,
    ):
        filled = unread_bytes(readable)

        def answers() -> bool:
            with suppress(httpx2.TransportError):
                return client.post("/v1/chat/completions", json=ASK).status_code == 200
            return False

        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
            wait_until(answers, START_TIMEOUT_S, "it takes requests")
            assert all(answers() for _ in range(REQUESTS))
            [decode] = children(process, "decode")
            os.kill(decode, signal.SIGKILL)
            wait_until(
                lambda: children(process, "decode") not in ([], [decode]),
                START_TIMEOUT_S,
                "the supervisor starts another decode worker",
            )
            wait_until(answers, START_TIMEOUT_S, "it takes requests again")
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_TIMEOUT_S) == 0
        assert unread_bytes(readable) == filled

"""A server of one's own, `triolet serve` or another's: started, waited for, stopped by its pid."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

START_DEADLINE_S = 120.0
"""Loading a large checkpoint takes a while; the demo model takes seconds."""
STOP_DEADLINE_S = 30.0
READY_POLL_S = 0.1


class ServerDidNotStartError(Exception):
    """It ended before it was ready, or was not ready in time."""


@contextmanager
def running_server(options: Sequence[str], log: Path) -> Iterator[str]:
    """Run `triolet serve` with these options and yield its URL.

    Raises:
      ServerDidNotStartError: with the end of its log.
    """
    # Not the script `triolet`: where dependencies come from PYTHONPATH there is none.
    command = [sys.executable, "-m", "ops.cli", "serve", *options]
    with socket.socket() as kept, log.open("wb") as output:
        # Bound and never listening: nobody else gets the port, while the server is away either.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port: int = kept.getsockname()[1]
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            wait_ready(process, f"{url}/health/ready", log, START_DEADLINE_S)
            yield url
        finally:
            stop(process)


def wait_ready(process: subprocess.Popen[bytes], url: str, log: Path, deadline_s: float) -> None:
    """Return once a server says 200 at a URL.

    Args:
      process: of the server.
      url: what to ask.
      log: what the server writes.
      deadline_s: from now.

    Raises:
      ServerDidNotStartError: it ended, or took longer; with the end of its log.
    """
    give_up_s = time.monotonic() + deadline_s
    while not _is_ready(url):
        if process.poll() is not None:
            what = f"the server ended with exit code {process.returncode}"
        elif time.monotonic() > give_up_s:
            what = f"the server was not ready within {deadline_s:.0f} s"
        else:
            time.sleep(READY_POLL_S)
            continue
        last_lines = log.read_text(errors="replace").splitlines()[-15:]
        raise ServerDidNotStartError("\n".join([f"{what}; its log {log} ends:", *last_lines]))


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server as its user would, and by force if that takes too long."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

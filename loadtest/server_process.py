"""A `triolet serve` of one's own: started on a free port, waited for, stopped by its pid."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

START_DEADLINE_S = 120.0
"""Loading a large checkpoint takes a while; the demo model takes seconds."""
STOP_DEADLINE_S = 30.0
POLL_S = 0.1


class ServerDidNotStartError(Exception):
    """It ended before it was ready, or was not ready in time."""


@contextmanager
def running_server(options: Sequence[str], log: Path) -> Iterator[str]:
    """Run `triolet serve` with these options and yield its URL.

    Raises:
      ServerDidNotStartError: with the end of its log.
    """
    program = Path(sys.executable).with_name("triolet")
    if not program.exists():
        raise ServerDidNotStartError(f"{program} is missing: `make install` puts it there")
    command = [str(program), "serve", *options]
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
            _wait_ready(process, url, log)
            yield url
        finally:
            _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    give_up_s = time.monotonic() + START_DEADLINE_S
    while not _is_ready(url):
        if process.poll() is not None:
            what = f"`triolet serve` ended with exit code {process.returncode}"
        elif time.monotonic() > give_up_s:
            what = f"`triolet serve` was not ready within {START_DEADLINE_S:.0f} s"
        else:
            time.sleep(POLL_S)
            continue
        last_lines = log.read_text(errors="replace").splitlines()[-15:]
        raise ServerDidNotStartError("\n".join([f"{what}; its log {log} ends:", *last_lines]))


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

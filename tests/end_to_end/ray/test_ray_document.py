"""Tests that the commands of docs/operations/ray.md work as written, except for ports, and print
the output that the page quotes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import psutil
import pytest

from tests.packaging.shown import FENCED, files, shown
from tests.server.tenants.redis_server import PROGRAM

from .ray_cluster import ROOT

pytest.importorskip("ray", reason="Ray is not installed (`make ray-test`)")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="redis-server is not installed"),
]

PAGE: Final = "docs/operations/ray.md"
PATIENCE_S: Final = 280.0
PORT: Final = re.compile(r":\d+$", re.MULTILINE)
FIXED_PORTS: Final = ("6399", "6400")
"""Ports of Redis and of Ray's head on the page; the test takes free ones instead."""
MARKER: Final = "TRIOLET_RAY_DOCUMENT"
"""Variable in the environment of what the commands start, also as daemons."""


def with_free_ports(script: str) -> str:
    """Return a script that uses free ports of this machine."""
    for port in FIXED_PORTS:
        with socket.create_server(("127.0.0.1", 0)) as free:
            script = re.sub(rf"\b{port}\b", str(free.getsockname()[1]), script)
    return script


def kill_all_of(folder: str) -> None:
    """Kill processes that commands in a folder have left running. They have the marker in their
    environment or, like Redis, which overwrites its environment, this working directory."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if folder in (process.environ().get(MARKER), process.cwd()):
                process.kill()


def test_the_commands_of_the_page_work_and_print_what_it_quotes() -> None:
    quoted = [block for kind, block in FENCED.findall((ROOT / PAGE).read_text()) if kind == "text"]
    lines = [line.strip() for block in quoted for line in PORT.sub(":", block).splitlines()]
    with TemporaryDirectory(prefix="ray-") as folder:
        (Path(folder) / "triolet.toml").write_text(files(PAGE)[0])
        home = {MARKER: folder, "HOME": folder, "XDG_STATE_HOME": folder, "RAY_TMPDIR": folder}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        script = with_free_ports("\n".join(["set -e", *(one.text for one in shown(PAGE))]))
        done = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env={**os.environ, **home, "PATH": path, "RAY_USAGE_STATS_ENABLED": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = done.communicate(timeout=PATIENCE_S)
        finally:
            kill_all_of(folder)
        assert done.returncode == 0, output
        said = [line.strip() for line in PORT.sub(":", output).splitlines()]
        assert [line for line in lines if line not in said] == []

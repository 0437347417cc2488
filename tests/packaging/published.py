"""Tests of the published package (`make wheel`): builds sdist and wheel, installs the wheel in a
new environment, and serves with it.

The sdist is built from a copy of the tree and the wheel from the sdist, as an index and its users
do. Everything after that runs in an empty folder, without the checkout on Python's path.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

from tests.house.test_layout import ROOT

from .tree import copy_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INSTALL_TIMEOUT_S: Final = 1200.0
COMMAND_TIMEOUT_S: Final = 180.0
HOUR_TIMEOUT_S: Final = 600.0
READY_S: Final = 180
"""Timeout until the fleet of docs/first_hour.md is ready."""
CONSOLE: Final = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
DIST: Final = ROOT / "dist"
QUESTION: Final = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 24,
    "temperature": 0,
}


class Steps:
    """The steps, their durations and results."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, str]] = []

    def run(self, name: str, do: Callable[[], str]) -> None:
        """Run a step; record its time and its result. An error ends the program."""
        begun = time.monotonic()
        result = do()
        self.rows.append((name, time.monotonic() - begun, result))
        sys.stdout.write(f"{name}: {result}\n")
        sys.stdout.flush()

    def show(self) -> None:
        table = Table(box=None)
        for column in ("step", "seconds", "result"):
            table.add_column(column, justify="right" if column == "seconds" else "left")
        for name, seconds, result in self.rows:
            table.add_row(name, f"{seconds:.1f}", result)
        Console().print(table)


def run(*command: str | Path, cwd: Path, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """Run a command and return its output; show its errors and exit if it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=outside(),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    if done.returncode != 0:
        sys.exit(f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout.strip()


def outside() -> dict[str, str]:
    """Return the environment without variables that lead Python into the checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def size_of(path: Path) -> str:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return f"{sum(file.stat().st_size for file in files) / 1e6:.1f} MB"


def build(folder: Path) -> str:
    """Build both distributions into dist/."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    source = copy_tree(folder / "source")
    program = f"from setuptools import build_meta as b; b.build_sdist({str(DIST)!r})"
    run(sys.executable, "-c", program, cwd=source)
    (sdist,) = DIST.glob("*.tar.gz")
    command = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet")
    run(*command, "--no-deps", "--wheel-dir", DIST, sdist, cwd=folder, timeout_s=INSTALL_TIMEOUT_S)
    (wheel,) = DIST.glob("*.whl")
    return f"{sdist.name} {size_of(sdist)}, {wheel.name} {size_of(wheel)}"


def install(folder: Path) -> str:
    """Install the wheel into a new environment."""
    (wheel,) = DIST.glob("*.whl")
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", environment, cwd=folder)
    pip = (environment / "bin" / "pip", "--disable-pip-version-check", "install", "--quiet")
    constraints = ("--constraint", ROOT / "constraints.txt")
    run(*pip, *constraints, wheel, cwd=folder, timeout_s=INSTALL_TIMEOUT_S)
    (packages,) = environment.glob("lib/python*/site-packages")
    return f"{size_of(packages)} in site-packages, of these torch {size_of(packages / 'torch')}"


@contextmanager
def serving(triolet: Path, cwd: Path, log: Path) -> Iterator[str]:
    """Run `triolet serve demo` on a free loopback port, yield its URL, and stop it."""
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [triolet, "serve", "demo", "--port", "0"],
            cwd=cwd,
            env=outside(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                sys.exit(f"triolet serve ended:\n{log.read_text()}")
            yield json.loads(line)["url"]
            process.send_signal(signal.SIGTERM)
            if process.wait(COMMAND_TIMEOUT_S) != 0:
                sys.exit(f"triolet serve ended with {process.returncode}:\n{log.read_text()}")
        finally:
            process.kill()


def first_hour(environment: Path, cwd: Path) -> str:
    """Run the commands of docs/first_hour.md, including its server, on a free port; stop the
    server."""
    blocks = CONSOLE.findall((ROOT / "docs" / "first_hour.md").read_text(encoding="utf-8"))
    lines = [line.removeprefix("$ ") for line in "".join(blocks).splitlines()]
    (served,) = (line for line in lines if line.startswith("triolet serve "))
    at = lines.index(served)
    started = [f"{served} >ready & SERVED=$!", "exec 3<ready", f"read -r -t {READY_S} -u 3 READY"]
    stopped = ["kill $SERVED", "wait $SERVED"]
    port = str(free_port())
    script = "\n".join(
        ["set -ex", "mkfifo ready", *lines[:at], *started, *lines[at + 1 :], *stopped]
    )
    done = subprocess.run(
        ["bash", "-c", script.replace("8000", port)],
        cwd=cwd,
        env=outside() | {"PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=HOUR_TIMEOUT_S,
    )
    if done.returncode != 0:
        log = (cwd / "triolet.log").read_text() if (cwd / "triolet.log").exists() else ""
        sys.exit(f"docs/first_hour.md:\n{done.stdout}\n{done.stderr}\n{log[-4000:]}")
    return f"{len(lines)} lines of docs/first_hour.md"


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port: int = held.getsockname()[1]
        return port


def ask(url: str) -> str:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(QUESTION).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=COMMAND_TIMEOUT_S) as answer:
        document = json.load(answer)
    text = document["choices"][0]["message"]["content"]
    if not text.strip():
        sys.exit(f"the answer is empty: {document}")
    return repr(text)


def main() -> int:
    """Run all steps and print the table."""
    steps = Steps()
    with tempfile.TemporaryDirectory(prefix="triolet-wheel-") as name:
        folder = Path(name)
        empty = folder / "empty"
        empty.mkdir()
        triolet = folder / "environment" / "bin" / "triolet"
        steps.run("build", lambda: build(folder))
        steps.run("install", lambda: install(folder))
        steps.run("version", lambda: run(triolet, "--version", cwd=empty))
        steps.run("doctor", lambda: doctor(triolet, empty))
        begun = time.monotonic()
        with serving(triolet, empty, folder / "log") as url:
            ready_s = time.monotonic() - begun
            steps.rows.append(("serve demo", ready_s, f"requests are taken at {url}"))
            steps.run("answer", lambda: ask(url))
            begun = time.monotonic()
        steps.rows.append(("stop", time.monotonic() - begun, "exit code 0"))
        hour = folder / "hour"
        hour.mkdir()
        steps.run("first hour", lambda: first_hour(folder / "environment", hour))
        if left := list(empty.iterdir()):
            sys.exit(f"left behind in the current folder: {left}")
    steps.show()
    return 0


def doctor(triolet: Path, cwd: Path) -> str:
    said = run(triolet, "doctor", "demo", "--port", str(free_port()), "--json", cwd=cwd)
    found = json.loads(said)["findings"]
    return ", ".join(f"{row['subject']} {row['status']}" for row in found)


if __name__ == "__main__":
    sys.exit(main())

"""What docs/TENANTS.md shows works, as it stands there, on a real server; its file is right."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import pytest

from tests import forked
from triolet.tenants import Plan
from triolet.tenants_form import read_tenants

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[2]
TEXT: Final = (ROOT / "docs" / "TENANTS.md").read_text(encoding="utf-8")
CONSOLE: Final = re.findall(r"^```console\n(.*?)^```", TEXT, re.M | re.S)
FILES: Final = re.findall(r"^```toml\n(.*?)^```", TEXT, re.M | re.S)
SERVE: Final = "triolet serve "
PATIENCE_S: Final = 120.0
TRIOLET: Final = """\
triolet() { "$PYTHON" -SEc "$ASK" "$@"; }
curl() { command curl -o /dev/null "$@"; }
"""
ASK: Final = """\
import json, os, socket, sys
asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asked.connect(os.environ["STARTER"])
socket.send_fds(asked, [json.dumps([os.getcwd(), *sys.argv[1:]]).encode()], [0, 1, 2])
sys.exit(int(asked.recv(64)))
"""
"""Has a command forked with the shell's own files, and ends as it ended. Eight interpreters would
each import the command line, which is what most of this test's time would be."""
MAX_ARGUMENTS_BYTES: Final = 4096


def test_the_file_that_is_shown_is_right_and_shows_every_field_of_a_plan() -> None:
    (text,) = FILES
    tenants = read_tenants(text.encode(), "docs/TENANTS.md")
    assert set(tenants.by_name) == {"alice", "root"}
    gold = tenants.by_name["alice"].plan
    assert gold is tenants.plans["gold"]
    shown = re.findall(r"^(\w+) =", text.partition("[plans.gold]")[2].partition("[ten")[0], re.M)
    assert {"name", *shown} == set(Plan.__slots__)


@contextmanager
def server(folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """Run a server with the file, and with no worker; give its address."""
    command = [
        *(sys.executable, "-m", "ops.cli", "server", "--set", "server.port=0"),
        *("--set", "server.tenants.file=tenants.toml"),
        *("--set", f"server.decode_addresses=ipc://{folder}/d"),
        *("--set", f"server.prefill_addresses=ipc://{folder}/p"),
    ]
    with (
        (folder / "log").open("w") as log,
        forked.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log
        ) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if url := json.loads(line).get("url"):
                    break
            else:
                raise AssertionError((folder / "log").read_text())
            yield url
        finally:
            process.terminate()


@pytest.mark.promise
@pytest.mark.slow
def test_a_tenant_in_a_minute(tmp_path: Path) -> None:
    before, after = "".join(CONSOLE[:1]), "".join(CONSOLE[1:])
    lines = [line.removeprefix("$ ") for line in before.splitlines()]
    assert [line for line in lines if line.startswith(SERVE)] == [f"{SERVE}--tenants tenants.toml"]
    program = "\n".join(line for line in lines if not line.startswith(SERVE))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    keys = _run(f"{program}\necho $ALICE $ROOT", tmp_path, environment).split()
    assert len(set(keys)) == 2
    names = dict(zip(("ALICE", "ROOT"), keys, strict=True))
    with server(tmp_path, environment) as url:
        rest = "\n".join(line.removeprefix("$ ") for line in after.splitlines())
        said = _run(rest.replace("localhost:8000", url), tmp_path, environment | names)
    assert "alice" in said
    content = (tmp_path / "tenants.toml").read_text()
    assert not any(key in content for key in keys)


@contextmanager
def starting(environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """Run what ASK asks for; give the environment of the program that asks."""
    with (
        TemporaryDirectory(prefix="tenants-") as private,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening,
    ):
        path = f"{private}/starter"
        listening.bind(path)
        listening.listen()

        def serve() -> None:
            while True:
                with listening.accept()[0] as asking:
                    message, fds, _, _ = socket.recv_fds(asking, MAX_ARGUMENTS_BYTES, 3)
                    if not message:
                        return
                    cwd, *arguments = json.loads(message)
                    with forked.Popen(
                        [forked.TRIOLET, *arguments],
                        cwd=cwd,
                        env=environment,
                        stdin=fds[0],
                        stdout=fds[1],
                        stderr=fds[2],
                    ) as process:
                        code = process.wait(PATIENCE_S)
                    for fd in fds:
                        os.close(fd)
                    asking.send(str(code).encode())

        with ThreadPoolExecutor(1) as thread:
            served = thread.submit(serve)
            try:
                yield environment | {"STARTER": path, "ASK": ASK, "PYTHON": sys.executable}
            finally:
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as last:
                    last.connect(path)
        served.result()


def _run(program: str, folder: Path, environment: dict[str, str]) -> str:
    with starting(environment) as with_starter:
        done = subprocess.run(
            ["bash", "-ec", f"{TRIOLET}\n{program}"],
            cwd=folder,
            env=with_starter,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout

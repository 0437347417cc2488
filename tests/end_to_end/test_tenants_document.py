"""What docs/TENANTS.md shows works, as it stands there, on a real server; its file is right."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
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
triolet() { "$PYTHON" -m ops.cli "$@"; }
curl() { command curl -o /dev/null "$@"; }
"""


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


@pytest.mark.slow
def test_a_tenant_in_a_minute(tmp_path: Path) -> None:
    before, after = "".join(CONSOLE[:1]), "".join(CONSOLE[1:])
    lines = [line.removeprefix("$ ") for line in before.splitlines()]
    assert [line for line in lines if line.startswith(SERVE)] == [f"{SERVE}--tenants tenants.toml"]
    program = "\n".join(line for line in lines if not line.startswith(SERVE))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    keys = _run(f"{program}\necho $ALICE $ROOT", tmp_path, environment).split()
    assert len(set(keys)) == 2
    names = dict(zip(("ALICE", "ROOT"), keys, strict=True))
    with server(tmp_path, environment) as url:
        rest = "\n".join(line.removeprefix("$ ") for line in after.splitlines())
        said = _run(rest.replace("localhost:8000", url), tmp_path, environment | names)
    assert "alice" in said
    content = (tmp_path / "tenants.toml").read_text()
    assert not any(key in content for key in keys)


def _run(program: str, folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-ec", f"{TRIOLET}\n{program}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

"""Tests that the examples in docs/API.md work on a real fleet, and that it lists every route."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from server.routes import ROUTES

if TYPE_CHECKING:
    from .fleet_process import FleetProcess

PAGE: Final = Path(__file__).parents[2] / "docs" / "API.md"
TEXT: Final = PAGE.read_text(encoding="utf-8")
SHOWN_AT: Final = "://127.0.0.1:8000"
EXAMPLES: Final = re.findall(r"^```http\n(\w+) (\S+)(?: → (\d+))?\n(.*?)```", TEXT, re.M | re.S)
RECIPES: Final = re.findall(r"^```(bash|python|javascript)\n(.*?)^```", TEXT, re.M | re.S)
(BATCH_RECIPE,) = re.findall(r"^```py\n(.*?)^```", TEXT, re.M | re.S)
"""Not run here: it needs a server with files; see tests/end_to_end/test_batches.py."""
HEADER: Final = re.compile(r"([a-z-]+): (.+)")
PROGRAMS: Final = {
    "bash": ["bash", "-ec"],
    "python": [sys.executable, "-c"],
    "javascript": ["node", "--input-type=module", "-e"],
}
PATIENCE_S: Final = 120.0


def has_fetch() -> bool:
    asked = [*PROGRAMS["javascript"], "process.exit(globalThis.fetch ? 0 : 1)"]
    return subprocess.run(asked, check=False, capture_output=True).returncode == 0


@pytest.mark.promise
@pytest.mark.slow
def test_every_example_is_answered_as_it_says(fleet: FleetProcess) -> None:
    assert len(EXAMPLES) > 10
    for method, path, status, body in EXAMPLES:
        *heads, last = body.splitlines() or [""]
        headers = dict(HEADER.fullmatch(line).groups() for line in heads)  # type: ignore[union-attr]
        document = json.loads(last) if last else None
        answer = fleet.client.request(method, path, json=document, headers=headers)
        assert answer.status_code == int(status or 200), (path, body, answer.text)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(RECIPES)))
def test_every_recipe_runs(fleet: FleetProcess, index: int) -> None:
    run_recipe(fleet, *RECIPES[index])


def run_recipe(fleet: FleetProcess, language: str, program: str) -> None:
    """Run an example program against a fleet; it must print something."""
    command = PROGRAMS[language]
    needed = "curl" if language == "bash" else command[0]
    if shutil.which(needed) is None:
        pytest.skip(f"{needed} is not installed")
    if language == "javascript" and not has_fetch():
        pytest.skip("this node has no fetch; 18 does")
    model = fleet.client.get("/v1/models").json()["data"][0]["id"]
    at = fleet.url.removeprefix("http")
    program = program.replace(SHOWN_AT, at).replace('model="demo"', f'model="{model}"')
    done = subprocess.run(
        [*command, program], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_every_route_is_named() -> None:
    named = set(re.findall(r"`(?:GET|POST|DELETE) (/[^`]*)`", TEXT))
    routes = {re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", row.path) for row in ROUTES.rows}
    assert {
        route for route in routes if not route.endswith("/own") and "static" not in route
    } == named

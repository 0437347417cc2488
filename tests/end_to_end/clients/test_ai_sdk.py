"""Tests of the AI SDK with its default OpenAI provider, which uses the stateful Responses API.

From the second turn on, it sends ids of earlier output items instead of the items.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.end_to_end.scripted_model import Rule, command, write_script

from .installed import ADVICE, LOOP, MODEL, QUESTION, REASON

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.end_to_end.fleet_process import FleetProcess

PACKAGES = Path(__file__).parents[3] / "build" / "clients" / "node"
PROGRAM = Path(__file__).with_name("ai_sdk.mjs")
NODE = shutil.which("node")
NEXT = "And a coat?"
RULES = (Rule(NEXT, "No coat.", shown=(QUESTION, "<tool_call>", ADVICE)), *LOOP)
"""The second answer needs the whole first turn in the prompt."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        NODE is None or not (PACKAGES / "node_modules" / "@ai-sdk" / "openai").is_dir(),
        reason=REASON.format("ai"),
    ),
]


def two_turns(fleet: FleetProcess) -> dict[str, Any]:
    """Return the output of an agent with two turns, the second one streamed."""
    assert NODE is not None
    words = [NODE, str(PROGRAM), str(PACKAGES), f"{fleet.url}/v1", QUESTION, NEXT]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_an_agent_goes_on_by_references(
    start_fleet: Callable[..., FleetProcess], scripted_model: Path
) -> None:
    write_script(scripted_model, RULES)
    options = (str(scripted_model), "--model-name", MODEL, "--responses-ttl", "3600")
    said = two_turns(start_fleet(*options, command=command(scripted_model)))
    assert said["failure"] is None
    assert said["texts"] == [ADVICE, "No coat."]
    assert said["references"][-1] >= 1, "the client has sent a reference"


def test_without_state_the_error_says_how_to_switch_it_on(
    script: Callable[..., FleetProcess],
) -> None:
    said = two_turns(script(*RULES))
    assert said["texts"] == [ADVICE]
    assert said["failure"]["status"] == 404
    assert "start it with --responses-ttl 3600" in said["failure"]["message"]

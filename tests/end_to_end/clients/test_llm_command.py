"""Tests of the command `llm` with the fleet as an OpenAI-compatible model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.end_to_end.scripted_model import Rule

from .installed import ADVICE, LOOP, MODEL, QUESTION, needed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.end_to_end.fleet_process import FleetProcess

needed("llm")
pytestmark = pytest.mark.slow

COMMAND_TIMEOUT_S = 120.0
TOOL = """\
def get_weather(city: str) -> str:
    "Tell the weather."
    return f"It is sunny in {city}."
"""
MODELS = """\
- model_id: {name}
  model_name: {name}
  api_base: "{url}/v1"
  supports_tools: true
  supports_schema: true
"""


def llm(fleet: FleetProcess, directory: Path, *arguments: str) -> str:
    """Return the command's output."""
    models = MODELS.format(name=MODEL, url=fleet.url)
    (directory / "extra-openai-models.yaml").write_text(models, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-m", "llm", *arguments, "-m", MODEL],
        env=os.environ | {"LLM_USER_PATH": str(directory)},
        check=False,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.mark.parametrize("option", ["", "--no-stream"])
def test_a_prompt_is_answered(
    script: Callable[..., FleetProcess], tmp_path: Path, option: str
) -> None:
    fleet = script(Rule("a fox", "A fox went to the moon."))
    asked = ["Tell of a fox", *filter(None, [option])]
    assert llm(fleet, tmp_path, *asked) == "A fox went to the moon."


def test_a_conversation_goes_on(script: Callable[..., FleetProcess], tmp_path: Path) -> None:
    rules = (Rule("And then?", "It came back.", shown=("a fox",)), Rule("a fox", "It left."))
    fleet = script(*rules)
    assert llm(fleet, tmp_path, "Tell of a fox") == "It left."
    assert llm(fleet, tmp_path, "And then?", "--continue") == "It came back."


def test_a_function_is_called(script: Callable[..., FleetProcess], tmp_path: Path) -> None:
    assert llm(script(*LOOP), tmp_path, QUESTION, "--functions", TOOL) == ADVICE


def test_an_object_has_its_schema(script: Callable[..., FleetProcess], tmp_path: Path) -> None:
    fleet = script(Rule("a person", '{"name": "Ada", "age": 36}'))
    printed = llm(fleet, tmp_path, "Invent a person", "--schema", "name, age int")
    assert json.loads(printed) == {"name": "Ada", "age": 36}

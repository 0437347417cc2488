"""Tests of the program Codex CLI against the fleet's Responses API: an answer, and its shell
tool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.end_to_end.scripted_model import Rule, tool_call
from tests.packaging.shown import files

from .installed import PAGE, here, needed_program, run_agent

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.end_to_end.fleet_process import FleetProcess

CODEX = needed_program("codex", "@openai/codex")
pytestmark = pytest.mark.slow


def codex(fleet: FleetProcess, directory: Path, prompt: str) -> str:
    """Return the answer to a prompt. Commands run without a sandbox, which containers lack."""
    home = directory / "home"
    home.mkdir()
    (config,) = files(PAGE)
    (home / "config.toml").write_text(here(config, fleet), encoding="utf-8")
    command = [str(CODEX), "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
    return run_agent([*command, prompt], directory, CODEX_HOME=str(home))


def test_codex_shows_an_answer(wide_script: Callable[..., FleetProcess], tmp_path: Path) -> None:
    fleet = wide_script(Rule("Say hello to all", "Hello from here."))
    assert codex(fleet, tmp_path, "Say hello to all") == "Hello from here."


def test_codex_runs_three_commands_one_after_the_other(
    wide_script: Callable[..., FleetProcess], tmp_path: Path
) -> None:
    def run(command: str) -> str:
        return tool_call("exec_command", cmd=command)

    # The results are not part of the commands, so the commands must have run.
    results = ("twelve is 12", "25 is written", "second line")
    fleet = wide_script(
        Rule("Count for me", run("echo twelve is $((3 * 4)) | tee counted.txt")),
        Rule(
            results[0],
            run("printf 'one\\nsecond%s' ' line' > notes.txt; echo $((5 * 5)) is written"),
        ),
        Rule(results[1], run("cat notes.txt")),
        Rule(results[2], "All is counted.", shown=("Count for me", *results)),
    )
    assert codex(fleet, tmp_path, "Count for me") == "All is counted."
    work = tmp_path / "work"
    assert (work / "counted.txt").read_text() == "twelve is 12\n"
    assert (work / "notes.txt").read_text() == "one\nsecond line"

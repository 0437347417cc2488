"""Tests of the program Claude Code against the fleet: an answer, its tools, tool search, and a
conversation longer than the context.

Its first request ends with a system message about its environment after the question.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.end_to_end.scripted_model import Rule, tool_call
from tests.packaging.shown import shown

from .conftest import CONTEXT
from .installed import PAGE, here, needed_program, run_agent

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.end_to_end.fleet_process import FleetProcess

CLAUDE = needed_program("claude", "@anthropic-ai/claude-code")
pytestmark = pytest.mark.slow

FIRST = "# Environment"
UNKNOWN_MODELS = 1_000_000
"""Context length that it assumes for unknown models."""
ERRORS = "triolet_http_errors_total"


def documented(fleet: FleetProcess, context: int) -> dict[str, str]:
    """Return the documented environment variables for this fleet."""
    exports = " ".join(one.text for one in shown(PAGE))
    text = here(exports, fleet).replace(str(CONTEXT), str(context))
    return dict(word.split("=", 1) for word in text.split() if word != "export")


def claude(
    fleet: FleetProcess,
    directory: Path,
    prompt: str,
    *tools: str,
    context: int = CONTEXT,
    refused: int = 0,
) -> str:
    """Return the answer to a prompt.

    Args:
      fleet: the fleet.
      directory: working directory.
      prompt: the prompt.
      tools: tools that it may use.
      context: context length that it assumes.
      refused: number of its requests that must be refused.
    """
    allowed = ("--allowedTools", ",".join(tools)) if tools else ()
    before = fleet.metric(ERRORS)
    answer = run_agent(
        [str(CLAUDE), "--print", prompt, *allowed],
        directory,
        **documented(fleet, context),
        CLAUDE_CONFIG_DIR=str(directory / "home" / "claude"),
    )
    assert fleet.metric(ERRORS) - before == refused
    return answer


def test_claude_code_shows_an_answer(
    wide_script: Callable[..., FleetProcess], tmp_path: Path
) -> None:
    fleet = wide_script(Rule(FIRST, "Hello from here.", shown=("Say hello to all",)))
    assert claude(fleet, tmp_path, "Say hello to all") == "Hello from here."


def test_claude_code_runs_a_command_writes_a_file_and_reads_it(
    wide_script: Callable[..., FleetProcess], tmp_path: Path
) -> None:
    notes = tmp_path / "work" / "notes.txt"
    command = "echo twelve is $((3 * 4)) | tee counted.txt"
    fleet = wide_script(
        Rule(FIRST, tool_call("Bash", command=command), shown=("Count for me",)),
        # The result is not part of the command, so the command must have run.
        Rule("twelve is 12", tool_call("Write", file_path=str(notes), content="one\nlast line\n")),
        Rule("created", tool_call("Read", file_path=str(notes)), shown=("twelve is 12",)),
        Rule("last line", "All is counted.", shown=("Count for me", "twelve is 12", "created")),
    )
    answer = claude(fleet, tmp_path, "Count for me", "Bash", "Write", "Read")
    assert answer == "All is counted."
    assert notes.read_text() == "one\nlast line\n"
    assert (tmp_path / "work" / "counted.txt").read_text() == "twelve is 12\n"


def test_claude_code_searches_a_tool_and_calls_it(
    wide_script: Callable[..., FleetProcess], tmp_path: Path
) -> None:
    fleet = wide_script(
        Rule(FIRST, tool_call("ToolSearch", query="select:CronList"), shown=("What is planned",)),
        Rule("Tool found: CronList", tool_call("CronList")),
        Rule("No scheduled jobs", "Nothing is planned.", shown=("Tool found: CronList",)),
    )
    answer = claude(fleet, tmp_path, "What is planned", "ToolSearch", "CronList")
    assert answer == "Nothing is planned."


def test_claude_code_compacts_a_conversation_that_is_refused_as_too_long(
    wide_script: Callable[..., FleetProcess], tmp_path: Path
) -> None:
    counting = tool_call("Bash", command="seq -s ' ' 1 6000")
    fleet = wide_script(
        Rule(FIRST, counting, shown=("Count on and on",)),
        Rule("detailed summary", "<summary>It was counted far.</summary>"),
        Rule("", "Enough is counted.", shown=("It was counted far.",)),
        Rule("", counting, shown=("Count on and on",)),
    )
    asked = ("Count on and on", "Bash")
    answer = claude(fleet, tmp_path, *asked, context=UNKNOWN_MODELS, refused=1)
    assert answer == "Enough is counted."

"""Claude Code, the program, against the fleet: an answer, its tools, and a tool that it searches.

Its first request ends with a system message about its environment, behind the question.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.end_to_end.scripted_model import Rule, tool_call

from .conftest import CONTEXT
from .installed import MODEL, needed_program, run_agent

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.end_to_end.fleet_process import FleetProcess

CLAUDE = needed_program("claude", "@anthropic-ai/claude-code")
pytestmark = pytest.mark.slow

FIRST = "# Environment"
ERRORS = "triolet_http_errors_total"


def claude(fleet: FleetProcess, directory: Path, prompt: str, *tools: str) -> str:
    """Return the answer to a prompt; none of the program's requests may have been refused."""
    allowed = ("--allowedTools", ",".join(tools)) if tools else ()
    refused = fleet.metric(ERRORS)
    answer = run_agent(
        [str(CLAUDE), "--print", prompt, *allowed],
        directory,
        ANTHROPIC_BASE_URL=fleet.url,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_MODEL=MODEL,
        CLAUDE_CODE_MAX_CONTEXT_TOKENS=str(CONTEXT),
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CONFIG_DIR=str(directory / "home" / "claude"),
        DISABLE_AUTOUPDATER="1",
    )
    assert fleet.metric(ERRORS) == refused
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
        # The result follows from the command, which does not hold it.
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

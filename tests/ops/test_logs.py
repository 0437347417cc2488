"""Log lines as another process reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from ops.logs import configure_logs
from triolet.errors import ConfigError

pytestmark = pytest.mark.slow


def logged(program: str, level: str = "info") -> list[dict[str, Any]]:
    """Return the log lines of a process that runs this after configuring its logs."""
    setup = f"from ops.logs import configure_logs; configure_logs({level!r}, 'decode-0')\n"
    setup += "import structlog, logging, warnings; log = structlog.get_logger()\n"
    done = subprocess.run(
        [sys.executable, "-c", setup + program], capture_output=True, check=False, text=True
    )
    assert done.stdout == ""
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_every_line_is_json_whatever_is_logged() -> None:
    (entry,) = logged("log.info('a', text='\\r\\n\\x1b[31m\\u202e', raw=b'\\xff', thing=object)")
    assert entry["event"] == "a"
    assert entry["process"] == "decode-0"
    assert entry["level"] == "info"
    assert entry["text"] == "\r\n\x1b[31m\u202e"
    assert entry["raw"] == "b'\\xff'"


def test_long_values_are_cut() -> None:
    (entry,) = logged("log.info('e' * 9999, text='x' * 9999, list=['y' * 9999], number=10**9)")
    assert {len(entry[key]) for key in ("event", "text", "list")} == {256}
    assert entry["number"] == 10**9


def test_levels_below_the_chosen_one_are_silent() -> None:
    assert [e["event"] for e in logged("log.info('a'); log.warning('b')", "warning")] == ["b"]


def test_libraries_and_warnings_take_the_same_form() -> None:
    program = (
        "logging.getLogger('lib').info('quiet'); logging.getLogger('lib').error('loud %s', 1)\n"
    )
    entries = logged(program + "warnings.warn('old')")
    assert [entry["event"].split("\n")[0][:6] for entry in entries] == ["loud 1", "<strin"]
    assert {entry["process"] for entry in entries} == {"decode-0"}


def test_a_crash_is_one_line_that_ends_with_the_error() -> None:
    (entry,) = logged("def f(n): return f(n + 1)\nraise ValueError('end of ' + 'x' * 20000)")
    assert entry["event"] == "crashed"
    assert len(entry["exception"]) <= 8192
    assert entry["exception"].endswith("xxx")


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="'loud' is unknown; allowed: debug, info"):
        configure_logs("loud", "server")

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

SETUP = """from ops.logs import configure_logs; configure_logs('info', 'decode-0')
import structlog, logging, warnings; log = structlog.get_logger()
"""


def logged(program: str, level: str = "info") -> list[dict[str, Any]]:
    """Return the log lines of a process that runs this after configuring its logs."""
    setup = SETUP.replace("info", level)
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


def test_a_reader_that_stands_still_holds_up_nobody_and_hears_what_it_missed() -> None:
    program = f"{SETUP}for i in range(3000): log.info('x' * 200, i=i)\nprint('done', flush=True)\n"
    program += "input(); log.info('last', text='y' * 200)"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "done\n"  # nobody has read a line of the log yet
        first = json.loads(process.stderr.readline())
        # Room for what comes next.
        seen = [json.loads(process.stderr.readline()) for _ in range(50)]
        process.stdin.write("\n")
        process.stdin.flush()
        seen += [json.loads(line) for line in process.stderr]
    assert first["i"] == 0
    gap, last = seen[-2:]
    assert (gap["event"], last["event"]) == ("log_lines_dropped", "last")
    assert gap["lines"] + len(seen) + 1 - 2 == 3000

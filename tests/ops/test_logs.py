"""Tests of log output as read by another process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ops.logs import configure_logs
from triolet.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

SETUP = """from ops.logs import configure_logs; configure_logs('info', 'decode-0')
import structlog, logging, warnings; log = structlog.get_logger()
"""


def logged(program: str, level: str = "info") -> list[dict[str, Any]]:
    """Run code in a process with configured logs and return its log lines."""
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
    assert entry["raw"] == "\\xff"


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
        assert process.stdout.readline() == "done\n"  # no line of the log has been read yet
        first = json.loads(process.stderr.readline())
        # Make room for further lines.
        seen = [json.loads(process.stderr.readline()) for _ in range(50)]
        process.stdin.write("\n")
        process.stdin.flush()
        seen += [json.loads(line) for line in process.stderr]
    assert first["i"] == 0
    gap, last = seen[-2:]
    assert (gap["event"], last["event"]) == ("log_lines_dropped", "last")
    assert gap["lines"] + len(seen) + 1 - 2 == 3000


LOGGING = """for i in range(2000): log.info('x' * 200, i=i)
log.warning('a library') ; logging.getLogger('lib').error('loud')
print('done', flush=True)
"""


@pytest.mark.parametrize("kind", ["full disk", "reader gone", "full pipe", "full socket"])
def test_a_log_that_cannot_be_written_stops_nobody(kind: str) -> None:
    """Writing neither blocks nor raises, whatever stderr is; lines are dropped."""
    with unwritable(kind) as stderr:
        done = subprocess.run(
            [sys.executable, "-c", SETUP + LOGGING],
            stdout=subprocess.PIPE,
            stderr=stderr,
            timeout=60,
            check=True,
            text=True,
        )
    assert done.stdout == "done\n"


@contextmanager
def unwritable(kind: str) -> Iterator[int]:
    """Yield a descriptor that accepts no data."""
    with ExitStack() as stack:
        if kind == "full disk":
            yield stack.enter_context(Path("/dev/full").open("wb")).fileno()
        elif kind == "full socket":
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            stack.enter_context(theirs)
            fill(ours.fileno())
            yield ours.fileno()
        else:
            readable, writable = os.pipe()
            stack.callback(os.close, writable)
            if kind == "reader gone":
                os.close(readable)
            else:
                stack.callback(os.close, readable)
                fill(writable)
            yield writable


FILLING_UP = """import resource, sys
from ops.log_stream import LogStream
another = LogStream(sys.stderr)  # as of another process
def let_files_have(num_bytes):
    most = resource.RLIM_INFINITY if num_bytes is None else num_bytes
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
for turn in range(3):
    let_files_have(3_000 + 9_000 * turn)
    for i in range(50): log.info('x' * 200, i=i)
    let_files_have(None)
    another.write('{"event": "of another"}\\n')
    log.info('room', text='y' * 200)
"""


@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_a_disk_that_fills_up_tears_no_line_and_what_is_missing_is_counted(
    mode: str, tmp_path: Path
) -> None:
    with (tmp_path / "log").open(mode) as stderr:
        subprocess.run([sys.executable, "-c", SETUP + FILLING_UP], stderr=stderr, check=True)
    entries = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    events = [entry["event"] for entry in entries]
    assert (events.count("room"), events.count("of another")) == (3, 3)
    gaps = [entry["lines"] for entry in entries if entry["event"] == "log_lines_dropped"]
    assert len(gaps) == 3
    assert len([entry for entry in entries if "i" in entry]) + sum(gaps) == 3 * 50


READ_LATE = """import json, socket, sys
from ops.log_stream import LogStream
ours, theirs = socket.socketpair()
ours.setblocking(False)
def everything_there():
    parts = []
    try:
        while part := ours.recv(65536):
            parts.append(part)
    except BlockingIOError:
        return b''.join(parts)
stream = LogStream(theirs.makefile('w'))
for i in range(200):
    stream.write(json.dumps({'i': i, 'text': 'x' * 70_000}) + '\\n')
first = everything_there()
assert not first.endswith(b'\\n'), 'every line is whole already'
stream.write(json.dumps({'i': 200}) + '\\n')
sys.stdout.buffer.write(first + everything_there())
"""


def test_a_line_that_a_socket_took_in_part_is_completed_before_the_next() -> None:
    shown = subprocess.run([sys.executable, "-c", READ_LATE], capture_output=True, check=True)
    entries = [json.loads(line) for line in shown.stdout.splitlines()]
    gap, last = entries[-2:]
    assert last == {"i": 200}
    assert gap["lines"] == 200 - (len(entries) - 2)


def fill(descriptor: int) -> None:
    """Write until the pipe is full; a process that inherits it would block forever."""
    os.set_blocking(descriptor, False)
    with suppress(BlockingIOError):
        while os.write(descriptor, bytes(4096)):
            pass
    os.set_blocking(descriptor, True)


def test_lines_of_processes_that_share_a_pipe_stay_whole() -> None:
    program = SETUP + "for i in range(300): log.info('x' * 250, y='é' * 250, i=i)"
    readable, writable = os.pipe()
    with os.fdopen(readable, encoding="utf-8") as log:
        processes = [
            subprocess.Popen([sys.executable, "-c", program], stderr=writable) for _ in range(3)
        ]
        os.close(writable)
        entries = [json.loads(line) for line in log]
        assert [process.wait(60) for process in processes] == [0, 0, 0]
    dropped = sum(entry.get("lines", 0) for entry in entries)
    assert len([entry for entry in entries if "i" in entry]) + dropped <= 900

"""Tests of `triolet doctor --ledger` against fake servers with consistent and broken fleets."""

from __future__ import annotations

import io
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from rich.console import Console

from ops.cli import main
from ops.cli.ledger import SILENCE_S, run_ledger, show_ledger
from tests.threaded import running_server
from tests.triolet.audits import (
    ATTEMPT,
    OTHER_ATTEMPT,
    a_fleet,
    a_lease,
    a_server,
    a_view,
    a_worker,
    an_idle_fleet,
)
from triolet.audit import Doubt, FleetAudit
from triolet.invariants import check_invariants

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LEAK = a_fleet(unknown=(Doubt(OTHER_ATTEMPT, 9.0),))
SILENT = FleetAudit(2.0, a_server(), (a_view(None, silence="no answer within 1 s"),))


class CannedServer(ThreadingHTTPServer):
    """A server that sends its answers in order and then repeats the last one."""

    daemon_threads = True

    def __init__(self, answers: Sequence[tuple[int, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), CannedHandler)
        self.answers = list(answers)
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class CannedHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, CannedServer)
        self.server.paths.append(self.path)
        answers = self.server.answers
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


@contextmanager
def canned(*answers: FleetAudit | tuple[int, bytes]) -> Iterator[CannedServer]:
    """Run a server on loopback."""
    bodies = [(200, a.to_json()) if isinstance(a, FleetAudit) else a for a in answers]
    with running_server(CannedServer(bodies)) as server:
        yield server


def shown(audit: FleetAudit, width: int = 200) -> str:
    """Return the printed text."""
    screen = io.StringIO()
    show_ledger(audit, check_invariants(audit), Console(file=screen, width=width))
    return screen.getvalue()


def test_a_fleet_that_adds_up_is_said_to(capsys: pytest.CaptureFixture[str]) -> None:
    with canned(a_fleet()) as server:
        assert main(["doctor", "--ledger", server.url + "/"]) == 0
    assert server.paths == ["/fleet/audit"]
    out = capsys.readouterr().out
    assert "All blocks, leases and requests are consistent" in out
    assert ATTEMPT in out


def test_a_leak_is_explained_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    slept: list[float] = []
    with canned(LEAK) as server:
        assert run_ledger(server.url, as_json=False, sleep=slept.append) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert f"✗ I2 decode-0: attempt {OTHER_ATTEMPT}" in out
    assert "blocks are held for a request that is over" in out
    assert "→ restart this worker" in out
    assert "Violations: 1." in out


def test_what_may_be_a_frame_under_way_is_looked_at_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slept: list[float] = []
    doubtful = a_fleet(missing=(Doubt(ATTEMPT, 0.0),))
    with canned(doubtful, a_fleet()) as server:
        assert run_ledger(server.url, as_json=False, sleep=slept.append) == 0
    assert slept == [4.5]
    with canned(doubtful, a_fleet(missing=(Doubt(ATTEMPT, 4.5),))) as server:
        assert run_ledger(server.url, as_json=False, sleep=slept.append) == 1
    assert "checking again" in capsys.readouterr().err


def test_programs_get_it_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with canned(a_fleet(server=a_server(received=14))) as server:
        assert main(["doctor", "--ledger", server.url, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert [v["invariant"] for v in document["violations"]] == ["I9"]
    assert document["workers"][0]["audit"]["leases"][0]["attempt"] == ATTEMPT
    assert FleetAudit.from_json(json.dumps(document)) == a_fleet(server=a_server(received=14))


def test_a_worker_without_an_account_is_not_taken_for_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slept: list[float] = []
    with canned(SILENT, SILENT) as server:
        assert run_ledger(server.url, as_json=False, sleep=slept.append) == 1
    assert slept == [SILENCE_S]
    out = " ".join(capsys.readouterr().out.split())
    assert "decode-0 did not answer the audit: no answer within 1 s" in out
    assert "add up" not in out


def test_a_worker_that_was_only_late_is_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    slept: list[float] = []
    with canned(SILENT, a_fleet()) as server:
        assert run_ledger(server.url, as_json=False, sleep=slept.append) == 0
    assert slept == [SILENCE_S]
    assert "checking again in 2.0 s" in capsys.readouterr().err


def test_every_fact_that_leads_on_is_shown() -> None:
    worker = a_worker(dropped={"stale": 3}, leases=(a_lease(),))
    text = shown(a_fleet(worker))
    for word in ("90 / 100", "3 stale", "pid 7", "20 files", "50 of 64", "0.4 s ago", "570 s"):
        assert word in text
    idle = shown(an_idle_fleet())
    assert "Leases on" not in idle


def test_of_many_leases_the_oldest_are_shown() -> None:
    leases = tuple(a_lease(attempt=f"{n:032x}/0", num_blocks=0) for n in range(30))
    pool = replace(a_worker().pool, free_blocks=94, leased_blocks=0, references=0)
    worker = a_worker(leases=leases, num_leases=35, granted=44, pool=pool)
    text = shown(a_fleet(worker))
    assert f"{19:032x}/0" in text
    assert f"{20:032x}/0" not in text
    assert "15 newer ones" in text


def test_names_move_no_cursor_and_forge_no_line() -> None:
    text = shown(a_fleet(name="decode\x1b[2J\n✗ I1", state="[red]alive"))
    assert "\x1b[2J" not in text
    assert "\n✗ I1" not in text
    assert "[red]alive" in text


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((403, b'{"error": {"message": "ask from there"}}'), "answers 403: ask from there"),
        ((404, b"<html>"), "answers 404: the response is not from a Triolet server"),
        ((200, b"{}"), "is not an audit"),
    ],
)
def test_a_server_that_gives_no_audit_is_exit_2(
    answer: tuple[int, bytes], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with canned(answer) as server:
        assert main(["doctor", "--ledger", server.url]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "localhost:8000", "http://["])
def test_an_address_without_a_server_is_exit_2(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--ledger", url]) == 2
    err = capsys.readouterr().err
    assert err.startswith("triolet: ")
    assert err.count("\n") == 1


def test_a_hundred_columns_hold_every_fact_whole() -> None:
    lease = a_lease(attempt=f"{'f' * 32}/12", age_s=1234.5, renewed_ago_s=12.3)
    text = shown(a_fleet(a_worker(dropped={"stale": 3}, leases=(lease,))), width=100)
    assert max(map(len, text.splitlines())) <= 100
    for fact in (
        lease.attempt,
        "pid 7, 20 files, 9 tasks, 1 MiB",
        "KV in transfer: 0 B",
        "frames dropped: 3 stale",
        f"Leases on decode-0 of {lease.server}",
        "1234.5 s",
        "12.3 s ago",
    ):
        assert fact in text

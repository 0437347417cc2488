"""Tests of audits as JSON, and of the facts that a process reports about itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from triolet.audit import Doubt, FleetAudit, ProcessFacts
from triolet.process import process_facts

from .audits import ATTEMPT, a_fleet, a_server, a_view, a_worker

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
COUNTING = """
import json, os, sys, threading
import msgspec
from triolet.process import process_facts

def tell(facts):
    print(json.dumps(msgspec.structs.asdict(facts)))

print(os.getpid())
tell(process_facts(tasks=3))
done = threading.Event()
thread = threading.Thread(target=done.wait)
thread.start()
with open(sys.argv[1], "w"):
    tell(process_facts(tasks=None))
done.set()
thread.join()
"""


def test_an_audit_survives_its_form_as_json() -> None:
    audit = a_fleet(unknown=(Doubt(ATTEMPT, 1.5),))
    assert FleetAudit.from_json(audit.to_json()) == audit
    silent = FleetAudit(2.0, a_server(), (a_view(None, silence="it is dead"),))
    assert FleetAudit.from_json(silent.to_json()) == silent
    assert silent.answered == ()


def test_fields_of_a_later_release_are_ignored() -> None:
    document = json.loads(a_fleet().to_json())
    document["violations"] = []
    document["server"]["moon"] = "full"
    document["workers"][0]["audit"]["pool"]["colour"] = "red"
    assert FleetAudit.from_json(json.dumps(document)) == a_fleet()


@pytest.mark.parametrize("document", [b"", b"[]", b"{}", b'{"grace_s": 2, "server": {}}'])
def test_what_is_no_audit_is_refused(document: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        FleetAudit.from_json(document)


def test_a_list_that_was_cut_says_so() -> None:
    assert not a_worker().is_cut
    assert replace(a_worker(), num_leases=2).is_cut


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system has no /proc")
def test_a_process_counts_its_files_and_threads(tmp_path: Path) -> None:
    """In a separate process: in this one, leftovers of earlier tests may end in between."""
    counted = subprocess.run(
        [sys.executable, "-c", COUNTING, str(tmp_path / "file")],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    pid, before, after = (json.loads(line) for line in counted.stdout.splitlines())
    assert (before["pid"], before["tasks"]) == (pid, 3)
    assert before["rss_bytes"] > 2**20
    assert after["open_fds"] == before["open_fds"] + 1
    assert after["threads"] == before["threads"] + 1


def test_a_system_that_does_not_say_is_no_error(tmp_path: Path) -> None:
    assert process_facts(4, tmp_path / "nowhere") == ProcessFacts(pid=os.getpid(), tasks=4)
    (tmp_path / "fd").mkdir()
    (tmp_path / "status").write_text("Name: triolet\n")
    facts = process_facts(4, tmp_path)
    assert (facts.threads, facts.rss_bytes) == (None, None)

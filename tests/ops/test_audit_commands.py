"""Tests of audit entries of administrative commands, and of `triolet audit`."""

from __future__ import annotations

import csv
import io
import json
import shutil
from typing import TYPE_CHECKING, Any, Final

import pytest
import trio

from ops import running_fleets
from ops.audit.events import Action, digest, os_user
from ops.audit.recording import record
from ops.cli import main
from ops.cli.fleet_commands import run_restart
from ops.exit_codes import CommandFailed
from ops.running_fleets import Note, RunningFleet
from ops.supervisor.supervisor_socket import OrderFinished, OrderRefused, answer_commands
from tests.gguf_files import write_tiny
from tests.house.test_layout import ROOT
from tests.ops.audit.proofs import check_proof

if TYPE_CHECKING:
    from pathlib import Path

    from ops.supervisor.supervisor_socket import Answer, Request, Tell

PATIENCE_S: Final = 60.0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use temporary directories for the user's state and for output of commands."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def audit(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Return the output lines of `triolet audit`."""
    capsys.readouterr()
    assert main(["audit", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def exported(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in audit(capsys, "export", *arguments)]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(arguments) != 0
    out, err = capsys.readouterr()
    assert not out
    return err


def test_commands_of_tenants_record_who_changed_which_and_the_files_digests(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = place / "tenants.toml"
    digests: list[str | None] = [None]
    for command in ("add", "rotate", "disable", "enable"):
        assert main(["tenant", command, "alice"]) == 0
        digests.append(digest(file.read_bytes()))
    key = capsys.readouterr().out.split()[0]
    entries = exported(capsys)[1:]
    begun, done = entries[::2], entries[1::2]
    for number, action in enumerate(("add", "rotate", "disable", "enable")):
        for entry, outcome in ((begun[number], "begun"), (done[number], "done")):
            assert entry["action"] == f"tenant.{action}"
            assert (entry["subject"], entry["actor"]) == ("alice", os_user())
            assert entry["outcome"] == outcome
            assert entry.get("before") == digests[number]
        assert done[number]["after"] == digests[number + 1]
        assert begun[number]["request_id"] == done[number]["request_id"]
    written = (place / "state/triolet/audit/0000000000000000.jsonl").read_text()
    assert key.startswith("sk-triolet-")
    assert key not in written


@pytest.mark.usefixtures("place")
def test_a_refused_change_is_no_change_and_leaves_no_entry(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["tenant", "add", "alice"]) == 0
    assert "tenant alice already exists" in refused(capsys, "tenant", "add", "alice")
    assert "no tenant is called 'bob'" in refused(capsys, "tenant", "rotate", "bob")
    assert len(exported(capsys)) == 3


def test_a_change_that_cannot_be_recorded_is_not_made(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "file").write_text("")
    there = str(place / "file" / "audit")
    told = refused(capsys, "tenant", "add", "alice", "--audit", there)
    assert "cannot be written: Not a directory; nothing was recorded: free disk space there" in told
    assert "--audit" in told
    told = refused(capsys, "keys", "make", "keys", "--audit", there)
    assert "nothing was recorded" in told
    assert [path.name for path in place.iterdir()] == ["file"]


def test_a_change_that_fails_is_recorded_as_failed(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for code in (0, 2):
        assert main(["keys", "make", "keys"]) == code
    *_, done, begun, failed = exported(capsys)
    assert (done["outcome"], begun["outcome"], failed["outcome"]) == ("done", "begun", "failed")
    assert failed["reason"] == "invalid input"
    assert {one["subject"] for one in (done, begun, failed)} == {str(place / "keys")}


def test_another_folder_has_a_log_of_its_own(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tenant", "add", "alice", "--audit", "here"]) == 0
    assert len(exported(capsys, "--audit", "here")) == 3
    assert "has no audit log" in refused(capsys, "audit", "show")
    assert not (place / "state").exists()


def test_every_action_is_explained() -> None:
    page = (ROOT / "docs" / "AUDIT.md").read_text(encoding="utf-8")
    rows = "".join(line for line in page.splitlines() if line.startswith("| `"))
    assert {action for action in Action if f"`{action.value}`" not in rows} == set()


class Supervisor:
    """A supervisor that answers a restart request."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = answers

    async def restart(self, request: Request, tell: Tell) -> None:
        del request
        for answer in self._answers:
            await tell(answer)


@pytest.mark.parametrize("answer", [OrderFinished(), OrderRefused("not now")])
async def test_a_restart_is_recorded_with_its_roles_and_its_end(
    place: Path,
    answer: Answer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fleet = RunningFleet(place, Note(8000, "http://127.0.0.1", {"decode-0": "ipc:///x"}))
    monkeypatch.setattr(running_fleets, "running_fleets", lambda: [fleet])
    log = place / "log"
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            supervisor = Supervisor(answer)
            await nursery.start(answer_commands, fleet.supervisor_socket, supervisor.restart)
            try:
                await trio.to_thread.run_sync(run_restart, [], ["decode"], None, log)
            except CommandFailed:
                assert isinstance(answer, OrderRefused)
            nursery.cancel_scope.cancel()
    begun, ended = exported(capsys, "--audit", str(log))[1:]
    assert {(one["action"], one["subject"]) for one in (begun, ended)} == {
        ("fleet.restart", "port 8000: decode")
    }
    assert ended["outcome"] == ("done" if isinstance(answer, OrderFinished) else "failed")


def test_commands_of_models_record_the_versions(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--store", str(place / "store"))
    file = write_tiny(place / "file.gguf")
    assert main(("model", "import", str(file), "--name", "tiny", *where)) == 0
    version = capsys.readouterr().out.strip()
    for words in (
        ("tag", "tiny", "v1"),
        ("alias", "tiny@stable", "tiny:v1"),
        ("alias", "tiny@stable", "tiny:v1"),
        ("rm", "tiny:v1"),
        ("rm", "tiny@stable"),
        ("gc",),
    ):
        assert main(("model", *words, *where)) == 0
    done = [entry for entry in exported(capsys) if entry["outcome"] == "done"]
    told = [
        (entry["action"], entry["subject"], entry.get("before"), entry.get("after"))
        for entry in done
        if entry["action"].startswith("model.")
    ]
    assert told == [
        ("model.import", "tiny", None, version),
        ("model.tag", "tiny:v1", None, version),
        ("model.alias", "tiny@stable", None, version),
        ("model.alias", "tiny@stable", version, version),
        ("model.rm", "tiny:v1", None, None),
        ("model.rm", "tiny@stable", version, None),
        ("model.gc", str(place / "store"), None, None),
    ]
    assert done[-1]["counts"]["blobs"] > 0
    assert main(("model", "tag", "tiny", "v1", *where)) != 0
    capsys.readouterr()
    assert [entry["action"] for entry in exported(capsys)][-1] == "model.gc", "nothing began"


def test_a_drain_is_recorded(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"ipc://{place}/x/nobody"
    assert "no directory" in refused(capsys, "drain", address)
    begun, ended = exported(capsys)[1:]
    assert {(one["action"], one["subject"]) for one in (begun, ended)} == {
        ("worker.drain", address)
    }
    assert (ended["outcome"], ended["reason"]) == (
        "failed",
        "invalid input",
    )


def test_what_a_killed_process_left_does_not_mix_with_a_new_key(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tenant", "add", "alice"]) == 0
    capsys.readouterr()
    with (place / "state/triolet/audit/0000000000000000.jsonl").open("ab") as file:
        file.write(b'{"entry"')
    assert main(["tenant", "add", "bob"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("sk-triolet-")
    assert out.count("\n") == 1
    assert "audit_log_tail_cut" in err


@pytest.mark.usefixtures("place")
def test_show_filters_by_time_and_action(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tenant", "add", "alice"]) == 0
    record(Action.MODEL_GC, "blobs", counts={"bytes": 4096}, request_id="gc-1")
    lines = audit(capsys, "show")
    assert len(lines) == 4
    assert lines[3].split()[2:] == [
        os_user(),
        *"model.gc done blobs bytes=4096 request=gc-1".split(),
    ]
    assert audit(capsys, "show", "--action", "model.gc") == lines[3:]
    assert audit(capsys, "show", "--action", "tenant", "--action", "log.begin") == lines[:3]
    assert audit(capsys, "show", "--since", "1h") == lines
    assert audit(capsys, "show", "--since", "2020-01-01") == lines
    assert audit(capsys, "show", "--since", "9999-01-01T00:00:00+02:00") == []
    third = lines[2].split()[1]
    assert audit(capsys, "show", "--since", third) == lines[2:]
    for word in ("yesterday", "24", "999999d", "9999-12-31T23:00:00-12:00"):
        assert f"--since is '{word}'; allowed: " in refused(
            capsys, "audit", "show", "--since", word
        )
    assert "allowed: adapter, adapter.load" in refused(
        capsys, "audit", "show", "--action", "tenants"
    )


def test_verify_says_how_far_the_log_can_be_trusted(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("alice", "bob"):
        assert main(["tenant", "add", name]) == 0
    folder = place / "state/triolet/audit"
    kept = place / "kept"
    kept.write_text("".join(f"{line}\n" for line in audit(capsys, "head")))
    (line,) = audit(capsys, "verify", "--heads", str(kept))
    assert line == f"{folder}: 5 entries match 4 signed heads, 1 kept elsewhere"
    path = folder / "0000000000000000.jsonl"
    content = path.read_bytes()
    path.write_bytes(content + b'{"entry"')
    assert "a process was killed while writing it" in audit(capsys, "verify")[0]
    path.write_bytes(content.replace(b'"bob"', b'"eve"'))
    assert main(["audit", "verify"]) == 1
    out = capsys.readouterr().out
    assert f"wrong: {path.name}, line 4: entry 3 was altered" in out
    assert "entries 0 to 2 match the head signed at 20" in out
    assert "compare it with a copy or with heads kept elsewhere" in out
    assert main(["audit", "verify", "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)
    assert [one["line"] for one in verdict["defects"]] == [4, 5]
    path.write_bytes(content)
    shutil.copy(kept, folder / "heads.jsonl")
    assert main(["audit", "verify"]) == 1
    assert "no signed head can be trusted" in capsys.readouterr().out


@pytest.mark.usefixtures("place")
def test_a_proof_and_an_export_are_for_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tenant", "add", "alice"]) == 0
    entries = exported(capsys)
    (proof,) = audit(capsys, "prove", "1")
    assert check_proof(proof) == entries[1]
    assert "covers entries 0 to 2, not 3" in refused(capsys, "audit", "prove", "3")
    record(Action.MODEL_GC, 'a "b", c', counts={"bytes": 1})
    rows = list(csv.DictReader(io.StringIO("\n".join(audit(capsys, "export", "--format", "csv")))))
    assert [row["action"] for row in rows] == [
        *("log.begin", "tenant.add", "tenant.add", "model.gc")
    ]
    assert (rows[3]["subject"], json.loads(rows[3]["counts"])) == ('a "b", c', {"bytes": 1})

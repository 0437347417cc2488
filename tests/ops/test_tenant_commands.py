"""Tests of `triolet tenant`: it keeps formatting, and never writes a file that servers refuse."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import pytest

from ops.audit.events import Action
from ops.cli import main, tenant_edit
from ops.cli.tenant_edit import Change, edited, rotate_keys
from ops.cli.usage_commands import words_for_missing
from triolet.errors import ConfigError
from triolet.tenants.api_keys import KEY_PREFIX, digest_of
from triolet.tenants.form import MAX_KEYS, read_tenants
from triolet.tenants.plans import Tenant, TenantRole, Tenants

if TYPE_CHECKING:
    from pathlib import Path

CHANGE: Final = Change(Action.TENANT_ROTATE, "alice", None)
NOW: Final = datetime(2030, 1, 1, tzinfo=UTC)
BY_HAND: Final = f"""\
# written by hand
cache_secret = "{"0f" * 32}"   # stays

[plans.gold] # for those who pay
weight = 4

# the first of all
[tenants.alice]
plan = "gold"
keys = ["sha256:{digest_of("one")}"] # from long ago
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(BY_HAND)
    return path


def run(command: str, path: Path) -> int:
    return main(["tenant", *command.split(), "--tenants", str(path)])


def read(path: Path) -> Tenants:
    return read_tenants(path.read_bytes(), str(path))


def owner(path: Path, key: str) -> Tenant | None:
    found = read(path).of_digest(digest_of(key))
    return None if found is None else found[0]


def test_the_first_tenant_makes_a_file_that_only_its_owner_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tenants.toml"
    assert run("add alice", path) == 0
    out, err = capsys.readouterr()
    key = out.strip()
    assert key.startswith(KEY_PREFIX)
    assert key not in err
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    alice = owner(path, key)
    assert alice is not None
    assert (alice.name, alice.plan.name, alice.role) == ("alice", "default", TenantRole.USER)
    assert os.listdir(tmp_path) == ["tenants.toml"]


def test_what_was_written_by_hand_stays_as_it_was(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        "add bob --plan gold --role operator",
        "rotate alice",
        "disable alice",
        "enable alice",
    ):
        assert run(command, path) == 0, command
    text = path.read_text()
    for line in BY_HAND.splitlines()[:-1]:
        assert line in text
    bob = read(path).by_name["bob"]
    assert (bob.plan.weight, bob.role) == (4.0, TenantRole.OPERATOR)
    assert capsys.readouterr().out.count(KEY_PREFIX) == 2


def test_a_command_that_does_not_end_is_not_waited_for_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tenant_edit, "LOCK_TIMEOUT_S", 0.0)
    before = path.read_bytes()
    other = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert run("add bob", path) == 2
        assert "another command has locked" in capsys.readouterr().err
        assert path.read_bytes() == before
    finally:
        os.close(other)
    assert run("add bob", path) == 0


def test_a_disabled_tenant_keeps_its_keys(path: Path) -> None:
    for command, is_disabled in (("disable alice", True), ("enable alice", False)) * 2:
        assert run(command, path) == 0
        alice = owner(path, "one")
        assert alice is not None
        assert alice.is_disabled is is_disabled


def test_old_keys_end_when_the_grace_is_over_and_none_lives_longer_for_it(path: Path) -> None:
    for grace_s, key, now in ((3600.0, "two", NOW), (7200.0, "three", NOW + timedelta(hours=0.5))):
        with edited(path, CHANGE) as document:
            rotate_keys(document, "alice", key, grace_s, now)
    end = NOW.timestamp()
    assert {key.digest: key.until for key in read(path).by_name["alice"].keys} == {
        digest_of("one"): end + 3600,
        digest_of("two"): end + 1800 + 7200,
        digest_of("three"): None,
    }
    with edited(path, CHANGE) as document:
        rotate_keys(document, "alice", "four", 60.0, NOW + timedelta(hours=1))
    assert {key.digest for key in read(path).by_name["alice"].keys} == {
        digest_of("two"),
        digest_of("three"),
        digest_of("four"),
    }


def test_now_ends_the_old_keys_at_once(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("rotate alice --now", path) == 0
    assert owner(path, "one") is None
    assert owner(path, capsys.readouterr().out.strip()) is not None


def test_what_a_server_would_refuse_is_not_written(path: Path) -> None:
    for number in range(MAX_KEYS - 1):
        with edited(path, CHANGE) as document:
            rotate_keys(document, "alice", f"key {number}", 3600.0, NOW)
    before = path.read_text()
    with pytest.raises(ConfigError, match="keys must be"), edited(path, CHANGE) as document:
        rotate_keys(document, "alice", "one more", 3600.0, NOW)
    assert path.read_text() == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("add alice", "tenant alice already exists"),
        ("add a/b", "'a/b' is not a tenant name"),
        ("add bob --plan silver", "plan is 'silver', which is not one of default, gold"),
        ("rotate bob", "no tenant is called 'bob'"),
        ("rotate alice --grace soon", "--grace is 'soon'; allowed"),
        ("disable bob", "no tenant is called 'bob'"),
        ("show bob", "no tenant is called 'bob'"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(
    path: Path, command: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, path) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert path.read_text() == BY_HAND


@pytest.mark.parametrize("command", ["list", "show a", "rotate a", "disable a", "enable a"])
def test_only_add_makes_a_file(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, tmp_path / "none") == 2
    assert "none" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_a_broken_file_is_named_and_stays(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("x = ", BY_HAND + "[tenants.bob]\nrole = 'king'\n"):
        path.write_text(text)
        assert run("disable alice", path) == 2
        assert str(path) in capsys.readouterr().err
        assert path.read_text() == text


def test_a_link_stays_a_link(tmp_path: Path, path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    assert run("disable alice", link) == 0
    assert link.is_symlink()
    assert read(path).by_name["alice"].is_disabled


def test_tenants_are_listed_for_people_and_for_programs(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("add bob --role operator", path) == 0
    assert run("rotate alice --grace 7d", path) == 0
    capsys.readouterr()
    assert run("list", path) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["tenant", "plan", "role", "keys", "state"],
        ["alice", "gold", "user", "2", "enabled"],
        ["bob", "default", "operator", "1", "enabled"],
    ]
    assert run("list --json", path) == 0
    alice, bob = json.loads(capsys.readouterr().out)
    assert (alice["plan"], bob["role"], bob["disabled"]) == ("gold", "operator", False)
    assert run("show alice", path) == 0
    shown = capsys.readouterr().out
    for words in (digest_of("one")[:12], "until", "weight                4", "no limit"):
        assert words in shown
    assert digest_of("one") not in shown
    assert run("show alice --json", path) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["weight"], plan["classes"]) == (4.0, ["default", "sheddable", "batch"])


def test_usage_says_whose_parts_are_missing() -> None:
    whole, part = ({"servers": {"counted": n, "all": 3}} for n in (3, 2))
    assert words_for_missing([]) == words_for_missing([whole]) == ""
    assert words_for_missing([whole, part]).startswith("Counts 2 of 3 servers")

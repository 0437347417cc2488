"""Tests of a user's data and config folders, and of error messages for a user without a home
directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from triolet.errors import ConfigError
from triolet.home import cache_home, data_home, expanded, state_home

TIMEOUT_S = 60.0
NOBODY = 54321
COMMANDS = """
import encodings.idna, os, sys  # for host names; Python itself may be in root's home
import store.registry.client
from ops.cli import main
store.registry.client.FIRST_DELAY_S = 0.0
for name in list(os.environ):
    if name == "HOME" or name.startswith(("XDG_", "DOCKER_")):
        del os.environ[name]
os.setuid(54321)
for command in sys.argv[1:]:
    sys.stderr.write(f"{command}: ")
    sys.stderr.write(f"= {main(tuple(command.split()))}\\n")
"""


def test_absolute_variables_count_and_relative_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for variable, found, default in (
        ("XDG_CACHE_HOME", cache_home, ".cache"),
        ("XDG_DATA_HOME", data_home, ".local/share"),
        ("XDG_STATE_HOME", state_home, ".local/state"),
    ):
        for value, expected in (("", default), ("here", default), ("/there", "/there")):
            monkeypatch.setenv(variable, value)
            assert found() == Path("/home/me") / expected


def test_the_home_of_a_user_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="~no-such-user/x begins with ~no-such-user, which"):
        expanded(Path("~no-such-user/x"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes a user without a home")
def test_commands_of_a_user_without_a_home_say_what_to_set(tmp_path: Path) -> None:
    """In a separate process, which changes its user for good."""
    store = tmp_path / "store"
    commands = (
        "model list",
        f"model pull oci://127.0.0.1:1/chat:v1 --store {store} --audit {tmp_path}",
        "audit show",
        "serve demo --set fleet.store=~/models",
    )
    program = [sys.executable, "-c", COMMANDS, *commands]
    process = forked.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    said = errors.decode()
    assert process.returncode == 0, said
    assert "Traceback" not in said
    listed, pulled, shown, served = said.split("= ")[:4]
    assert f"this user (uid {NOBODY}) has no home directory: set XDG_DATA_HOME or HOME" in listed
    assert "127.0.0.1:1/chat" in pulled, "missing Docker files are not an error"
    assert "no home directory" not in pulled
    assert "set XDG_STATE_HOME or HOME" in shown
    assert "~/models begins with ~, which has no home directory here" in served

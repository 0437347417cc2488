"""Tests of selecting the running fleet for a command."""

from __future__ import annotations

import io
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ops.chosen_fleet import fleet_to_change, fleet_to_show
from ops.cli import main
from ops.cli.commands import EXIT_INTERRUPTED
from ops.exit_codes import EXIT_BAD_INPUT
from ops.private_directory import private_directory
from ops.running_fleets import Note, home, write_note
from triolet.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

CHANGES = (
    "restart",
    "drain decode-0",
    "drain chat.decode-7",
    "scale decode=2",
    "model load chat",
    "model sleep chat",
    "model wake chat",
    "model unload chat",
    "model add code=demo",
    "model drop chat",
    "adapter load chat:sql=/tmp",
    "adapter unload chat:sql",
)


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """This process's runtime directory, and another one that is searched for fleets."""
    with (
        tempfile.TemporaryDirectory(prefix="own-") as own,
        tempfile.TemporaryDirectory(prefix="other-") as other,
    ):
        monkeypatch.setenv("XDG_RUNTIME_DIR", own)
        monkeypatch.setattr("tempfile.gettempdir", lambda: other)
        yield Path(own), Path(other)


def note(port: int, *models: str, place: str | None = None) -> Note:
    url = "http://127.0.0.1:1"
    return Note(port, url, {"decode-0": "ipc:///x"}, models, 1, home() if place is None else place)


@pytest.fixture
def foreign(places: tuple[Path, Path]) -> Iterator[Path]:
    """The directory of the only fleet, which is in another runtime directory."""
    with private_directory(places[1]) as directory:
        write_note(directory, note(7000, "chat", "code"))
        yield directory


@pytest.mark.parametrize("command", CHANGES)
def test_no_command_changes_the_fleet_of_another_place_unless_its_port_is_named(
    command: str, foreign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == EXIT_BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert f"port 7000 (chat, code) in {foreign}; to select it, add --port 7000" in line
    assert fleet_to_change(7000).directory == foreign


def test_a_fleet_of_another_home_is_another_one(places: tuple[Path, Path]) -> None:
    with private_directory(places[0]) as directory:
        write_note(directory, note(7000, "chat", place="/home/somebody"))
        with pytest.raises(ConfigError, match="the only fleet here has another home"):
            fleet_to_change(None)
        write_note(directory, note(7000, "chat"))
        assert fleet_to_change(None).directory == directory


@pytest.mark.parametrize("command", CHANGES)
def test_no_command_chooses_the_fleet_that_it_changes(
    command: str,
    foreign: Path,
    places: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with private_directory(places[0]) as own:
        write_note(own, note(8000, "demo"))
        assert main(command.split()) == EXIT_BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 fleets run here, on ports 7000, 8000; select one with --port" in line
    assert f"port 7000 (chat, code) in {foreign}; port 8000 (demo) in {own}" in line


class Terminal(io.StringIO):
    """A terminal with typed input."""

    def isatty(self) -> bool:
        return True


def at_a_terminal(typed: str, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    shown = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    monkeypatch.setattr("sys.stderr", shown)
    return shown


def test_a_terminal_is_asked_which_fleet_is_meant(
    foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = at_a_terminal("7000\n", monkeypatch)
    assert fleet_to_change(None).directory == foreign
    assert f"port 7000 (chat, code) in {foreign}" in shown.getvalue()
    assert shown.getvalue().endswith("Port of the fleet: ")
    at_a_terminal("\n", monkeypatch)
    with pytest.raises(ConfigError, match=re.escape("no single fleet here has port ''")):
        fleet_to_change(None)
    at_a_terminal("", monkeypatch)
    assert main(["restart"]) == EXIT_INTERRUPTED


def test_what_only_shows_says_which_fleet_it_shows(
    foreign: Path, places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert fleet_to_show(None).directory == foreign
    said = f"showing the fleet on port 7000 (chat, code) in {foreign}; use --port for another one\n"
    assert capsys.readouterr() == ("", said)
    with private_directory(places[0]) as own:
        write_note(own, note(8000, "demo"))
        assert fleet_to_show(None).directory == own
        assert f"showing the fleet on port 8000 (demo) in {own}" in capsys.readouterr().err
        with private_directory(places[0]) as second:
            write_note(second, note(8001, "demo"))
            with pytest.raises(ConfigError, match="3 fleets run here"):
                fleet_to_show(None)
    assert fleet_to_show(7000).directory == foreign
    assert capsys.readouterr().err == ""

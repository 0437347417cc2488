"""Tests of waiting for an operation of control, with a timeout."""

from __future__ import annotations

import tempfile
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer
from typing import TYPE_CHECKING

import pytest

from ops.cli import main, model_orders
from ops.cli.model_orders import run_order
from ops.exit_codes import EXIT_BAD_INPUT, CommandFailed
from tests.threaded import running_server

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDLESS = b'{"id": "1", "status": "running", "progress": "chat: loading"}'


class Endless(BaseHTTPRequestHandler):
    """A control process that never ends an operation."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(ENDLESS)))
        self.end_headers()
        self.wfile.write(ENDLESS)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def path() -> Iterator[Path]:
    """The socket of a control process that never ends an operation."""
    with (
        tempfile.TemporaryDirectory(prefix="orders-") as name,
        running_server(UnixStreamServer(str(Path(name) / "admin"), Endless)),
    ):
        yield Path(name) / "admin"


def test_an_operation_that_does_not_end_is_left_with_a_word_on_how_to_follow_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_orders, "WAIT_S", 0.3)
    with pytest.raises(CommandFailed, match=r"wake chat has not ended after 0 s \(chat: loading\)"):
        run_order(path, "chat", "wake")
    assert capsys.readouterr().out.count("chat: loading") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("add", "code"), "'code' is not NAME=MODEL; give both"),
        (("add", "code="), "'code=' is not NAME=MODEL; give both"),
        (
            ("add", "code=demo"),
            "change `server.models`, start the workers, and restart the servers",
        ),
        (("drop", "code"), "no `triolet serve` of this user runs here"),
    ],
)
def test_what_has_no_fleet_or_no_model_is_refused(
    arguments: tuple[str, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert main(("model", *arguments)) != 0
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("load", "chat:sql"), "'chat:sql' is not MODEL:NAME=REF; give all three, such as"),
        (("load", "sql=chat-sql:v1"), "'sql' is not MODEL:NAME; give both"),
        (("load", "chat:sql="), "is not MODEL:NAME=REF; give all three"),
        (("unload", "chat"), "'chat' is not MODEL:NAME; give both"),
        (("unload", "a/b:c"), "'a/b:c' is not MODEL:NAME"),
    ],
)
def test_what_names_no_adapter_is_refused_before_anything_is_asked(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(("adapter", *arguments)) == EXIT_BAD_INPUT
    assert words in " ".join(capsys.readouterr().err.split())

"""Tests of the command line's errors: one line with cause and remedy, and the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from ops.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONTROL = "--set worker.control_address=ipc:///tmp/nowhere"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("--foo", ["No such option: --foo", "triolet --help"]),
        ("bogus", ["No such command 'bogus'"]),
        ("serve --port x", ["'--port'", "integer", "triolet serve --help"]),
        ("serve --port 65536", ["server.port is 65536", "65535", "(--port)"]),
        ("serve --dtype int4", ["'--dtype'", "auto", "bfloat16"]),
        (
            "serve --prefill 0 --set server.routing.local_prefill=off",
            ["fleet.prefill is 0", "1 to 64"],
        ),
        ("serve --prefill -1", ["fleet.prefill is -1", "0 to 64", "(--prefill)"]),
        (
            "serve --set server.routing.local_prefill=maybe",
            ["server.routing.local_prefill is 'maybe'", "off", "auto", "always"],
        ),
        (
            "serve --set server.tool_parser=vicuna",
            ["'vicuna'", "auto", "hermes", "pythonic", "harmony"],
        ),
        (
            "serve --set worker.engine.prompt_chunk_tokens=0",
            ["worker.engine.prompt_chunk_tokens is 0", ">= 1"],
        ),
        ("serve --decode 1000", ["fleet.decode is 1000"]),
        ("serve --kv-pool lots", ["'lots'", "512MiB"]),
        ("serve --set worker.engine.block_size=0", ["worker.engine.block_size is 0"]),
        (
            "serve --set worker.engine.max_num_batched_tokens=3",
            ["worker.engine.max_num_batched_tokens is 3", "block_size (16)"],
        ),
        ("serve --set link.peer_timeout_s=0.1", ["link.peer_timeout_s is 0.1"]),
        ("serve --set server.token_window=0", ["server.token_window is 0", ">= 1"]),
        ("serve --set server.stall_timeout_s=-1", ["server.stall_timeout_s is -1;", "> 0"]),
        ("serve --set server.drain_timeout_s=-1", ["server.drain_timeout_s is -1.0", ">= 0"]),
        ("serve --set server.metrics_compat=foo", ["metrics_compat is 'foo'", "none, vllm"]),
        ("serve --log-level loud", ["'loud'", "debug, info, warning, error"]),
        ("serve --host no.such.host.invalid", ["no.such.host.invalid", "127.0.0.1"]),
        ("serve /no/such/model", ["/no/such/model does not exist", "Hugging Face"]),
        ("serve someone/some-model", ["hf download someone/some-model"]),
        (
            "server --set server.routing.local_prefill=off",
            ["no prefill worker", "--set server.prefill_addresses=ADDRESS"],
        ),
        ("server", ["no decode worker", "--set server.decode_addresses=ADDRESS"]),
        ("server --set server.prefill_addresses=ipc:///p", ["no decode worker"]),
        (
            "server /no/such/model --set server.members_file=members.json",
            ["/no/such/model does not exist"],
        ),
        ("serve --set server.members_file=members.json", ["for a role that runs alone"]),
        ("serve --set server.membership.dns.decode=d:1", ["for a role that runs alone"]),
        ("serve --set worker.membership.redis.url=redis://h", ["for a role that runs alone"]),
        (
            "server /no/such/model --set server.membership.redis.url=redis://h",
            ["/no/such/model does not exist"],
        ),
        (
            "server --set server.membership.redis.url=redis://h --set server.members_file=m",
            ["server.members_file and server.membership.redis are set"],
        ),
        ("serve --host 0.0.0.0", ["host is '0.0.0.0'", "--allow-remote-clients"]),
        ("serve --set worker.control_address=ipc:///x", ["for a role that runs alone"]),
        ("prefill", ["prefill.control_address is missing"]),
        ("decode " + CONTROL, ["decode.kv_address is missing"]),
        (f"prefill /no/such/model {CONTROL}", ["/no/such/model does not exist"]),
        ("chat --url nonsense", ["--url is 'nonsense'", "http://127.0.0.1:8000"]),
        ("chat --temperature 3", ["'--temperature'"]),
        ("keys make", ["'DIR'"]),
        ("tenant add a/b", ["'a/b' is not a tenant name"]),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(
    command: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("triolet: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("role", "document", "words"),
    [
        ("server", {}, "no decode worker is named"),
        ("prefill", {}, "prefill.control_address is missing"),
        ("decode", {"decode": {"control_address": "ipc:///x"}}, "decode.kv_address is missing"),
        ("decode", {"decode": {"name": 1}}, "decode.name is 1"),
        ("decode", {"bogus": {}}, "bogus"),
    ],
)
def test_a_role_with_settings_on_its_input_alone_answers_as_one_with_more_arguments(
    role: str, document: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without other arguments, this is the form of the supervisor, which is parsed without
    Typer."""
    said = []
    for more in ([], ["--set", "process.log_level=info"]):
        with given_on_stdin(json.dumps(document).encode() + b"\n"):
            code = main([role, "--config", "-", *more])
        said.append((code, *capsys.readouterr()))
    assert said[0] == said[1]
    assert said[0][0] == 2
    assert words in said[0][2]


@contextmanager
def given_on_stdin(content: bytes) -> Iterator[None]:
    """Replace file descriptor 0 by a pipe with this content that stays open."""
    reads, writes = os.pipe()
    os.write(writes, content)
    kept = os.dup(0)
    os.dup2(reads, 0)
    try:
        yield
    finally:
        os.dup2(kept, 0)
        for fd in (kept, reads, writes):
            os.close(fd)


def test_a_server_that_is_not_there_is_no_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 1
    assert "triolet serve" in capsys.readouterr().err
    assert main(["tenant", "usage", "--url", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["keys"], ["tenant"]])
def test_without_a_command_there_is_help_and_no_complaint(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert "Usage: triolet" in out
    assert err == ""


@pytest.mark.parametrize("command", "serve server prefill decode chat doctor".split())
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"Usage: triolet {command}" in out
    assert "supervisor-pid" not in out


@pytest.mark.parametrize("word", ["version", "--version"])
def test_the_version_is_printed(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    assert capsys.readouterr().out.startswith("triolet 0.")


def test_keys_are_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "keys"
    assert main(["keys", "make", str(directory)]) == 0
    assert (directory / "key.secret").stat().st_mode & 0o777 == 0o600
    assert (directory / "key.public").read_text().strip() in capsys.readouterr().out
    assert main(["keys", "make", str(directory)]) == 2
    assert "already has keys" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["['--help']", "['server', '/no/such/model']"])
def test_torch_is_not_loaded_by_what_needs_none(arguments: str) -> None:
    program = (
        f"import sys; from ops.cli import main; main({arguments}); "
        "import server.main; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_reader_that_leaves_gets_no_traceback() -> None:
    readable, writable = os.pipe()
    os.close(readable)  # before it can report anything
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ops.cli", "serve", "--help"],
            check=False,
            stdout=writable,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    finally:
        os.close(writable)
    assert (done.returncode, done.stderr) == (1, b"")

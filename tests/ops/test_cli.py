"""What the command line answers to bad input: one line that names cause and remedy, and a code."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ops.cli import main

if TYPE_CHECKING:
    from pathlib import Path

CONTROL = "--control ipc:///tmp/nowhere"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("--foo", ["No such option: --foo", "triolet --help"]),
        ("bogus", ["No such command 'bogus'"]),
        ("serve --port x", ["'--port'", "integer", "triolet serve --help"]),
        ("serve --port 65536", ["'--port'", "65535"]),
        ("serve --dtype int4", ["'--dtype'", "bfloat16"]),
        ("serve --prefill 0 --local-prefill off", ["--prefill is 0", "1 to 64"]),
        ("serve --prefill -1", ["--prefill is -1", "0 to 64"]),
        ("serve --local-prefill maybe", ["'maybe'", "off", "auto", "always"]),
        ("serve --tool-parser vicuna", ["'vicuna'", "auto", "hermes", "pythonic", "harmony"]),
        ("serve --prompt-chunk 0", ["'--prompt-chunk'"]),
        ("serve --decode 1000", ["--decode is 1000"]),
        ("serve --kv-pool lots", ["'lots'", "512MiB"]),
        ("serve --block-size 0", ["--block-size is 0"]),
        (
            "serve --max-num-batched-tokens 3",
            ["--max-num-batched-tokens is 3", "--block-size (16)"],
        ),
        ("serve --peer-timeout 0.1", ["--peer-timeout is 0.1"]),
        ("serve --token-window 0", ["--token-window is 0", ">= 1"]),
        ("serve --stall-timeout -1", ["--stall-timeout is -1.0", "> 0"]),
        ("serve --drain-timeout -1", ["--drain-timeout is -1.0", ">= 0"]),
        ("serve --metrics-compat foo", ["--metrics-compat is 'foo'", "vllm, none"]),
        ("serve --log-level loud", ["'loud'", "debug, info, warning, error"]),
        ("serve --host no.such.host.invalid", ["no.such.host.invalid", "127.0.0.1"]),
        ("serve /no/such/model", ["/no/such/model does not exist", "Hugging Face"]),
        ("serve someone/some-model", ["hf download someone/some-model"]),
        ("server --local-prefill off", ["no prefill worker", "--prefill ADDRESS"]),
        ("server", ["no decode worker", "--decode ADDRESS"]),
        ("server --prefill ipc:///p", ["no decode worker", "--decode ADDRESS"]),
        ("serve --host 0.0.0.0", ["--host is '0.0.0.0'", "--allow-remote-clients"]),
        ("prefill", ["'--control'"]),
        ("decode " + CONTROL, ["'--kv'"]),
        (f"prefill /no/such/model {CONTROL}", ["/no/such/model does not exist"]),
        ("chat --url nonsense", ["--url is 'nonsense'", "http://127.0.0.1:8000"]),
        ("chat --temperature 3", ["'--temperature'"]),
        ("keys make", ["'DIR'"]),
        ("tenant add a/b", ["'a/b' is no name of a tenant"]),
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


def test_a_server_that_is_not_there_is_no_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 1
    assert "triolet serve" in capsys.readouterr().err
    assert main(["tenant", "usage", "--url", "http://127.0.0.1:9"]) == 1
    assert "cannot be asked" in capsys.readouterr().err


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
    assert "has keys already" in capsys.readouterr().err


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
    os.close(readable)  # before it can have said anything
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

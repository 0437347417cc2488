"""Tests of store commands that are killed or run out of space: the store stays valid, and the next
command works."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pytest

from store.aliases import Aliases
from store.collect import remove
from store.reference import parse_reference
from tests import forked
from tests.gguf_files import write_tiny

from .conftest import faults, replace_readme

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ops.models.importing import Imported
    from store.layout import ModelStore

TIMEOUT_S: Final = 60.0
KILLED_AT: Final = """
import os, signal, sys

left, store = int(sys.argv[1]), sys.argv[2]

def step(event, args):
    global left
    own = event in ("open", "os.rename", "os.remove", "os.mkdir", "os.link", "fcntl.flock")
    if not own and event != "sqlite3.connect":
        return
    if not any(store in str(value) for value in args) and event != "fcntl.flock":
        return
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def executed(frame, event, function):
    if event == "c_return" and function.__name__ == "execute":
        step("fcntl.flock", ())

from ops.cli import main
sys.addaudithook(step)
sys.setprofile(executed)
code = main(["model", *sys.argv[3:], "--store", store])
print(left)
sys.exit(code)
"""
"""Kills a command at its n-th step. Steps are Python's audit events for the store's files, and the
statements of its transactions."""
NO_ROOM: Final = """
import resource, sys

from ops.cli import main

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
sys.exit(main(["model", *sys.argv[1:]]))
"""
UNREACHED: Final = 1_000_000
KILLS: Final = 6
KILLS_OF_THE_WHOLE: Final = 30


@pytest.mark.slow
@pytest.mark.proof
def test_a_store_is_valid_wherever_a_command_is_killed(
    model: Path, add: Callable[..., Imported], store: ModelStore, whole: bool
) -> None:
    # Needs a dozen processes: only a real one can be killed without running its clean-up.
    moments = random.Random(1)
    kept = add(model, tag="v0").digest
    aliases = Aliases(store)
    rounds = (KILLS_OF_THE_WHOLE if whole else KILLS) // 3
    for number in range(rounds):
        for kind in ("import", "tag", "gc"):
            prepare(model, kind, add, store, f"{kind} {number}")
            counted = cut_off(store, UNREACHED, *command(kind, model, f"n{number}"))
            steps = UNREACHED - int(counted.stdout.split()[-1])
            assert steps > rounds, "it was not watched"
            prepare(model, kind, add, store, f"{kind} {number} again")
            # Each round in another part of the command, so that few rounds also cover its end.
            at = 1 + int(steps * (number + moments.random()) / rounds)
            killed = cut_off(store, at, *command(kind, model, f"k{number}"))
            assert killed.returncode == -9, killed.stderr
            assert faults(store) == []
            assert aliases.resolve(parse_reference("chat:v0")) == kept
            known = {(entry.name, entry.digest) for entry in store.entries()}
            assert {(p.name, to) for p, to in aliases.all().items()} <= known
            done = cut_off(store, UNREACHED, *command(kind, model, f"k{number}"))
            assert done.returncode == 0, done.stderr
            assert list(store.tmp.iterdir()) == []
            assert faults(store) == []


def command(kind: str, model: Path, tag: str) -> tuple[str, ...]:
    match kind:
        case "import":
            return ("import", str(model), "--name", "chat", "--link", "--tag", tag)
        case "tag":
            return ("tag", "chat:v0", f"of-{tag}")
        case _:
            return ("gc",)


def prepare(
    model: Path, kind: str, add: Callable[..., Imported], store: ModelStore, words: str
) -> None:
    """Prepare the store for a command."""
    replace_readme(model, words)
    if kind == "gc":
        digest = add(model).digest
        with store.writing() as writer:
            remove(writer, Aliases(store), parse_reference(f"chat@{digest}"))


def cut_off(store: ModelStore, at: int, *command: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", KILLED_AT, str(at), str(store.root), *command]
    return ran(words)


def test_a_disk_without_room_leaves_the_store_as_it_was(
    model: Path, add: Callable[..., Imported], store: ModelStore, tmp_path: Path
) -> None:
    small = tmp_path / "small.gguf"
    before = add(write_tiny(small), tag="v0").digest
    where = ("--name", "chat", "--store", str(store.root))
    refused = ran([sys.executable, "-c", NO_ROOM, "import", str(model), *where])
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"triolet: {store.root}: File too large; ")
    assert "bytes are free there: make room" in line
    assert [entry.digest for entry in store.entries()] == [before]
    assert faults(store) == []
    add(model)
    assert faults(store) == []


def ran(command: list[str]) -> subprocess.CompletedProcess[str]:
    process = forked.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    output, errors = process.communicate(timeout=TIMEOUT_S)
    return subprocess.CompletedProcess(
        command, process.returncode, output.decode().strip(), errors.decode()
    )

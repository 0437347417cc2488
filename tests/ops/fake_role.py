"""A fake role process for tests of the supervisor. Its first argument selects the behaviour, the
second is a journal file."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from ops.own_process import hold_on_to
from triolet.status import SUCCESSOR_SIGNAL, ProcessFailed, Progress, ServerReady, report


def note(word: str) -> None:
    with Path(sys.argv[2]).open("a") as journal:
        journal.write(f"{word}\n")


def num_starts(name: str) -> int:
    return Path(sys.argv[2]).read_text().count(f"{name} started")


ENDINGS = {signal.SIGTERM: "ended", SUCCESSOR_SIGNAL: "handed over"}


def wait_for_end() -> str:
    """Return the signal that asked it to exit."""
    return ENDINGS[signal.Signals(signal.sigwait(set(ENDINGS)))]


def main() -> int:
    name, _, behaviour = sys.argv[1].partition(":")
    signal.pthread_sigmask(signal.SIG_BLOCK, set(ENDINGS))
    if behaviour != "unheld":
        hold_on_to(os.getppid())
    note(f"{name} started")
    match behaviour:
        case "crash":
            return 1
        case "broken":
            report(ProcessFailed("config.json is missing; download it"))
            return 2
        case "once" if num_starts(name) > 1:
            return 1
        case "late" | "late and spoiled" if num_starts(name) <= 3:
            return 1
        case "spoiled" | "late and spoiled" if num_starts(name) in {2, 5}:
            report(ProcessFailed("the journal is gone; bring it back"))
            return 2
        case "silent":
            signal.pause()
        case "mute":  # until it is asked to exit
            note(f"{name} {wait_for_end()}")
            return 0
        case "chatty":
            report(Progress("weights", 1, 2))
            sys.stdout.write("a library prints\n" + "x" * 100_000 + "\n")
            sys.stderr.write('{"event":"loaded"}\nunfinished')
    report(ServerReady(f"http://{name}"))
    if behaviour == "stubborn":
        signal.pause()
    note(f"{name} {wait_for_end()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

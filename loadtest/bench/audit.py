"""How fast the audit log takes entries, alone and from several processes, and how fast it is read.

Batches are appended by one process; single entries, each on disk before its append returns, by 1
and by 8 processes at once; then everything is verified. The log lies in build/bench, on a disk. A
plain write and fsync of as many bytes beside it says what the disk takes. Exits with 1 if a goal is
missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from statistics import mean
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from ops.audit.events import Action, Event, digest
from ops.audit.log import AuditLog
from ops.audit.verification import prove, verify

from ..harness.progress import announce, progress
from ..harness.report import BENCH, Ratio, Report, describe, finish, line_of
from ..harness.statistics import percentile

if TYPE_CHECKING:
    from pathlib import Path

BATCHES: Final = 40
BATCH_ENTRIES: Final = 5_000
APPENDERS: Final = (1, 8)
SECONDS: Final = 5.0
"""That each appender goes on."""
MIN_BATCHED_PER_S: Final = 50_000.0
MIN_SYNCED_PER_S: Final = 200.0
DEADLINE_S: Final = 120.0
LINE_BYTES: Final = 512
"""Of the plain write: about one line of the log."""


def event(number: int) -> Event:
    """Return an event such as a change of a tenant."""
    state = digest(str(number).encode())
    return Event(
        action=Action.TENANT_ROTATE,
        subject=f"tenant-{number}",
        actor="user:operator",
        before=state,
        after=state,
        request_id=f"{number:016x}",
    )


def row(what: str, entries: int, seconds: float, taken_s: list[float]) -> dict[str, Any]:
    """Return a row of the table, and print it; times are of one append."""
    found = {
        "what": what,
        "entries": entries,
        "entries_per_s": entries / seconds,
        "mean_ms": mean(taken_s) * 1000,
        "p50_ms": percentile(taken_s, 50) * 1000,
        "p99_ms": percentile(taken_s, 99) * 1000,
    }
    progress(line_of(found))
    return found


def batched(folder: Path) -> dict[str, Any]:
    """Append batches, each with one fsync."""
    batches = [
        [event(BATCH_ENTRIES * batch + number) for number in range(BATCH_ENTRIES)]
        for batch in range(BATCHES)
    ]
    taken_s = []
    with AuditLog(folder) as log:
        began = perf_counter()
        for batch in batches:
            at = perf_counter()
            log.append(*batch)
            taken_s.append(perf_counter() - at)
        seconds = perf_counter() - began
    return row(f"batches of {BATCH_ENTRIES}", BATCHES * BATCH_ENTRIES, seconds, taken_s)


def append_for(folder: Path, seconds: float) -> None:
    """Append single entries when told on stdin, and print what each took: one of the processes."""
    with AuditLog(folder) as log:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()
        began = at = perf_counter()
        taken_s: list[float] = []
        while at < began + seconds:
            log.append(event(len(taken_s)))
            now = perf_counter()
            taken_s.append(now - at)
            at = now
        syncs = log.syncs
    sys.stdout.write(f"{syncs} {' '.join(map(str, taken_s))}\n")


def synced(folder: Path, num_appenders: int) -> tuple[dict[str, Any], float]:
    """Append single entries by several processes; return a row, and appends for one fsync."""
    command = [sys.executable, "-m", "loadtest.bench.audit", "--append-to", str(folder)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(num_appenders)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        said = [process.communicate(timeout=DEADLINE_S)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    taken_s = [float(word) for words in said for word in words[1:]]
    syncs = sum(int(words[0]) for words in said)
    what = f"single, {num_appenders} process{'es' if num_appenders > 1 else ''}"
    return row(what, len(taken_s), SECONDS, taken_s), len(taken_s) / syncs


def plain(folder: Path) -> dict[str, Any]:
    """Write and sync as a file alone does it."""
    folder.mkdir(parents=True)
    taken_s = []
    with (folder / "plain").open("wb", buffering=0) as file:
        began = at = perf_counter()
        while at < began + SECONDS:
            file.write(b"x" * LINE_BYTES)
            os.fsync(file.fileno())
            now = perf_counter()
            taken_s.append(now - at)
            at = now
    return row("plain write and fsync", len(taken_s), SECONDS, taken_s)


def read(folder: Path) -> list[dict[str, Any]]:
    """Verify all entries, and prove one."""
    rows = []
    at = perf_counter()
    verdict = verify(folder)
    seconds = perf_counter() - at
    assert not verdict.defects, verdict.defects
    rows.append(row("verification", verdict.entries, seconds, [seconds]))
    at = perf_counter()
    prove(folder, verdict.entries // 2)
    seconds = perf_counter() - at
    rows.append(row("proof of one entry", verdict.entries, seconds, [seconds]))
    return rows


def main() -> None:
    """Measure, write and show it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--append-to", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.append_to is not None:
        from pathlib import Path

        append_for(Path(arguments.append_to), SECONDS)
        return
    announce(__doc__)
    place = BENCH / "audit_log"
    shutil.rmtree(place, ignore_errors=True)
    try:
        rows = [plain(place / "plain"), batched(place / "log")]
        ratios = {"entries/s in batches": Ratio(rows[1]["entries_per_s"], floor=MIN_BATCHED_PER_S)}
        for num_appenders in APPENDERS:
            found, shared = synced(place / "log", num_appenders)
            rows.append(found)
            floor = MIN_SYNCED_PER_S if num_appenders == APPENDERS[-1] else None
            ratios[f"entries/s, {found['what']}"] = Ratio(found["entries_per_s"], floor=floor)
            ratios[f"appends for one fsync, {found['what']}"] = Ratio(shared)
        rows += read(place / "log")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    ratios["entries/s verified"] = Ratio(rows[-2]["entries_per_s"])
    report = Report("audit", describe(1), rows, ratios, {}, (("what",), "entries_per_s"))
    sys.exit(finish(report))


if __name__ == "__main__":
    main()

"""Test helpers for the supervisor: a Watcher that records events, and specifications of fake
roles."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import trio

from ops.supervisor.process_spec import ProcessSpec
from triolet.ids import Role
from triolet.status import ServerReady

if TYPE_CHECKING:
    from ops.supervisor.restart_policy import Ending, GiveUp, Verdict
    from triolet.status import Report

ROOT = Path(__file__).parents[2]


def spec(name: str, journal: Path | str) -> ProcessSpec:
    """Return a fake role named `[model.]role-number[:behaviour]`."""
    own = name.partition(":")[0]
    model, _, place = own.rpartition(".")
    return ProcessSpec(
        name=own,
        role=Role(place.partition("-")[0]),
        argv=(sys.executable, "-m", "tests.ops.fake_role", name, str(journal)),
        env={"PYTHONPATH": str(ROOT)},
        model=model,
    )


@dataclass
class Recorder:
    """Recorded events by kind."""

    progress_to: TextIO | None = None
    pids: dict[str, list[int]] = field(default_factory=dict)
    reports: list[tuple[str, Report]] = field(default_factory=list)
    logs: list[bytes] = field(default_factory=list)
    endings: list[tuple[str, Ending, Verdict | None]] = field(default_factory=list)
    failures: list[tuple[str, GiveUp]] = field(default_factory=list)
    began: dict[str, float] = field(default_factory=dict)
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    stops: int = 0
    news: trio.Event = field(default_factory=trio.Event)

    def started(self, name: str, pid: int) -> None:
        self.pids.setdefault(name, []).append(pid)
        self.began[name] = trio.current_time()
        self._write(str(pid))

    def reported(self, name: str, report: Report) -> None:
        self.reports.append((name, report))
        self._write("ready" if isinstance(report, ServerReady) else "news")
        self.news.set()
        self.news = trio.Event()

    def logged(self, _: str, line: bytes) -> None:
        self.logs.append(line)

    def ended(self, name: str, ending: Ending, verdict: Verdict | None) -> None:
        self.endings.append((name, ending, verdict))
        self.spans.append((name, self.began[name], trio.current_time()))

    def failed(self, model: str, reason: GiveUp) -> None:
        self.failures.append((model, reason))

    def stopping(self) -> None:
        self.stops += 1

    def _write(self, word: str) -> None:
        if self.progress_to is not None:
            self.progress_to.write(f"{word}\n")
            self.progress_to.flush()

"""A pytest plugin that shows the progress of `make test`: a line every ten seconds instead of a dot
per test.

Loaded with `-p tests.progress`. A failed test is named at once. Skipped tests are counted by reason
at the end, before pytest's own summary.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

    from _pytest.terminal import TerminalReporter

PERIOD_S: Final = 10.0
"""Interval between two lines: people see that the run advances, and a log stays short."""


class Progress:
    """Counts ended tests and prints the progress.

    Args:
      terminal: receives the lines.
    """

    def __init__(self, terminal: TerminalReporter) -> None:
        self._terminal = terminal
        self._session: pytest.Session | None = None
        self._began_at = self._printed_at = time.monotonic()
        self._ended = 0
        self._failed = 0
        self._skipped: Counter[str] = Counter()

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Keep the session: it knows the number of tests, including those of other processes."""
        self._session = session

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(
        self,
    ) -> Generator[None, tuple[str, str, object], tuple[str, str, object]]:
        """Print no letter for a test."""
        category, _, _ = yield
        return category, "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test, name it if it failed, and print a line if one is due."""
        if report.failed:
            self._failed += 1
            where = "" if report.when == "call" else f" in its {report.when}"
            self._terminal.write_line(f"FAILED{where}: {report.nodeid}", red=True)
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
        if report.when == "teardown":
            self._ended += 1
        now = time.monotonic()
        if now - self._printed_at >= PERIOD_S:
            self._printed_at = now
            self._terminal.write_line(self._line(now))

    def pytest_terminal_summary(self) -> None:
        """Print the reasons of skipped tests, the most frequent first."""
        for reason, count in self._skipped.most_common():
            self._terminal.write_line(f"skipped {count}: {reason}")

    def _line(self, now: float) -> str:
        minutes, seconds = divmod(int(now - self._began_at), 60)
        total = self._session.testscollected if self._session is not None else 0
        share = f"{100 * self._ended // total:3d} %  " if total else ""
        failed = f", {self._failed} failed" if self._failed else ""
        return f"  {minutes}:{seconds:02d}  {share}{self._ended:,} of {total:,} tests{failed}"


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Print progress in the one process that prints."""
    terminal = config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(terminal), "triolet-progress")

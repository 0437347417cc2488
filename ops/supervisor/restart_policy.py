"""Restart policy of a process: restart at once, restart after a backoff, or give up. No I/O.

After the first crash the process restarts at once, after each further crash in a row with a doubled
delay; a long enough run resets the count. Crashes before the process is ready are counted
separately: after `max_failed_starts` of them, or at once if the process reported a configuration
error, the policy gives up.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ..exit_codes import EXIT_BAD_INPUT, EXIT_FAILED

if TYPE_CHECKING:
    from triolet.config import SupervisorConfig


class Ending(NamedTuple):
    """How a process ended.

    Attributes:
      code: exit code, or the negative number of the signal that killed it.
      failure: one-line cause, if the process reported one.
      was_silent: whether it was killed because it reported nothing while starting.
    """

    code: int
    failure: str | None = None
    was_silent: bool = False

    def __str__(self) -> str:
        if self.was_silent:
            return "reported nothing while starting and was killed"
        if self.code >= 0:
            return f"exited with code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"was killed by {name}"


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart the process.

    Attributes:
      delay_s: wait before the restart.
      was_asked_for: whether the process was asked to exit and exited cleanly.
      num_deaths: crashes in a row, including this one.
      within_s: time from the first of them to this one.
    """

    delay_s: float
    was_asked_for: bool = False
    num_deaths: int = 0
    within_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not restart the process.

    Attributes:
      message: cause and remedy in one line.
      exit_code: exit code for the supervisor.
    """

    message: str
    exit_code: int


Verdict: TypeAlias = Restart | GiveUp


class RestartPolicy:
    """Decides about the restarts of one process.

    Args:
      name: name of the process in messages.
      config: delays and limits.
    """

    def __init__(self, name: str, config: SupervisorConfig) -> None:
        self._name = name
        self._config = config
        self._ready_since: float | None = None
        self._deaths = 0
        self._first_died_at = 0.0
        self._failed_starts = 0

    def became_ready(self, now: float) -> None:
        """Record that the process became ready."""
        self._ready_since = now
        self._failed_starts = 0

    def ended(self, now: float, ending: Ending) -> Verdict:
        """Return what to do after the process ended."""
        if ending.failure is not None:
            return GiveUp(f"{self._name}: {ending.failure}", EXIT_BAD_INPUT)
        ready_since, self._ready_since = self._ready_since, None
        if ready_since is None:
            self._failed_starts += 1
            if self._failed_starts >= self._config.max_failed_starts:
                return GiveUp(
                    f"{self._name} {ending} {self._failed_starts} times in a row before it was "
                    "ready; its log lines above say why, and `triolet doctor` checks this machine",
                    EXIT_FAILED,
                )
        elif ending.code == 0:
            return Restart(self._config.restart_delay_s, was_asked_for=True)
        elif now - ready_since >= self._config.stable_s:
            self._deaths = 0
        if self._deaths == 0:
            self._first_died_at = now
        self._deaths += 1
        within_s = now - self._first_died_at
        return Restart(self._delay_s(), num_deaths=self._deaths, within_s=within_s)

    def _delay_s(self) -> float:
        if self._deaths == 1:
            # Its addresses are free: the kernel closes sockets before it reports the end.
            return 0.0
        # Bound the exponent, so that many crashes cannot overflow the float.
        delay_s = self._config.restart_delay_s * 2.0 ** min(self._deaths - 2, 32)
        return min(delay_s, self._config.max_restart_delay_s)

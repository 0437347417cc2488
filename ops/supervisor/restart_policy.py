"""Whether a process that ended is started again, when, or never. Decides; starts nothing.

Two counts per process. The first death is followed by a new life at once, each further one in a row
by a longer delay; a long enough life clears them. Deaths before ready count on their own, because
they repeat: after a few of them, or at once where the process itself said that its configuration
cannot work, trying again is no answer.
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
      code: exit code; negative is the number of the signal that killed it.
      failure: its own one-line cause, if it reported one.
      was_silent: it was killed for reporting nothing while it started.
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
    """Start it again.

    Attributes:
      delay_s: after this time.
      was_asked_for: somebody told the process itself to leave, and it did so in order.
      num_deaths: in a row, this one included; the delay doubles with each.
      within_s: from the first of them to this one.
    """

    delay_s: float
    was_asked_for: bool = False
    num_deaths: int = 0
    within_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start it again.

    Attributes:
      message: cause and remedy in one line.
      exit_code: what the supervisor should exit with.
    """

    message: str
    exit_code: int


Verdict: TypeAlias = Restart | GiveUp


class RestartPolicy:
    """The record of one process over all its lives.

    Args:
      name: what messages call it.
      config: delays and bounds.
    """

    def __init__(self, name: str, config: SupervisorConfig) -> None:
        self._name = name
        self._config = config
        self._ready_since: float | None = None
        self._deaths = 0
        self._first_died_at = 0.0
        self._failed_starts = 0

    def became_ready(self, now: float) -> None:
        """Note that this life reached ready."""
        self._ready_since = now
        self._failed_starts = 0

    def ended(self, now: float, ending: Ending) -> Verdict:
        """Return what to do about the end of this life."""
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
            # The kernel closes a process's sockets before it says that the process has ended.
            return 0.0
        # The exponent is bounded so that a long record of deaths cannot overflow the float.
        delay_s = self._config.restart_delay_s * 2.0 ** min(self._deaths - 2, 32)
        return min(delay_s, self._config.max_restart_delay_s)

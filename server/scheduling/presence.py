"""Tracks whether a sleeping model's workers can be started for a request, from the state that the
control process reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from transport.control_protocol import ModelState
from triolet.errors import RequestError, no_worker, overloaded
from triolet.units import SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from transport.control_protocol import ModelNews

LOST_S: Final = 10.0 * SECONDS
"""How long requests wait for a control that is away. It restarts within a second."""
FAILED_RETRY_S: Final = 10.0 * SECONDS
"""Retry-After for a model that could not be loaded."""
ON_THEIR_WAY: Final = frozenset({ModelState.LOADING, ModelState.WARM})
ASLEEP: Final = frozenset({ModelState.STAGED, ModelState.SLEEPING, ModelState.DRAINING})


class Presence:
    """What control reported about one model's workers. Without control: nothing.

    Attributes:
      is_idle: control was told that no request runs, so it may put the model to sleep.
      is_wanted: a request needs absent workers, which control does not know yet.
      changed: called when control must be notified at once.
      worker_seconds: total running time of worker processes per version digest; empty without
        control.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self.changed: Callable[[], None] = _nothing
        self.worker_seconds: Mapping[str, float] = {}
        self._news: ModelNews | None = None
        self._heard_at = 0.0
        self._lost_at: float | None = None
        self.is_idle = False

    @property
    def state(self) -> ModelState | None:
        """The state that control last reported; None without control."""
        return None if self._news is None else self._news.state

    def note(self, news: ModelNews, now: float) -> None:
        """Record a report from control."""
        self._news, self._heard_at, self._lost_at = news, now, None
        self.worker_seconds = news.worker_seconds

    def note_lost(self, now: float) -> None:
        """Record that the link to control is down."""
        if self._lost_at is None:
            self._lost_at = now

    def note_report(self, *, is_idle: bool) -> None:
        """Record that control was told whether requests run."""
        self.is_idle = is_idle
        self.is_wanted = False

    def note_use(self) -> None:
        """Record that a request starts while the model is idle."""
        self.is_idle = False
        self.changed()

    def is_coming(self, now: float) -> bool:
        """Return whether workers are starting or can be started, so that requests may wait."""
        if self._news is None or (self._lost_at is not None and now - self._lost_at >= LOST_S):
            return False
        is_hopeful = self._news.state in ASLEEP and self._news.predicted_ready_s is not None
        return is_hopeful or self._news.state in ON_THEIR_WAY

    def require(self, within_s: float, now: float) -> bool:
        """Ask for absent workers. Return whether a request may wait for them.

        Args:
          within_s: the request's deadline.

        Raises:
          RequestError: 503; the workers come after the deadline, or the model cannot be loaded.
        """
        news = self._news
        if news is None or news.state is ModelState.SERVING:
            return False
        if not self.is_wanted:
            self.is_wanted = True
            self.changed()
        if not self.is_coming(now):
            raise self._refusal(news)
        left_s = (news.predicted_ready_s or 0.0) - (now - self._heard_at)
        if left_s > within_s:
            raise overloaded(
                f"model {news.name} is {news.state} and is being loaded; it is expected in "
                f"{left_s:.0f} s, and this request can wait {within_s:.0f} s",
                retry_after_s=left_s,
            )
        return True

    def _refusal(self, news: ModelNews) -> RequestError:
        why = "there is no room for it, or its last load failed; see the log of control"
        if news.state is ModelState.ABSENT:
            why = f"its files are gone; `triolet model load {news.name}` says how to get them"
        if self._lost_at is not None:
            why = "the control process of this fleet is away"
        return no_worker(
            f"model {news.name} is {news.state} and cannot be loaded now: {why}", FAILED_RETRY_S
        )


def _nothing() -> None:
    """Do nothing: there is no control."""

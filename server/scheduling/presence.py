"""Whether the workers of a model that may sleep come when a request needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from triolet.control_protocol import ModelState
from triolet.errors import RequestError, no_worker, overloaded
from triolet.units import SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from triolet.control_protocol import ModelNews

LOST_S: Final = 10.0 * SECONDS
"""A control that is restarted is back within a second; the requests that need it wait so long."""
FAILED_RETRY_S: Final = 10.0 * SECONDS
"""After which a model that could not be loaded is tried again."""
ON_THEIR_WAY: Final = frozenset({ModelState.LOADING, ModelState.WARM})
ASLEEP: Final = frozenset({ModelState.STAGED, ModelState.SLEEPING, ModelState.DRAINING})


class Presence:
    """What is known of one model's workers from control. Without control: nothing.

    Attributes:
      is_idle: control was told that no request runs, and may take the model to be unused.
      is_wanted: a request needs workers that are not there, and control is to be told.
      changed: called when control is to be told something at once.
      worker_seconds: how long worker processes of each version have run together, by digest; empty
        without control.
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
        """The state as control told it last; None where there is no control."""
        return None if self._news is None else self._news.state

    def note(self, news: ModelNews, now: float) -> None:
        """Take in what control tells."""
        self._news, self._heard_at, self._lost_at = news, now, None
        self.worker_seconds = news.worker_seconds

    def note_lost(self, now: float) -> None:
        """Take in that control is not there any more."""
        if self._lost_at is None:
            self._lost_at = now

    def note_report(self, *, is_idle: bool) -> None:
        """Take in that control was told whether requests run."""
        self.is_idle = is_idle
        self.is_wanted = False

    def note_use(self) -> None:
        """Take in that a request begins while the model is idle."""
        self.is_idle = False
        self.changed()

    def is_coming(self, now: float) -> bool:
        """Whether workers come or can be had, so that requests may wait for them."""
        if self._news is None or (self._lost_at is not None and now - self._lost_at >= LOST_S):
            return False
        is_hopeful = self._news.state in ASLEEP and self._news.predicted_ready_s is not None
        return is_hopeful or self._news.state in ON_THEIR_WAY

    def require(self, within_s: float, now: float) -> bool:
        """Ask for workers that are not there; return whether a request may wait for them.

        Args:
          within_s: the request's deadline.
          now: the time.

        Raises:
          RequestError: 503, they come after the deadline, or the model cannot be loaded.
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
                f"model {news.name} is {news.state} and is loaded now; it is expected in "
                f"{left_s:.0f} s, and this request may wait {within_s:.0f} s",
                retry_after_s=left_s,
            )
        return True

    def _refusal(self, news: ModelNews) -> RequestError:
        why = "there is no room for it, or its last load failed; the log of control says which"
        if news.state is ModelState.ABSENT:
            why = f"its files are gone; `triolet model load {news.name}` says from where"
        if self._lost_at is not None:
            why = "the control of this fleet is away"
        return no_worker(
            f"model {news.name} is {news.state} and cannot be loaded now: {why}", FAILED_RETRY_S
        )


def _nothing() -> None:
    """Tell nothing: there is no control."""

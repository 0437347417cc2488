"""Whether a store of members answers; logs once when it stops and once when it answers again."""

from __future__ import annotations

import structlog

log = structlog.get_logger(__name__)


class StoreHealth:
    """The last answer of a store.

    Args:
      store: its name, for the log.
      now: time from which its age counts until it answers.

    Attributes:
      answered_at: time of its last good answer.
    """

    def __init__(self, store: str, now: float) -> None:
        self.answered_at = now
        self._store = store
        self._trouble = ""

    def note(self, trouble: str, now: float) -> None:
        """Record an answer, or what prevented a good one."""
        if bool(trouble) != bool(self._trouble):
            event = "membership_store_failed" if trouble else "membership_store_answers"
            # Both are warnings: readers of warnings learn that it is back.
            log.warning(
                event,
                store=self._store,
                reason=trouble,
                silent_s=round(now - self.answered_at, 3),
            )
        self._trouble = trouble
        if not trouble:
            self.answered_at = now

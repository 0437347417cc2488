"""`StoreHealth`: tracks whether DNS or Redis answers, and logs once when it stops and once when it
answers again."""

from __future__ import annotations

import structlog

log = structlog.get_logger(__name__)


class StoreHealth:
    """Health of one store of workers.

    Args:
      store: its name, for the log.
      now: time that stands for the last answer until there is one.

    Attributes:
      answered_at: time of its last good answer.
    """

    def __init__(self, store: str, now: float) -> None:
        self.answered_at = now
        self._store = store
        self._trouble = ""

    def note(self, trouble: str, now: float) -> None:
        """Record a good answer, or why there was none."""
        if bool(trouble) != bool(self._trouble):
            event = "membership_store_failed" if trouble else "membership_store_answers"
            # Recovery is a warning too, so that readers of warnings see that the store is back.
            log.warning(
                event,
                store=self._store,
                reason=trouble,
                silent_s=round(now - self.answered_at, 3),
            )
        self._trouble = trouble
        if not trouble:
            self.answered_at = now

"""The counters of what went wrong in the fleet, and of what was done about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
from prometheus_client import Counter

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

log = structlog.get_logger()

FAULTS: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("retries_refused", "Requests ended because the retry budget was spent", ()),
    ("requests_quarantined", "Requests that killed the workers which computed them", ()),
    ("grammars_quarantined", "Requests whose grammar took a worker too long to follow", ()),
    ("breaker_changes", "Circuit breakers of workers by the state they took", ("state",)),
    ("frames_dropped", "Frames of workers that belonged to nothing present", ("reason",)),
    ("server_pauses", "Times that this process stood still", ()),
    ("server_paused_seconds", "Time that this process stood still", ()),
)


class FaultMetrics:
    """Told of faults by the fleet (server/fleet/observer.py).

    Args:
      registry: where the counters are shown.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counters = {
            name: Counter(f"triolet_{name}", text, labels, registry=registry)
            for name, text, labels in FAULTS
        }

    def retry_unaffordable(self) -> None:
        """A request ends because too many others are tried again already."""
        self._counters["retries_refused"].inc()

    def request_quarantined(self, request_id: str) -> None:
        """It killed the workers that computed it; an operator may want to look at it."""
        self._counters["requests_quarantined"].inc()
        log.error("request_quarantined", request_id=request_id)

    def grammar_quarantined(self, request_id: str) -> None:
        """Its masks held a worker up; it has ended, and its tenant's grammar is refused."""
        self._counters["grammars_quarantined"].inc()
        log.warning("grammar_quarantined", request_id=request_id)

    def breaker_changed(self, worker: str, state: str) -> None:
        """A worker is left out, tried, or used again."""
        self._counters["breaker_changes"].labels(state).inc()
        log.warning("breaker", worker=worker, state=state)

    def frames_dropped(self, reason: str, count: int = 1) -> None:
        """Frames of workers were not acted upon."""
        self._counters["frames_dropped"].labels(reason).inc(count)

    def server_paused(self, seconds: float) -> None:
        """This process itself stood still for so long."""
        self._counters["server_pauses"].inc()
        self._counters["server_paused_seconds"].inc(seconds)
        log.warning("stood_still", seconds=round(seconds, 3))

"""The counters of overload: who was refused and why, how predictions did, what is given up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
from prometheus_client import Counter

from .metrics_histogram import TokenHistogram

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from triolet.service_class import ServiceClass

log = structlog.get_logger()

ERROR_BUCKETS: Final = (.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40)  # fmt: skip


class OverloadMetrics:
    """Told of overload by the fleet (server/fleet/observer.py).

    Args:
      registry: where the counters are shown.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._refused = Counter(
            "triolet_overload_refused",
            "Requests refused or dropped because there was too much",
            ("reason", "service_class"),
            registry=registry,
        )
        self._changes = Counter(
            "triolet_brownout_changes",
            "Brownout levels by which one was taken",
            ("level",),
            registry=registry,
        )
        self._early = TokenHistogram(
            "triolet_ttft_earlier_seconds",
            "By how much first tokens came before they were expected",
            ERROR_BUCKETS,
            registry,
        )
        self._late = TokenHistogram(
            "triolet_ttft_later_seconds",
            "By how much first tokens came after they were expected",
            ERROR_BUCKETS,
            registry,
        )

    def refused(self, reason: str, service_class: ServiceClass) -> None:
        """A request was refused because there is too much, or dropped before anything was spent."""
        self._refused.labels(reason, service_class.name.lower()).inc()

    def predicted(self, predicted_s: float, ttft_s: float) -> None:
        """A first token came, and when it had been expected."""
        if ttft_s > predicted_s:
            self._late.observe(ttft_s - predicted_s)
        else:
            self._early.observe(predicted_s - ttft_s)

    def level_changed(self, was: int, level: int, pressure: float) -> None:
        """More or less is given up than before; an operator wants to know."""
        self._changes.labels(str(int(level))).inc()
        tell = log.warning if level > was else log.info
        tell("brownout", now=int(level), was=int(was), pressure=round(pressure, 2))

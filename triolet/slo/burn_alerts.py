"""Table of burn rates and windows at which alerts fire, used for Prometheus rules and for GET
/admin/slo.

A burn rate says how many times too fast an error budget is spent: at 1 the budget lasts exactly its
window. An alert needs two windows: the long one shows that the loss matters, the short one that it
continues.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ..units import parse_span

USUAL_WINDOW_S: Final = 30 * 86_400
"""The budget window for which `BurnAlert.rate` is given."""


class BurnAlert(NamedTuple):
    """A pair of windows.

    Attributes:
      severity: `page` needs a person now, `ticket` can wait until the morning, and `deployment` is
        for what deploys a version.
      rate: burn rate that both windows must exceed, for a budget of 30 days.
      long: the longer window, as Prometheus writes it.
      short: the shorter window.
      min_bad: fewest bad events in the long window.
    """

    severity: str
    rate: float
    long: str
    short: str
    min_bad: int = 1

    def rate_for(self, window_s: int) -> float:
        """Return the burn rate that spends the same share of a budget of another window."""
        return self.rate * window_s / USUAL_WINDOW_S


PAIRS: Final = (
    BurnAlert("page", 14.4, "1h", "5m"),
    BurnAlert("page", 6, "6h", "30m"),
    BurnAlert("ticket", 3, "1d", "2h"),
    BurnAlert("ticket", 1, "3d", "6h"),
)
"""2 % of the budget in an hour, 5 % in six hours, 10 % in a day or in three."""
PAGES: Final = tuple(pair for pair in PAIRS if pair.severity == "page")
DEPLOYMENT: Final = BurnAlert("deployment", 14.4, "5m", "30s", min_bad=5)
"""Per version of a model: fires soon enough to roll a bad version back, and not for a single
failure."""


def span_s(window: str) -> int:
    """Return the length of a window of these tables [s]."""
    length = parse_span(window)
    assert length is not None, window
    return length


SPANS_S: Final = {one: span_s(one) for one in ("30s", "5m", "30m", "1h", "2h", "6h", "1d", "3d")}
"""All windows, by name."""

"""Test helper that computes availability from the usage ledger, to compare with the objectives'
counts."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from triolet.usage_database import usage_by

if TYPE_CHECKING:
    from collections.abc import Sequence

SERVED: Final = frozenset({"stop", "length", "embedded"})
FAILED: Final = frozenset({"deadline", "expired", "drain", "no_worker", "error", "quarantined"})
OF_CLIENTS: Final = frozenset({"client_gone", "stopped", "stalled", "dismissed", "refused"})
"""Outcomes that do not count for availability."""


def availability_by(folder: str, fields: Sequence[str]) -> dict[tuple[str, ...], list[int]]:
    """Return good and total requests in a ledger, by fields of its records."""
    found: defaultdict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0])
    for row in usage_by(folder, [*fields, "outcome"], since=0.0):
        *key, outcome, num_requests = row[: len(fields) + 2]
        assert outcome in SERVED | FAILED | OF_CLIENTS
        if outcome not in OF_CLIENTS:
            counts = found[tuple(key)]
            counts[0] += num_requests * (outcome in SERVED)
            counts[1] += num_requests
    return dict(found)

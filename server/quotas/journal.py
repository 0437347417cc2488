"""Changes of the accounts on their way to Redis: in order, in batches, each done exactly once.

Pure. A batch has a number, and Redis remembers the last number of each server; so a batch whose
answer was lost is sent again without harm.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from .amounts import Ask, Limits, Settlement
    from .local_share import Debt


class Batch(NamedTuple):
    """Changes that travel together."""

    number: int
    changes: str


class Journal:
    """What has to be told. Holds at most one change for each request in flight and a few for each
    tenant, because nothing else makes any.

    Args:
      max_batch: changes in one batch.
    """

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._changes: deque[dict[str, Any]] = deque()
        self._sending: Batch | None = None
        self._number = 0

    def __len__(self) -> int:
        return len(self._changes) + (self._sending is not None)

    def settle(self, settlement: Settlement) -> None:
        """Charge what was used, instead of what was reserved."""
        self._changes.append(
            {
                "kind": "settle",
                "id": settlement.id,
                "tenant": settlement.tenant,
                "requests": int(settlement.is_begun),
                "tokens": settlement.tokens,
                "cost": settlement.cost,
                **_limits(settlement.limits),
            }
        )

    def void(self, ask_id: str) -> None:
        """Give back a reservation, if there is one."""
        self._changes.append({"kind": "void", "id": ask_id})

    def adopt(self, ask: Ask, limits: Limits) -> None:
        """Count a request as in flight that was reserved elsewhere, under these limits."""
        self._changes.append(
            {
                "kind": "adopt",
                "id": ask.id,
                "tenant": ask.tenant,
                "tokens": ask.tokens,
                "cost": ask.cost,
                **_limits(limits),
            }
        )

    def owe(self, debt: Debt) -> None:
        """Charge what was taken elsewhere."""
        self._changes.append(
            {
                "kind": "debt",
                "tenant": debt.tenant,
                "requests": debt.requests,
                "tokens": debt.tokens,
                "cost": debt.cost,
                "used_tokens": debt.used_tokens,
                **_limits(debt.limits),
            }
        )

    def next_batch(self) -> Batch | None:
        """Return what is to be sent now: the batch that is not answered yet, or the next."""
        if self._sending is None and self._changes:
            count = min(self._max_batch, len(self._changes))
            changes = [self._changes.popleft() for _ in range(count)]
            self._number += 1
            self._sending = Batch(self._number, msgspec.json.encode(changes).decode())
        return self._sending

    def answered(self) -> None:
        """The batch is done."""
        self._sending = None


def _limits(limits: Limits) -> dict[str, float]:
    return {
        "request_limit": -1 if limits.requests is None else limits.requests,
        "token_limit": -1 if limits.tokens is None else limits.tokens,
    }

"""The end of whatever runs or waits for tenants that may ask no more.

Pure. Knows whose a request is; not why its tenant has to go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import outcome

if TYPE_CHECKING:
    from collections.abc import Set

    from .attempt import Attempts
    from .embeddings import Embeddings
    from .request_table import RequestTable


def dismiss_tenants(
    book: RequestTable, attempts: Attempts, embeddings: Embeddings, tenants: Set[str], now: float
) -> None:
    """End everything of some tenants, sequences and inputs."""
    end = outcome.dismissed()
    for sequence in book:
        if sequence.request.scheduling.tenant in tenants:
            attempts.fail(sequence, end, now)
    for one in embeddings:
        if one.request.scheduling.tenant in tenants:
            embeddings.cancel(one, end, now)
    attempts.dispatch(now)
    embeddings.dispatch(now)

"""Inputs that become vectors, as the outside surface sees them: what is asked for, and what comes.

The contract between server/api and server/scheduling, beside generation.py. Knows no HTTP and no
workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from triolet.service_class import DEFAULT_SCHEDULING, Scheduling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triolet.errors import RequestError
    from triolet.pooling import VectorForm

    from .generation import CancelReason


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """One input. A client's request may hold many of these.

    Attributes:
      request_id: 16 random bytes.
      input_ids: the whole input, at least one token.
      form: what the vector is to be like.
      deadline_s: seconds from submission after which it ends with 504.
      priority: lower runs earlier among those of one tenant and class; 0 is normal.
      client_request_id: what its client calls it, for the log.
      scheduling: whose it is, and of which class.
    """

    request_id: bytes
    input_ids: tuple[int, ...]
    form: VectorForm
    deadline_s: float
    priority: int = 0
    client_request_id: str = ""
    scheduling: Scheduling = DEFAULT_SCHEDULING

    @property
    def rank(self) -> int:
        """Where it stands among all tenants' requests: lower is earlier."""
        return self.scheduling.rank(self.priority)


@dataclass(slots=True)
class EmbeddingResult:
    """What became of one input.

    Attributes:
      vector: little-endian fp32; None before it is there.
      error: why there will be none.
    """

    vector: bytes | None = None
    error: RequestError | None = None


class EmbeddingRun(Protocol):
    """All inputs of one client's request."""

    @property
    def has_begun(self) -> bool:
        """Whether a worker was ever asked to compute one of them."""
        ...

    async def vectors(self) -> Sequence[bytes]:
        """Wait for all of them; in the inputs' order.

        Raises:
          RequestError: one of them failed; the others end.
        """
        ...

    def cancel(self, reason: CancelReason) -> None:
        """End what is not done. Idempotent; waits for nothing."""
        ...

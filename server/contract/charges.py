"""Charges: each request's tenant is charged what it used, exactly once.

The contract between server/scheduling (where requests begin and end) and server/tenants (which
keeps the accounts).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from .generation import Usage


class Charges(Protocol):
    """Told of every request that was accepted, and of its one end. Must be quick, never raises."""

    def accepted(self, request_id: bytes) -> None:
        """It will get exactly one end."""
        ...

    def repeated(self, request_id: bytes) -> None:
        """It is answered with what was computed before: it counts as a request, without tokens.
        Nothing is accepted then."""
        ...

    def ended(self, request_id: bytes, usage: Usage, *, is_begun: bool) -> float | None:
        """It got its end.

        Args:
          request_id: the sequence's, or the input's.
          usage: what it used, if it was begun.
          is_begun: whether a worker ever was asked to compute it.

        Returns:
          What it cost, in the operator's currency; None where nothing is charged.
        """
        ...


class NoCharges:
    """Charges nothing."""

    def accepted(self, request_id: bytes) -> None:
        """Ignore it."""

    def repeated(self, request_id: bytes) -> None:
        """Ignore it."""

    def ended(self, request_id: bytes, usage: Usage, *, is_begun: bool) -> float | None:
        """Ignore it."""
        del request_id, usage, is_begun
        return None


NO_CHARGES: Final = NoCharges()

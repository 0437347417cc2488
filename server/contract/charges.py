"""Charges: each request's tenant is charged what it used, exactly once.

The contract between server/scheduling (where requests begin and end) and server/tenants (which
keeps the accounts).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .generation import Usage


class Charges:
    """Told of every request that was accepted, and of its one end; here nothing is charged.

    Calls must be quick and never raise.
    """

    def accepted(self, request_id: bytes) -> None:
        """Note a request that will get exactly one end."""

    def repeated(self, request_id: bytes) -> None:
        """Note a request that is answered with what was computed before: it counts as a request,
        without tokens. It is not accepted then."""

    def ended(self, request_id: bytes, usage: Usage, *, is_begun: bool) -> float | None:
        """Note the end of a request.

        Args:
          request_id: of one completion or input.
          usage: what it used, if it was begun.
          is_begun: whether a worker ever was asked to compute it.

        Returns:
          What it cost, in the operator's currency; None where nothing is charged.
        """
        del request_id, usage, is_begun
        return None


NO_CHARGES: Final = Charges()

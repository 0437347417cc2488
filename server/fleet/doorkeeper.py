"""Refuses requests before anything is spent on them, and says how long answers may get.

Pure. For whoever has a request in hand that is not tokenised yet. Knows the gate and the accounts;
begins nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triolet.errors import RequestError

if TYPE_CHECKING:
    from triolet.service_class import Claim

    from .book import RequestBook
    from .gate import Gate
    from .status import OverloadStatus


class Doorkeeper:
    """The door of one server.

    Args:
      gate: decides.
      book: counts.
    """

    def __init__(self, gate: Gate, book: RequestBook) -> None:
        self._gate = gate
        self._book = book

    def refuse_early(
        self, claim: Claim, request_id: bytes, key: int, deadline_s: float, now: float
    ) -> None:
        """Raise for a request that would be refused whatever its prompt is.

        Args:
          claim: whose it is.
          request_id: random bytes.
          key: names what it asks for, whoever asks again.
          deadline_s: within which it has to be done.
          now: the time.

        Raises:
          RequestError: 503, and it is counted as one request that was refused.
        """
        try:
            self._gate.judge_early(claim, request_id, key, deadline_s, now)
        except RequestError as error:
            self._book.receive()
            self._book.reject(claim, error)
            raise

    def max_tokens(self, claim: Claim, prompt_tokens: int) -> int | None:
        """Return how many tokens the answer to such a prompt may have at the moment; None for no
        cap. A tenant that asks for less than its share has none."""
        if self._gate.is_modest(claim, prompt_tokens):
            return None
        return self._gate.overload.brownout.max_tokens(claim.service_class)

    @property
    def level(self) -> int:
        """Of brownout, 0 to 4."""
        return int(self._gate.overload.brownout.level)

    def status(self, now: float) -> OverloadStatus:
        """Return what there is to be seen."""
        return self._gate.overload.status(now)

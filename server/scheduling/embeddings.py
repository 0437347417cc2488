"""One client's request for vectors: it waits until all of its inputs have their ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ..contract.generation import Failed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..contract.generation import CancelReason
    from .request import Request


class EmbeddingRun:
    """All inputs of one client's request (`Links.embed`).

    It owns nothing: dropping it leaves the inputs to their deadlines.

    Args:
      inputs: that were accepted.
      on_cancel: called when inputs shall end.
    """

    def __init__(
        self,
        inputs: Sequence[Request],
        on_cancel: Callable[[Sequence[Request], CancelReason], None],
    ) -> None:
        self._inputs = inputs
        self._on_cancel = on_cancel
        self._changed = trio.Event()
        for one in inputs:
            one.relay.mailbox.bind(self._note)

    @property
    def has_begun(self) -> bool:
        """Whether a worker was ever asked to compute one of them."""
        return any(one.is_begun for one in self._inputs)

    async def vectors(self) -> Sequence[bytes]:
        """Wait for all vectors.

        Raises:
          RequestError: one of the inputs failed.
        """
        while True:
            await trio.lowlevel.checkpoint()
            self._changed = trio.Event()
            ends = [one.terminal for one in self._inputs]
            for end in ends:
                if isinstance(end, Failed):
                    raise end.error
            if all(ends):
                return [one.vector for one in self._inputs]
            await self._changed.wait()

    def cancel(self, reason: CancelReason) -> None:
        """End what is not done. Idempotent."""
        self._on_cancel([one for one in self._inputs if one.terminal is None], reason)

    def _note(self) -> None:
        self._changed.set()

"""What the surface holds of inputs under way: it waits until all have their ends.

Knows Trio's events and the conductor's calls; owns nothing, so that dropping it harms nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..generation import CancelReason
    from .embeddings import Input


class FleetEmbeddingRun:
    """All inputs of one client's request (server/embedding.py).

    Args:
      on_cancel: told of the inputs that shall end.
    """

    def __init__(self, on_cancel: Callable[[Sequence[Input], CancelReason], None]) -> None:
        self._on_cancel = on_cancel
        self._inputs: Sequence[Input] = ()
        self._changed = trio.Event()

    def begin(self, inputs: Sequence[Input]) -> None:
        """Take the inputs that were accepted."""
        self._inputs = inputs

    def note(self) -> None:
        """Note that an input has its end."""
        self._changed.set()

    async def vectors(self) -> Sequence[bytes]:
        """Wait for all; see server.embedding.EmbeddingRun.

        Raises:
          RequestError: one of them failed.
        """
        while True:
            await trio.lowlevel.checkpoint()
            self._changed = trio.Event()
            results = [one.result for one in self._inputs]
            for result in results:
                if result.error is not None:
                    raise result.error
            vectors = [result.vector for result in results if result.vector is not None]
            if len(vectors) == len(results):
                return vectors
            await self._changed.wait()

    def cancel(self, reason: CancelReason) -> None:
        """End what is not done. Idempotent."""
        self._on_cancel([one for one in self._inputs if not one.is_over], reason)

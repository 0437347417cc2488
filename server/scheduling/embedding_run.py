"""What the surface holds of inputs under way: it waits until all have their ends.

Knows Trio's events and the conductor's calls; owns nothing, so that dropping it harms nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from . import outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triolet.config import ServerConfig

    from ..contract.embedding import EmbeddingRequest
    from ..contract.generation import CancelReason
    from .embeddings import Input
    from .requests import Requests


class FleetEmbeddingRun:
    """All inputs of one client's request (server/contract/embedding.py).

    Args:
      conductor: takes them.
      config: for the words of a cancel.
      flush: sends what it has decided.
    """

    def __init__(
        self, conductor: Requests, config: ServerConfig, flush: Callable[[], None]
    ) -> None:
        self._requests = conductor
        self._config = config
        self._flush = flush
        self._inputs: Sequence[Input] = ()
        self._changed = trio.Event()

    @property
    def has_begun(self) -> bool:
        """Whether a worker was ever asked to compute one of them."""
        return any(one.num_attempts for one in self._inputs)

    def begin(self, requests: Sequence[EmbeddingRequest]) -> None:
        """Submit all inputs.

        Raises:
          RequestError: refused; nothing was begun.
        """
        now = trio.current_time()
        self._requests.wake(now)
        is_draining = self._requests.is_draining
        embeddings = self._requests.embeddings
        self._inputs = embeddings.submit(requests, self.note, now, is_draining=is_draining)
        self._flush()

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
        rest = [one for one in self._inputs if not one.is_over]
        if not rest:
            return
        now = trio.current_time()
        self._requests.wake(now)
        for one in rest:
            self._requests.embeddings.cancel(one, outcome.cancelled(reason, self._config), now)
        self._requests.embeddings.dispatch(now)
        self._flush()


def begin_embeddings(
    conductor: Requests,
    config: ServerConfig,
    flush: Callable[[], None],
    requests: Sequence[EmbeddingRequest],
) -> FleetEmbeddingRun:
    """Begin to make vectors of inputs, of all or of none.

    Raises:
      RequestError: refused; nothing was begun.
    """
    run = FleetEmbeddingRun(conductor, config, flush)
    run.begin(requests)
    return run

"""One client's request for vectors: it waits until all of its inputs have their ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ..contract.generation import Failed
from .outcome import cancelled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triolet.config import ServerConfig

    from ..contract.generation import CancelReason, GenerationRequest
    from .request import Request
    from .requests import Requests


class EmbeddingRun:
    """All inputs of one client's request (`Links.embed`).

    It owns nothing: dropping it leaves the inputs to their deadlines.

    Args:
      requests: takes them.
      config: for the words of a cancel.
      flush: sends what it has decided.
    """

    def __init__(self, requests: Requests, config: ServerConfig, flush: Callable[[], None]) -> None:
        self._requests = requests
        self._config = config
        self._flush = flush
        self._inputs: Sequence[Request] = ()
        self._changed = trio.Event()

    @property
    def has_begun(self) -> bool:
        """Whether a worker was ever asked to compute one of them."""
        return any(one.is_begun for one in self._inputs)

    def begin(self, inputs: Sequence[GenerationRequest]) -> None:
        """Submit all inputs.

        Raises:
          RequestError: refused; nothing was begun.
        """
        now = trio.current_time()
        self._requests.wake(now)
        self._inputs = self._requests.submit(inputs, now)
        for one in self._inputs:
            one.relay.mailbox.bind(self._note)
        self._flush()

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
        rest = [one for one in self._inputs if one.terminal is None]
        if rest:
            now = trio.current_time()
            self._requests.wake(now)
            self._requests.end(rest, cancelled(reason, self._config), now)
            self._flush()

    def _note(self) -> None:
        self._changed.set()

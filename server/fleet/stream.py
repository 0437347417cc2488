"""What the surface holds of a running request: the reading end of its mailbox.

Knows Trio's events and the conductor's two calls; owns nothing, so that dropping it harms nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from triolet.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..generation import CancelReason, Event, GenerationRequest
    from .sequence import Sequence as RunningSequence


class Stream:
    """A Generation (server/generation.py) of this fleet.

    Args:
      sequence: what it reads.
      on_taken: told when events were taken.
      on_cancel: told when it shall end.
    """

    def __init__(
        self,
        sequence: RunningSequence,
        on_taken: Callable[[RunningSequence], None],
        on_cancel: Callable[[RunningSequence, CancelReason], None],
    ) -> None:
        self._sequence = sequence
        self._mailbox = sequence.relay.mailbox
        self._on_taken = on_taken
        self._on_cancel = on_cancel
        self._is_over = False

    @property
    def request(self) -> GenerationRequest:
        """What was asked for."""
        return self._sequence.request

    async def next_events(self) -> Sequence[Event]:
        """Wait for events, then return all there are, or as many as are light enough.

        Raises:
          LocalProtocolError: the terminal event was returned before.
          trio.BusyResourceError: somebody else is waiting already.
        """
        if self._is_over:
            raise LocalProtocolError("the terminal event of this stream was returned before")
        if self._mailbox.on_filled is not None:
            raise trio.BusyResourceError("another task reads this stream")
        if self._mailbox.waiting_since is None:
            filled = trio.Event()
            self._mailbox.on_filled = filled.set
            try:
                await filled.wait()
            finally:
                self._mailbox.on_filled = None
        else:
            await trio.lowlevel.checkpoint()
        events = self._mailbox.take(trio.current_time())
        self._is_over = self._mailbox.is_closed and not self._mailbox.has_terminal
        self._on_taken(self._sequence)
        return events

    def cancel(self, reason: CancelReason) -> None:
        """End it now. Idempotent."""
        self._on_cancel(self._sequence, reason)

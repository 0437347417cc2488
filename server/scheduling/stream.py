"""What the surface holds of a running request: the reading end of its mailbox.

Knows Trio's events and the conductor's two calls; owns nothing, so that dropping it harms nobody.
A reader may wait, which costs a task's turn for each token, or listen: then it is called when there
is something, and all that came with one frame of a worker is handed out in one turn of one task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from triolet.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..contract.generation import CancelReason, Event, GenerationRequest
    from .request import Request


class Stream:
    """A Generation (server/contract/generation.py) of this fleet.

    Args:
      sequence: what it reads.
      on_taken: told when events were taken.
      on_cancel: told when it shall end.
      on_due: told when its listener is to be called, with `hand_out`.
    """

    def __init__(
        self,
        sequence: Request,
        on_taken: Callable[[Request], None],
        on_cancel: Callable[[Request, CancelReason], None],
        on_due: Callable[[Stream], None],
    ) -> None:
        self._sequence = sequence
        self._mailbox = sequence.relay.mailbox
        self._on_taken = on_taken
        self._on_cancel = on_cancel
        self._on_due = on_due
        self._on_events: Callable[[], None] | None = None
        self._is_due = False
        self._is_over = False

    @property
    def request(self) -> GenerationRequest:
        """What was asked for."""
        return self._sequence.request

    @property
    def has_begun(self) -> bool:
        """Whether a worker was ever asked to compute it."""
        return self._sequence.is_begun

    async def next_events(self) -> Sequence[Event]:
        """Wait for events, then return all there are, or as many as are light enough.

        Raises:
          LocalProtocolError: the terminal event was returned before.
          trio.BusyResourceError: somebody else is waiting already.
        """
        self._check_open()
        self._check_alone()
        if self._mailbox.waiting_since is None:
            filled = trio.Event()
            self._mailbox.on_filled = filled.set
            try:
                await filled.wait()
            finally:
                self._mailbox.on_filled = None
        else:
            await trio.lowlevel.checkpoint()
        return self._take()

    def take_now(self) -> Sequence[Event]:
        """Return all events there are, or as many as are light enough; perhaps none.

        Raises:
          LocalProtocolError: the terminal event was returned before.
        """
        self._check_open()
        return self._take() if self._mailbox.waiting_since is not None else ()

    def listen(self, on_events: Callable[[], None] | None) -> None:
        """Have this called whenever there is something to take; None to stop.

        Raises:
          trio.BusyResourceError: somebody else waits or listens.
        """
        if on_events is not None:
            self._check_alone()
        self._on_events = on_events
        self._mailbox.on_filled = None if on_events is None else self._note_filled
        if on_events is not None and self._mailbox.waiting_since is not None:
            self._note_filled()

    def hand_out(self) -> None:
        """Call the listener, if there still is one and something for it."""
        self._is_due = False
        if self._on_events is not None and self._mailbox.waiting_since is not None:
            self._on_events()
            if self._on_events is not None and self._mailbox.waiting_since is not None:
                self._note_filled()  # it took what was light enough

    def cancel(self, reason: CancelReason) -> None:
        """End it now. Idempotent."""
        self._on_cancel(self._sequence, reason)

    def _check_open(self) -> None:
        if self._is_over:
            raise LocalProtocolError("the terminal event of this stream was returned before")

    def _check_alone(self) -> None:
        if self._mailbox.on_filled is not None:
            raise trio.BusyResourceError("somebody else reads this stream")

    def _note_filled(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._on_due(self)

    def _take(self) -> list[Event]:
        events = self._mailbox.take(trio.current_time())
        self._is_over = self._mailbox.is_closed and not self._mailbox.has_terminal
        self._on_taken(self._sequence)
        return events

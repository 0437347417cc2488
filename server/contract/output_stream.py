"""`OutputStream`: the events of one request, as every response writer reads them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

import trio

from .generation import Delta
from .output_stage import pass_through

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .generation import CancelReason, Events, Generation
    from .output_stage import OutputStage

Left = TypeVar("Left")


class StreamDelivery:
    """Calls `deliver` on streams that have events; this base class does so for each one separately,
    in the event loop's next turn."""

    def add(self, stream: OutputStream) -> None:
        """Deliver soon, once for all events that arrive together."""
        token = trio.lowlevel.current_trio_token()
        token.run_sync_soon(lambda: stream.deliver(trio.current_time()))


def _all(events: Events) -> Events:
    return events


def _raise(error: Exception) -> NoReturn:
    raise error


class OutputStream:
    """The events of one request's choices, for a single reader.

    A reader either iterates (`async for events in stream`), which costs a task switch per token, or
    passes a `write` function that is called in the turn in which events arrive (`pump`, `listen`).

    A stream owns no resources. If it is dropped without `cancel`, the stall limit ends its request.

    Args:
      generations: one per choice, in order.
      delivery: delivers events to this stream and others.

    Attributes:
      generations: one per choice, in order.
      tenant: the request's tenant.
      delivered_at: when `write` was last called, on Trio's clock.
    """

    def __init__(
        self,
        generations: Sequence[Generation],
        delivery: StreamDelivery | None = None,
    ) -> None:
        self.generations = tuple(generations)
        self.tenant = self.generations[0].request.scheduling.claimant
        self.delivered_at = 0.0
        self._stages: list[list[OutputStage]] = []
        self._delivery = delivery or StreamDelivery()
        self._num_open = len(self.generations)
        self._filled: list[int] = []
        self._is_due = False
        self._write: Callable[[Events], object] | None = None
        self._fail: Callable[[Exception], None] = _raise
        self._left: object = None
        self._woken: trio.Event | None = None
        for index, generation in enumerate(self.generations):
            generation.attach(self, index)

    @property
    def has_begun(self) -> bool:
        """Whether a worker was ever asked to compute any choice."""
        return any(generation.has_begun for generation in self.generations)

    @property
    def is_over(self) -> bool:
        """Whether the last event of every choice was taken."""
        return not self._num_open

    def take(self) -> Events:
        """Return available events with the index of their choice, without waiting."""
        filled, self._filled = self._filled, []
        taken: Events = []
        for index in filled:
            generation = self.generations[index]
            for event in generation.take_now():
                taken.append((index, event))
                if not isinstance(event, Delta):
                    self._num_open -= 1
            if generation.has_events:
                self.note_filled(index)
        if self._stages:
            return [
                (at, one) for at, event in taken for one in pass_through(self._stages[at], event)
            ]
        return taken

    def add_stage(self, index: int, stage: OutputStage) -> None:
        """Add a stage after the stages that a choice's events already pass."""
        self._stages = self._stages or [[] for _ in self.generations]
        self._stages[index].append(stage)

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> Events:
        """Wait for events and take them. Cancellation-safe: no events are lost.

        The wait has no deadline of its own: the request's deadline produces its last event.

        Raises:
          trio.BusyResourceError: the stream has another reader.
        """
        events = await self.pump(_all)
        if events is None:
            raise StopAsyncIteration
        return events

    async def pump(
        self, write: Callable[[Events], Left | None], deadline: float = math.inf
    ) -> Left | None:
        """Call `write` with events as they arrive, until it returns something.

        Args:
          write: must not wait; returns what it could not write, or None.
          deadline: on Trio's clock.

        Returns:
          What `write` returned; None at the deadline or the end of the stream.

        Raises:
          Exception: raised by `write`.
          trio.BusyResourceError: the stream has another reader.
        """
        self._check_alone()
        if self.is_over:
            return None
        self._write, self._woken, self._left = write, trio.Event(), None
        try:
            if self._filled:
                await trio.lowlevel.checkpoint()
                self.deliver(trio.current_time())
            if not self._woken.is_set():  # otherwise a cancel would lose what is left
                with trio.move_on_at(deadline):
                    await self._woken.wait()
        finally:
            self._write = self._woken = None
        if isinstance(self._left, Exception):
            raise self._left
        return cast("Left | None", self._left)

    def listen(
        self,
        write: Callable[[Events], None] | None,
        fail: Callable[[Exception], None] = _raise,
    ) -> None:
        """Call `write` with events as they arrive, until `listen(None)`.

        Args:
          write: must not wait.
          fail: called with any error from `write` or from taking events, because the caller
            delivers to all streams.

        Raises:
          trio.BusyResourceError: the stream has another reader.
        """
        if write is not None:
            self._check_alone()
        self._write, self._fail = write, _raise if write is None else fail
        if write is not None and self._filled:
            self._note_due()

    def deliver(self, now: float) -> None:
        """Pass the available events to the reader. An error of one reader is raised in its own
        task."""
        self._is_due = False
        self.delivered_at = now
        if not self._filled:
            return
        if self._write is not None:
            left: object
            fail = self._fail  # report the error even if the reader stops listening
            try:
                left = self._write(self.take())
            except Exception as error:  # noqa: BLE001 (reported to its reader)
                if self._woken is None:  # no task waits to raise it
                    fail(error)
                    return
                left = error
            if left is None and self._num_open:
                return
            self._left, self._write = left, None
        if self._woken is not None:
            self._woken.set()

    def cancel(self, reason: CancelReason) -> None:
        """Cancel all choices now, without waiting. Idempotent."""
        for generation in self.generations:
            generation.cancel(reason)

    def note_filled(self, index: int) -> None:
        """Record that a choice has events where it had none."""
        self._filled.append(index)
        self._note_due()

    def _note_due(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._delivery.add(self)

    def _check_alone(self) -> None:
        if self._write is not None or self._woken is not None:
            raise trio.BusyResourceError("this stream has another reader")

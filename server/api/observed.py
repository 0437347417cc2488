"""A generation that is counted: in flight until its end, its times and outcome in the metrics.

Knows clocks and counters; changes nothing of what it passes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ..generation import CancelReason, Delta, Failed, Finished

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..generation import Event, Generation, GenerationRequest
    from ..metrics import Metrics
    from .live import LiveRequest
    from .ports import Services


class ObservedGeneration:
    """Passes a generation on and watches it.

    Args:
      inner: the generation.
      services: whose lifecycle counts it and whose metrics hear of it.
    """

    def __init__(self, inner: Generation, services: Services) -> None:
        self._inner = inner
        self._lifecycle = services.lifecycle
        self._metrics: Metrics = services.metrics
        self._began_at = self._last_at = trio.current_time()
        self._num_tokens = 0
        self._reason: CancelReason | None = None
        self._is_over = False
        services.lifecycle.begin(self)

    @property
    def request(self) -> GenerationRequest:
        """What was asked for."""
        return self._inner.request

    async def next_events(self) -> Sequence[Event]:
        """Wait for events, then return all there are."""
        events = await self._inner.next_events()
        now = trio.current_time()
        for event in events:
            match event:
                case Delta():
                    self._tokens(len(event.token_ids), now)
                case Finished():
                    self._end(event.reason.value, now, event)
                case Failed():
                    reason = self._reason.value if self._reason else event.error.code
                    self._end(reason, now, event)
        return events

    def cancel(self, reason: CancelReason) -> None:
        """End it now. Where nobody is left to read its end, it is counted here."""
        if self._is_over:
            return
        self._reason = self._reason or reason
        self._inner.cancel(reason)
        if reason is CancelReason.CLIENT_GONE:
            self._end(self._reason.value, trio.current_time(), None)

    def _tokens(self, count: int, now: float) -> None:
        if count == 0:
            return
        if self._num_tokens == 0:
            self._metrics.first_token(now - self._began_at)
            count_after_first = count - 1
        else:
            count_after_first = count
        if count_after_first:
            self._metrics.next_tokens(count_after_first, now - self._last_at)
        self._num_tokens += count
        self._last_at = now

    def _end(self, outcome: str, now: float, end: Finished | Failed | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._metrics.ended(
            outcome,
            elapsed_s=now - self._began_at,
            prompt_tokens=len(self.request.prompt_ids),
            completion_tokens=end.usage.completion_tokens if end else self._num_tokens,
            cached_tokens=end.usage.cached_tokens if end else 0,
            queue_s=end.usage.queue_s if end else None,
        )
        self._lifecycle.end(self)


def begin(services: Services, live: LiveRequest, request: GenerationRequest) -> ObservedGeneration:
    """Submit a generation that ends with its request.

    Raises:
      RequestError: the fleet refuses it.
    """
    generation = ObservedGeneration(services.fleet.submit(request), services)
    live.hold(generation)
    return generation

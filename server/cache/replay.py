"""Answers that are written down while they are read, and generations that say them again."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec

from triolet.errors import RequestError

from ..contract.generation import Delta, Failed, Finished, FinishReason, TokenLogprob, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..contract.generation import CancelReason, Event, GenerationRequest

EVENTS_AT_ONCE: Final = 16
"""Of a replay. A client that reads slowly holds what was taken, as text and in copies."""
PIECE_BYTES: Final = 29
TOKEN_BYTES: Final = 4
SCORE_BYTES: Final = 55
ALTERNATIVE_BYTES: Final = 24
"""About what a piece without its text, a token, its score and another one's beside it cost in a
script."""


class Script(msgspec.Struct, frozen=True, array_like=True):
    """All of an answer, as it was said.

    Attributes:
      deltas: text and tokens, in the pieces in which they were read.
      reason: why it ended.
      usage: what it took when it was computed.
      stop_string: that ended it.
      fingerprint: of the model.
      is_by_stop_token: as in Finished.
    """

    deltas: tuple[Delta, ...]
    reason: FinishReason
    usage: Usage
    stop_string: str | None
    fingerprint: str
    is_by_stop_token: bool = False


class Recording:
    """Writes down what is taken of one generation.

    Args:
      request: as it runs.
      max_bytes: about as much is written down; of a longer answer nothing is kept.
      on_finished: called with the request and the whole answer, if it had its good end.
    """

    def __init__(
        self,
        request: GenerationRequest,
        max_bytes: int,
        on_finished: Callable[[GenerationRequest, Script], None],
    ) -> None:
        self._request = request
        self._room = max_bytes
        self._deltas: list[Delta] = []
        self._on_finished = on_finished

    def note(self, event: Event) -> None:
        """Write down one event."""
        match event:
            case Delta() if self._room > 0:
                self._deltas.append(event)
                self._room -= size_of(event)
            case Finished() if self._room > 0:
                script = Script(
                    tuple(self._deltas),
                    event.reason,
                    event.usage,
                    event.stop_string,
                    event.fingerprint,
                    event.is_by_stop_token,
                )
                self._deltas = []
                self._on_finished(self._request, script)
            case _:
                self._deltas = []


class Replay:
    """An answer that is given again. It holds nothing but its words.

    Args:
      request: what was asked for.
      script: what was answered.
    """

    def __init__(self, request: GenerationRequest, script: Script) -> None:
        self._request = request
        # The tokens are those that it took; it waited for nothing this time.
        ttft_s = None if script.usage.ttft_s is None else 0.0
        self._usage = replace(script.usage, queue_s=0.0, ttft_s=ttft_s)
        end = Finished(
            script.reason,
            self._usage,
            script.stop_string,
            script.fingerprint,
            script.is_by_stop_token,
        )
        self._events: deque[Event] = deque((*script.deltas, end))

    @property
    def request(self) -> GenerationRequest:
        """What was asked for."""
        return self._request

    @property
    def has_begun(self) -> bool:
        """Whether a worker was ever asked to compute it: nobody is."""
        return False

    @property
    def has_events(self) -> bool:
        """Whether something is left of it."""
        return bool(self._events)

    def bind(self, on_filled: Callable[[], None]) -> None:
        """Have this called: all of it is here."""
        on_filled()

    def take_now(self) -> Sequence[Event]:
        """Return the next events."""
        count = min(EVENTS_AT_ONCE, len(self._events))
        return [self._events.popleft() for _ in range(count)]

    def cancel(self, reason: CancelReason) -> None:
        """End it now. Idempotent; nothing after a terminal event."""
        if self._events and not isinstance(self._events[-1], Failed):
            error = RequestError(f"it was ended: {reason}", status=499, code="cancelled")
            self._events.clear()
            self._events.append(Failed(error, self._usage))


def size_of(delta: Delta) -> int:
    """Return about how many bytes of a script it takes."""
    scores = sum(_score_size(score) for score in delta.logprobs)
    return len(delta.text) + PIECE_BYTES + TOKEN_BYTES * len(delta.token_ids) + scores


def _score_size(score: TokenLogprob) -> int:
    return SCORE_BYTES + ALTERNATIVE_BYTES * len(score.top)

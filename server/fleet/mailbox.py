"""What waits for the reader of one stream.

Knows events and when the oldest of them came; knows no Trio: whoever waits sets `on_filled`. Holds
at most a token window of text, because taking from here is what lets the worker go on.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

from ..generation import Delta

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transport.frames import TokenRow

    from ..generation import Event, Failed, Finished, TokenLogprob


class Scores(NamedTuple):
    """One token and its alternatives, as they wait: in a seventh of the memory of what readers get.
    A stalled reader has a whole window of them here.

    Attributes:
      token_id: the chosen one.
      logprob: its own.
      top_ids: alternatives, best first.
      top_logprobs: theirs.
    """

    token_id: int
    logprob: float
    top_ids: array[int]
    top_logprobs: array[float]


def packed(row: TokenRow, logprob: float) -> Scores:
    """Return a row's scores."""
    ids = array("q", [top.token_id for top in row.top])
    return Scores(row.token_id, logprob, ids, array("d", [top.logprob for top in row.top]))


class Mailbox:
    """Deltas, merged into one, and the terminal event behind them.

    Args:
      shown: turns scores into what the reader gets.

    Attributes:
      on_filled: called whenever something was put in.
      waiting_since: when the oldest event that is still here came; None if empty.
      is_closed: the terminal event was put in.
    """

    def __init__(self, shown: Callable[[Scores], TokenLogprob]) -> None:
        self._shown = shown
        self.on_filled: Callable[[], None] | None = None
        self.waiting_since: float | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._scores: list[Scores] = []
        self._terminal: Finished | Failed | None = None
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether the terminal event was put in, taken or not."""
        return self._is_closed

    @property
    def has_terminal(self) -> bool:
        """Whether the next `take` returns the end of the stream."""
        return self._terminal is not None

    def put_text(
        self, text: str, token_ids: Sequence[int], scores: Sequence[Scores], now: float
    ) -> None:
        """Add new text and the tokens that it came with."""
        assert not self._is_closed, "nothing comes after the terminal event"
        self._text.append(text)
        self._token_ids.extend(token_ids)
        self._scores.extend(scores)
        self._filled(now)

    def close(self, terminal: Finished | Failed, now: float) -> None:
        """Put in the last event."""
        assert not self._is_closed, "a stream has one terminal event"
        self._is_closed = True
        self._terminal = terminal
        self._filled(now)

    def excuse(self, absence_s: float) -> None:
        """Take back time in which its reader was not let run."""
        if self.waiting_since is not None:
            self.waiting_since += absence_s

    def take(self) -> list[Event]:
        """Return everything that is here."""
        events: list[Event] = []
        if self._token_ids or self._text:
            logprobs = tuple(map(self._shown, self._scores))
            events.append(Delta("".join(self._text), tuple(self._token_ids), logprobs))
            self._text, self._token_ids, self._scores = [], [], []
        if self._terminal is not None:
            events.append(self._terminal)
            self._terminal = None
        self.waiting_since = None
        return events

    def _filled(self, now: float) -> None:
        if self.waiting_since is None:
            self.waiting_since = now
        if self.on_filled is not None:
            self.on_filled()

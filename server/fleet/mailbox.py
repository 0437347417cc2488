"""What waits for the reader of one stream.

Knows events and when the oldest of them came; knows no Trio: whoever waits sets `on_filled`. Holds
at most a token window of text, because taking from here is what lets the worker go on.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

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


class Put(NamedTuple):
    """What came at once: text, and the token that completed it, if one did."""

    text: str
    token_ids: tuple[int, ...]
    scores: tuple[Scores, ...]

    @property
    def weight(self) -> int:
        """Alternatives in it, each of which costs a reader a hundred bytes to write."""
        return sum(1 + len(scores.top_ids) for scores in self.scores)


MAX_WEIGHT: Final = 256
"""Taken at once. A write that a stalled client does not take holds what was taken, as text and in
several copies; what is still here is small. Without alternatives a whole window stays below it."""


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
      num_taken: tokens that the reader has.
    """

    def __init__(self, shown: Callable[[Scores], TokenLogprob]) -> None:
        self._shown = shown
        self.on_filled: Callable[[], None] | None = None
        self.waiting_since: float | None = None
        self.num_taken = 0
        self._puts: list[Put] = []
        self._terminal: Finished | Failed | None = None
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether the terminal event was put in, taken or not."""
        return self._is_closed

    @property
    def has_terminal(self) -> bool:
        """Whether the terminal event is here."""
        return self._terminal is not None

    def put_text(
        self, text: str, token_ids: Sequence[int], scores: Sequence[Scores], now: float
    ) -> None:
        """Add new text and the tokens that it came with."""
        self.put(Put(text, tuple(token_ids), tuple(scores)), now)

    def put(self, put: Put, now: float) -> None:
        """Add what came at once."""
        assert not self._is_closed, "nothing comes after the terminal event"
        self._puts.append(put)
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

    def take(self, now: float) -> list[Event]:
        """Return what is here; of what is heavy a part, and the rest waits as if it came now."""
        if len(self._puts) == 1 and self._terminal is None and not self._puts[0].scores:
            return [self._take_one()]  # which most are
        count = self._count_light()
        puts, self._puts = self._puts[:count], self._puts[count:]
        events: list[Event] = []
        if puts:
            token_ids = tuple(token_id for put in puts for token_id in put.token_ids)
            logprobs = tuple(self._shown(scores) for put in puts for scores in put.scores)
            events.append(Delta("".join(put.text for put in puts), token_ids, logprobs))
            self.num_taken += len(token_ids)
        if self._terminal is not None and not self._puts:
            events.append(self._terminal)
            self._terminal = None
        self.waiting_since = now if self._puts else None
        return events

    def _take_one(self) -> Delta:
        text, token_ids, _ = self._puts.pop()
        self.num_taken += len(token_ids)
        self.waiting_since = None
        return Delta(text, token_ids)

    def _count_light(self) -> int:
        """Return how many of the oldest are light enough together, at least one."""
        weight = 0
        for count, put in enumerate(self._puts):
            weight += put.weight
            if count and weight > MAX_WEIGHT:
                return count
        return len(self._puts)

    def _filled(self, now: float) -> None:
        if self.waiting_since is None:
            self.waiting_since = now
        if self.on_filled is not None:
            self.on_filled()

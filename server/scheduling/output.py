"""The output side of a request: turns token rows into text and holds it until the reader takes it.

At most one token window of text waits, because taking it is what gives the worker more credit.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from triolet.config import BACKGROUND_WINDOW
from triolet.sampling import end_token_ids, first_end
from triolet.service_class import ServiceClass

from ..contract.generation import Delta, FinishReason, TokenLogprob
from ..text.detokenizer import StopStrings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transport.frames import TokenRow

    from ..contract.generation import Event, Failed, Finished, GenerationRequest, OutputReader
    from ..text.detokenizer import TokenText


def is_background(request: GenerationRequest) -> bool:
    """Return whether a request yields to all others."""
    return request.scheduling.service_class is ServiceClass.BATCH


def window_of(request: GenerationRequest, token_window: int) -> int:
    """Return how many tokens a stream may run ahead of its reader."""
    return min(token_window, BACKGROUND_WINDOW) if is_background(request) else token_window


class Scores(NamedTuple):
    """One token and its alternatives in compact form: a seventh of the memory of what readers get.
    A stalled reader has a whole window of these waiting.

    Attributes:
      token_id: the chosen token.
      logprob: its log probability.
      top_ids: the alternatives, best first.
      top_logprobs: their log probabilities.
    """

    token_id: int
    logprob: float
    top_ids: array[int]
    top_logprobs: array[float]


class Put(msgspec.Struct, frozen=True, gc=False):
    """Text that arrived together, and the token that completed it, if any."""

    text: str
    token_ids: tuple[int, ...]
    scores: tuple[Scores, ...]

    @property
    def weight(self) -> int:
        """The number of scored tokens and alternatives; each costs about 100 bytes when written."""
        return sum(1 + len(scores.top_ids) for scores in self.scores)


MAX_WEIGHT: Final = 256
"""Maximum weight taken at once. A write that a stalled client does not accept holds several copies
of its text, while what is still in the mailbox is compact. Without alternatives a whole window
stays below this."""


def packed(row: TokenRow, logprob: float) -> Scores:
    """Return a row's scores."""
    ids = array("q", [top.token_id for top in row.top])
    return Scores(row.token_id, logprob, ids, array("d", [top.logprob for top in row.top]))


class Mailbox:
    """Waiting text, merged when taken, followed by the terminal event.

    Args:
      text: the model's tokenizer, to write scored tokens.

    Attributes:
      waiting_since: arrival time of the oldest waiting event; None if empty.
      num_taken: tokens that the reader has taken.
    """

    def __init__(self, text: RelayText) -> None:
        self._text = text
        self._reader: OutputReader | None = None
        self._index = 0
        self.waiting_since: float | None = None
        self.num_taken = 0
        self._puts: list[Put] = []
        self._terminal: Finished | Failed | None = None
        self._is_closed = False

    def attach(self, reader: OutputReader, index: int) -> None:
        """Notify `reader` when events arrive in an empty mailbox."""
        if not self._is_closed:  # else nothing follows, and the reference would leak the reader
            self._reader, self._index = reader, index
        if self.waiting_since is not None:
            reader.note_filled(index)

    def put(self, put: Put, now: float) -> None:
        """Add text that arrived together."""
        assert not self._is_closed, "nothing comes after the terminal event"
        self._puts.append(put)
        if self.waiting_since is None:
            self._filled(now)

    def close(self, terminal: Finished | Failed, now: float) -> None:
        """Add the terminal event."""
        assert not self._is_closed, "a stream has one terminal event"
        self._is_closed = True
        self._terminal = terminal
        if self.waiting_since is None:
            self._filled(now)
        self._reader = None  # breaks a reference cycle: the reader holds this object

    def discount(self, pause_s: float) -> None:
        """Move the waiting time forward by a pause in which the reader could not run."""
        if self.waiting_since is not None:
            self.waiting_since += pause_s

    def take(self, now: float) -> list[Event]:
        """Return the waiting events, up to `MAX_WEIGHT`; the rest waits as if it had just
        arrived."""
        count = self._count_light()
        puts, self._puts = self._puts[:count], self._puts[count:]
        events: list[Event] = []
        if puts:
            token_ids = tuple(token_id for put in puts for token_id in put.token_ids)
            logprobs = tuple(_shown(self._text, scores) for put in puts for scores in put.scores)
            events.append(Delta("".join(put.text for put in puts), token_ids, logprobs))
            self.num_taken += len(token_ids)
        if self._terminal is not None and not self._puts:
            events.append(self._terminal)
            self._terminal = None
        self.waiting_since = now if self._puts else None
        return events

    def take_one(self) -> list[Event] | None:
        """Return the waiting event if it is a single text without scores, the usual case; else
        None."""
        if len(self._puts) != 1 or self._terminal is not None or self._puts[0].scores:
            return None
        put = self._puts.pop()
        self.num_taken += len(put.token_ids)
        self.waiting_since = None
        return [Delta(put.text, put.token_ids)]

    def _count_light(self) -> int:
        """Return how many of the oldest puts fit `MAX_WEIGHT` together, at least one."""
        weight = 0
        for count, put in enumerate(self._puts):
            weight += put.weight
            if count and weight > MAX_WEIGHT:
                return count
        return len(self._puts)

    def _filled(self, now: float) -> None:
        self.waiting_since = now
        if self._reader is not None:
            self._reader.note_filled(self._index)


class TextStream(Protocol):
    """An incremental detokenizer."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes."""
        ...

    def flush(self) -> str:
        """Return the remaining text."""
        ...


class RelayText(Protocol):
    """What a relay needs of the tokenizer (server.text.tokenizer.TextModel)."""

    eos_token_ids: tuple[int, ...]
    max_model_len: int

    def detokenizer(
        self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> TextStream:
        """Return a decoder for one completion."""
        ...

    def token(self, token_id: int) -> TokenText:
        """Return the text of a single token."""
        ...


class RelayEnd(NamedTuple):
    """The request has ended, judging by its tokens.

    Attributes:
      reason: the finish reason.
      stop_string: the stop string that was found.
      is_by_stop_token: it ended at a stop token of the client's that is no end token of the
        model's.
    """

    reason: FinishReason
    stop_string: str | None = None
    is_by_stop_token: bool = False


class _MarkedText:
    """A text stream that replaces marker tokens by given texts."""

    def __init__(self, stream: TextStream, markers: Mapping[int, str]) -> None:
        self._stream = stream
        self._markers = markers

    def push(self, token_id: int) -> str:
        """Return the text that this token completes."""
        marker = self._markers.get(token_id)
        return self._stream.push(token_id) if marker is None else self._stream.flush() + marker

    def flush(self) -> str:
        """Return the remaining text."""
        return self._stream.flush()


class Relay:
    """Turns one request's tokens into text and checks whether they end it.

    Attributes:
      token_ids: completion tokens so far, including the end token.
      mailbox: holds the events for the reader.
    """

    def __init__(self, request: GenerationRequest, text: RelayText) -> None:
        self.token_ids: list[int] = []
        self.mailbox = Mailbox(text)
        self._request = request
        self._text = text
        self._end_ids = end_token_ids(request.sampling, text.eos_token_ids)
        self._first_end = first_end(request.sampling)
        self._stream: TextStream = text.detokenizer(
            request.prompt_ids, skip_special_tokens=request.skip_special_tokens
        )
        if request.markers:
            self._stream = _MarkedText(self._stream, request.markers)
        self._stop = StopStrings(request.stop, include_stop=request.include_stop)
        self._reasoning = request.sampling.reasoning
        self._watch = None if request.watch is None else request.watch()
        self._watches_reasoning = self._reasoning is not None and self._reasoning.is_in_grammar
        can_end = bool(request.stop) or self._watch is not None
        self._is_plain = not can_end and request.sampling.logprobs is None

    def push(self, row: TokenRow, now: float) -> RelayEnd | None:
        """Add the token at the next position.

        Returns:
          How the request ends with this token; None if it continues.
        """
        assert row.position == len(self.token_ids), "positions come once and in order"
        sampling = self._request.sampling
        is_end = row.token_id in self._end_ids and row.position >= self._first_end
        self.token_ids.append(row.token_id)
        if self._is_plain and not is_end and row.position + 1 < sampling.max_tokens:
            # The usual case: nothing to check.
            self.mailbox.put(Put(self._stream.push(row.token_id), (row.token_id,), ()), now)
            return None
        is_shown = not is_end or self._request.include_stop
        is_watched = self._watches_reasoning or not self._is_thinking()
        text = self._cut(self._stream.push(row.token_id) if is_shown else "")
        matched = self._stop.matched
        end = None if matched is None else RelayEnd(FinishReason.STOP, matched)
        if end is None and self._watch is not None and is_watched and self._watch.push(text):
            end = RelayEnd(FinishReason.STOP)
        if end is None and (is_end or len(self.token_ids) >= sampling.max_tokens):
            end, rest = self._end(FinishReason.STOP if is_end else FinishReason.LENGTH)
            text += rest
            is_models = row.token_id in self._text.eos_token_ids
            end = end._replace(is_by_stop_token=is_end and not is_models)
        self.mailbox.put(Put(text, (row.token_id,), self._scores(row)), now)
        return end

    def end(self, reason: FinishReason, now: float) -> RelayEnd:
        """End after the tokens so far, because the worker says so."""
        end, text = self._end(reason)
        if text:
            self.mailbox.put(Put(text, (), ()), now)
        return end

    def _end(self, reason: FinishReason) -> tuple[RelayEnd, str]:
        """Return how it ends, and the text held back: a partial character or stop string."""
        text = self._cut(self._stream.flush())
        matched = self._stop.matched
        end = RelayEnd(reason if matched is None else FinishReason.STOP, matched)
        return end, text + _text_of(self._stop.finish())

    def _cut(self, text: str) -> str:
        """Return the text that may be shown. Stop strings apply to the answer only."""
        if self._reasoning is None or not self._is_thinking():
            return _text_of(self._stop.push(Delta(text, ())))
        if self._reasoning.closes(self.token_ids):
            self._reasoning = None
        return text

    def _is_thinking(self) -> bool:
        """Return whether the last token is reasoning or one of its markers."""
        reasoning = self._reasoning
        if reasoning is not None and not reasoning.begins_with(self.token_ids):
            reasoning = self._reasoning = None
        return reasoning is not None

    def _scores(self, row: TokenRow) -> tuple[Scores, ...]:
        if self._request.sampling.logprobs is None or row.logprob is None:
            return ()
        return (packed(row, row.logprob),)


def _text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def _shown(model_text: RelayText, scores: Scores) -> TokenLogprob:
    chosen = model_text.token(scores.token_id)
    alternatives = zip(scores.top_ids, scores.top_logprobs, strict=True)
    return TokenLogprob(
        token_id=scores.token_id,
        text=chosen.text,
        raw=chosen.raw,
        logprob=scores.logprob,
        top=tuple((i, *model_text.token(i), logprob) for i, logprob in alternatives),
    )

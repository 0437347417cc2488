"""A whole answer at once, for clients that do not stream. Knows how events add up, not its form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..generation import Delta, Failed, Finished

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..generation import Event, TokenLogprob
    from .choices import Choices


@dataclass(slots=True)
class Answer:
    """One choice, complete once it has its end."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: Finished | None = None

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self.texts)

    @property
    def finished(self) -> Finished:
        """Its end; only asked for once it is there."""
        assert self.end is not None
        return self.end


def add_event(answers: Sequence[Answer], index: int, event: Event) -> None:
    """Add an event to the answer of its choice.

    Raises:
      RequestError: it is the bad end.
    """
    answer = answers[index]
    match event:
        case Delta():
            answer.texts.append(event.text)
            answer.token_ids.extend(event.token_ids)
            answer.logprobs.extend(event.logprobs)
        case Finished():
            answer.end = event
        case Failed():
            raise event.error


async def collect(choices: Choices, count: int) -> list[Answer]:
    """Read all choices to their ends.

    Raises:
      RequestError: one of them failed.
    """
    answers = [Answer() for _ in range(count)]
    while not choices.are_over:
        for index, events in await choices.next_events():
            for event in events:
                add_event(answers, index, event)
    return answers


class WholeScript:
    """An answer that is said in one piece, once all of it is there.

    Args:
      count: number of choices.
      document: writes it.
    """

    def __init__(self, count: int, document: Callable[[list[Answer]], bytes]) -> None:
        self._answers = [Answer() for _ in range(count)]
        self._document = document

    def begin(self) -> list[bytes]:
        """Return nothing."""
        return []

    def write(self, index: int, event: Event, *, is_stopped: bool) -> list[bytes]:
        """Take an event; of a failure nothing is shown."""
        del is_stopped  # over HTTP a client stops by leaving
        if not isinstance(event, Failed):
            add_event(self._answers, index, event)
        return []

    def end(self) -> list[bytes]:
        """Return the whole."""
        return [self._document(self._answers)]

"""A whole answer at once, for clients that do not stream. Knows how events add up, not its form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..generation import Delta, Failed, Finished

if TYPE_CHECKING:
    from ..generation import TokenLogprob
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


async def collect(choices: Choices, count: int) -> list[Answer]:
    """Read all choices to their ends.

    Raises:
      RequestError: one of them failed.
    """
    answers = [Answer() for _ in range(count)]
    while not choices.are_over:
        for index, events in await choices.next_events():
            answer = answers[index]
            for event in events:
                match event:
                    case Delta():
                        answer.texts.append(event.text)
                        answer.token_ids.extend(event.token_ids)
                        answer.logprobs.extend(event.logprobs)
                    case Finished():
                        answer.end = event
                    case Failed():
                        raise event.error
    return answers

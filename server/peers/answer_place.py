"""Where the answer of an idempotency key is, among servers on several hosts."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class AnswerPlace(StrEnum):
    """Where the answer of a key is."""

    HERE = "here"
    ELSEWHERE = "elsewhere"  # on a server that lives
    LOST = "lost"  # on a server that is dead
    UNKNOWN = "unknown"  # Redis was away: whether its server lives will be known soon
    ALONE = "alone"  # no server has it that the directory knows


class AnswerOwner(NamedTuple):
    """Who holds the answer of a key.

    Attributes:
      place: where it is.
      url: of its host; empty unless it is elsewhere.
    """

    place: AnswerPlace
    url: str = ""

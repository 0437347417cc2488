"""Types that say which host holds the answer of an idempotency key (see answer_directory.py)."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class AnswerPlace(StrEnum):
    """Location of the answer of a key."""

    HERE = "here"
    ELSEWHERE = "elsewhere"  # on a live server
    LOST = "lost"  # on a dead server
    UNKNOWN = "unknown"  # Redis was away, so it is not known yet whether the server is alive
    ALONE = "alone"  # on no server that the directory knows


class AnswerOwner(NamedTuple):
    """The holder of the answer of a key.

    Attributes:
      place: location of the answer.
      url: URL of its host; empty unless it is on another host.
    """

    place: AnswerPlace
    url: str = ""

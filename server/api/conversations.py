"""What was said on one WebSocket, so that a client may continue an answer by its id.

Knows a bound in characters; forgets the oldest answers beyond it. Lives and dies with its socket.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, TypeAlias

from triolet.errors import RequestError, invalid_request

from .errors import echo

if TYPE_CHECKING:
    from .schemas import Message

Turns: TypeAlias = "tuple[Message, ...]"

MAX_CHARS: Final = 2_000_000
"""Twice the largest message: a long conversation and what it branched from."""


TURN_CHARS: Final = 64
"""What a turn counts for beside its text: empty ones take memory too."""


class Conversations:
    """Turns up to and including each remembered answer."""

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self._max_chars = max_chars
        self._chars = 0
        self._turns: OrderedDict[str, Turns] = OrderedDict()

    def up_to(self, response_id: str) -> Turns:
        """Return the turns that an answer ended.

        Raises:
          RequestError: it is unknown or forgotten.
        """
        turns = self._turns.get(response_id)
        if turns is None:
            raise _not_found(response_id)
        return turns

    def remember(self, response_id: str, turns: Turns) -> None:
        """Keep the turns of an answer."""
        self._turns[response_id] = turns
        self._chars += _size(turns)
        while self._chars > self._max_chars:
            _, forgotten = self._turns.popitem(last=False)
            self._chars -= _size(forgotten)


def _size(turns: Turns) -> int:
    return sum(_size_of(turn) for turn in turns)


def _size_of(turn: Message) -> int:
    calls = turn.tool_calls or ()
    of_calls = sum(TURN_CHARS + len(call.function.arguments) for call in calls)
    return TURN_CHARS + len(turn.content or "") + len(turn.reasoning or "") + of_calls


def _not_found(response_id: str) -> RequestError:
    return invalid_request(
        f"there is no response {echo(response_id)} on this connection; send the conversation again",
        "previous_response_id",
        code="previous_response_not_found",
    )

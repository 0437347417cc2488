"""Expected outcomes of the faults in the fault matrix, and the check of what was observed.

Pure: takes answers, log lines and times, returns complaints. An empty list means that the cell
passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .answer import Said

CANCEL_BOUND_S: Final = 0.100
OWNER_BOUND_S: Final = 2.5
"""A lease of 2 s plus a sweep."""


class Outcome(Enum):
    """How both questions of a cell end."""

    GONE = "cancelled"  # nothing more is sent, everything is freed
    EXACT = "exact"  # the undisturbed answer, perhaps later
    STALLED = "ended"  # one terminal event in the server's log; the connection is cut
    CUT = "cut off"  # the server died: no terminal event can come
    EXACT_OR_ERROR = "exact or one error"  # one terminal event; exact if successful


@dataclass(frozen=True, slots=True)
class Ending:
    """One question's end, according to its client and the server's log.

    Attributes:
      surface: SSE or WebSocket.
      said: what the client received.
      wanted: the undisturbed answer.
      outcomes: outcomes in its `request_ended` lines; there must be one.
    """

    surface: str
    said: Said
    wanted: Said
    outcomes: tuple[str, ...]


def judge(outcome: Outcome, endings: Iterable[Ending]) -> list[str]:
    """Return the complaints."""
    return [
        f"{ending.surface}: {complaint}"
        for ending in endings
        for complaint in _complaints(outcome, ending)
    ]


def _complaints(outcome: Outcome, ending: Ending) -> list[str]:
    found = _against_reference(ending)
    allowed: set[str]
    match outcome:
        case Outcome.CUT:
            return found + [f"a terminal: {end}" for end in ending.said.ends]
        case Outcome.GONE:
            allowed = {"client_gone", "stopped"}
        case Outcome.STALLED:
            allowed = {"stalled"}
        case Outcome.EXACT:
            allowed = {"length"}
            if ending.said != ending.wanted:
                found.append(_difference(ending))
        case Outcome.EXACT_OR_ERROR:
            allowed = {"length", "error", "no_worker"}
            if len(ending.said.ends) != 1:
                found.append(f"terminals: {ending.said.ends}")
    if len(ending.outcomes) != 1:
        return [*found, f"the server says that it ended as {ending.outcomes}"]
    if ending.outcomes[0] not in allowed:
        found.append(f"the server logged {ending.outcomes[0]}")
    return found


def _against_reference(ending: Ending) -> list[str]:
    """Check that the answer is a prefix of the undisturbed one, however it ended (I4)."""
    said, wanted = ending.said, ending.wanted
    found = []
    if said.tokens != wanted.tokens[: len(said.tokens)]:
        found.append(_difference(ending))
    if not wanted.text.startswith(said.text):
        found.append("text that differs from the undisturbed run")
    if len(said.ends) > 1:
        found.append(f"more than one terminal: {said.ends}")
    return found


def _difference(ending: Ending) -> str:
    said, wanted = ending.said, ending.wanted
    pairs = zip(said.tokens, wanted.tokens, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    where = "" if first is None else f", from token {first} on"
    return (
        f"not the uninterrupted answer{where}: {len(said.tokens)} of {len(wanted.tokens)} tokens, "
        f"ended as {said.ends}, usage {said.num_tokens}"
    )

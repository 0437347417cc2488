"""What the proxy saw and the processes logged, read for what a cell must know. Changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from transport.frames import End, Prefill, Reserve

from .rules import Fate

if TYPE_CHECKING:
    from .client import Client
    from .fleet import Fleet
    from .phases import Hold
    from .processes import LogLine

ORDERLY_ENDS: Final = frozenset({"length", "stop", "handed_over"})


class Holder(NamedTuple):
    """An attempt on a worker."""

    worker: str
    attempt: str


class AttemptEnd(NamedTuple):
    """A worker's line about an attempt whose blocks it has just freed."""

    holder: Holder
    at: float
    reason: str


def ends_of_attempts(fleet: Fleet) -> list[AttemptEnd]:
    """Return every attempt that ended, wherever."""
    return [
        AttemptEnd(Holder(name, line.fields["attempt"]), line.at, line.fields["reason"])
        for name, process in fleet.processes.items()
        for line in process.lines.entries
        if line.event == "attempt_ended"
    ]


def holders(fleet: Fleet) -> set[Holder]:
    """Return all that workers were told to begin and not to end, and that has not ended there.

    What is told to end may never have begun: a Prefill that was kept back comes after its End.
    """
    begun, told_to_end = (
        {
            Holder(sighting.link.worker, str(sighting.frame.key))
            for sighting in fleet.proxy.sightings.entries
            if isinstance(sighting.frame, kinds) and sighting.fate is not Fate.HOLD
        }
        for kinds in ((Reserve, Prefill), (End,))
    )
    return begun - told_to_end - {end.holder for end in ends_of_attempts(fleet)}


def times_until_free(
    fleet: Fleet, hold: Hold, held_by: set[Holder], fault_at: float
) -> list[float]:
    """Return how long these attempts kept their blocks after the fault.

    A process that could not move during the fault counts from when it could. An attempt that the
    fault did not touch runs to its end, which is no time until free.
    """
    return [
        max(0.0, end.at - hold.came_back.get(end.holder.worker, fault_at))
        for end in ends_of_attempts(fleet)
        if end.holder in held_by and end.reason not in ORDERLY_ENDS
    ]


def times_until_dropped(fleet: Fleet, clients: list[Client], fault_at: float) -> list[float]:
    """Return how long the server kept these requests after the fault."""
    return [max(0.0, line.at - fault_at) for c in clients for line in _last_lines(fleet, c)]


def phases_of(fleet: Fleet, client: Client) -> set[str]:
    """Return the phase in which a client's request ended, as the server calls it."""
    return {line.fields["phase"] for line in _last_lines(fleet, client)}


def outcomes_of(fleet: Fleet, client: Client) -> tuple[str, ...]:
    """Return how the server says that a client's request ended; more than once is a bug."""
    return tuple(line.fields["outcome"] for line in _last_lines(fleet, client))


def _last_lines(fleet: Fleet, client: Client) -> list[LogLine]:
    return [
        line
        for line in fleet.server.lines.entries
        if line.event == "request_ended" and line.fields["client_request_id"] == client.name
    ]

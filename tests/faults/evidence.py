"""Extracts what a cell of the fault matrix must know from the proxy's frames and the processes'
logs. Read-only."""

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
    """A worker's log line about an attempt after its blocks were freed."""

    holder: Holder
    at: float
    reason: str


def ends_of_attempts(fleet: Fleet) -> list[AttemptEnd]:
    """Return every attempt that ended, on any worker."""
    return [
        AttemptEnd(Holder(name, line.fields["attempt"]), line.at, line.fields["reason"])
        for name, process in fleet.processes.items()
        for line in process.lines.entries
        if line.event == "attempt_ended"
    ]


def holders(fleet: Fleet) -> set[Holder]:
    """Return the attempts that workers were told to start and not to end, and that have not ended.

    An attempt that is told to end may never have started: a delayed PREFILL comes after its END.
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

    For a process that was stopped during the fault, time counts from when it continued. An attempt
    that the fault did not affect runs to its end and is not counted.
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
    """Return the phases in which a client's request ended, by the server's names."""
    return {line.fields["phase"] for line in _last_lines(fleet, client)}


def outcomes_of(fleet: Fleet, client: Client) -> tuple[str, ...]:
    """Return how a client's request ended, according to the server; more than one is a bug."""
    return tuple(line.fields["outcome"] for line in _last_lines(fleet, client))


def _last_lines(fleet: Fleet, client: Client) -> list[LogLine]:
    return [
        line
        for line in fleet.server.lines.entries
        if line.event == "request_ended" and line.fields["client_request_id"] == client.name
    ]

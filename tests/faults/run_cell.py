"""Runs one cell of the fault matrix: hold, inject, release, wait, judge, and check that the fleet
recovered.

This file acts and measures; outcomes.py and the product's own audit decide what is correct.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import trio

from transport.frames import End

from .client import Client, Question, Surface
from .evidence import (
    Holder,
    ends_of_attempts,
    holders,
    outcomes_of,
    phases_of,
    times_until_dropped,
    times_until_free,
)
from .fleet import FleetUnwellError
from .matrix import Bound, Cell, Release
from .outcomes import Ending, Outcome, judge
from .phases import IN_SERVER_LOG, held
from .processes import FaultNotInjectedError, OverdueError, until
from .state import state_of

if TYPE_CHECKING:
    from .answer import Said
    from .fleet import Fleet
    from .phases import Hold
    from .rules import Sighting

END_DEADLINE_S: Final = 90.0
"""Timeout for a request to end after its fault, with up to three attempts on a loaded machine."""
FREE_DEADLINE_S: Final = 30.0
CELL_DEADLINE_S: Final = 240.0
FAILURES: Final = (
    FaultNotInjectedError,
    FleetUnwellError,
    OverdueError,
    trio.TooSlowError,
    trio.BrokenResourceError,
    OSError,
)
"""Errors that fail a cell; any other is a bug of the matrix and ends the run."""
FRESH: Final = Question("Hello!", max_tokens=8, seed=1)


@dataclass(eq=False)
class CellResult:
    """The result of one run of one cell.

    Attributes:
      cell: the cell.
      complaints: what went wrong; empty if it passed.
      free_s: per attempt and surviving worker, time from the fault until its blocks were free.
      took_s: duration of the run.
      state: the fleet's state at a timeout.
      was_missed: the fault did not happen, or not in its phase, so the run proves nothing.
    """

    cell: Cell
    complaints: list[str] = field(default_factory=list)
    free_s: list[float] = field(default_factory=list)
    took_s: float = 0.0
    state: str = ""
    was_missed: bool = False


class References:
    """Undisturbed answers, each computed once."""

    def __init__(self) -> None:
        self._said: dict[tuple[Surface, Question], Said] = {}

    async def of(self, fleet: Fleet, surface: Surface, question: Question) -> Said:
        """Return the answer without faults."""
        key = (surface, question)
        if key not in self._said:
            self._said[key] = await ask(fleet, surface, question)
        return self._said[key]


async def ask(fleet: Fleet, surface: Surface, question: Question) -> Said:
    """Ask one question and read its whole answer."""
    client = Client(fleet.port, surface, question, "reference")
    try:
        async with fleet.within(END_DEADLINE_S, f"an undisturbed answer over {surface.value}"):
            await client.ask()
            await client.read()
    finally:
        client.close()
    return client.answer.said


async def run_cell(fleet: Fleet, cell: Cell, references: References, number: int) -> CellResult:
    """Run a cell once."""
    result = CellResult(cell)
    began = time.monotonic()
    try:
        await fleet.settle()
        wanted = [await references.of(fleet, s, cell.question) for s in cell.surfaces]
        await fleet.settle()
        fleet.new_page()
        clients = [
            Client(fleet.port, surface, cell.question, f"cell-{number}-{index}")
            for index, surface in enumerate(cell.surfaces)
        ]
        async with (
            fleet.within(CELL_DEADLINE_S, "the whole cell"),
            held(fleet, cell.hold or cell.phase, clients, cell.prefill) as hold,
        ):
            result.free_s = await _injure(fleet, cell, hold)
        result.complaints += judge(
            cell.outcome,
            [
                Ending(client.surface.value, client.answer.said, said, outcomes_of(fleet, client))
                for client, said in zip(clients, wanted, strict=True)
            ],
        )
        if cell.outcome is Outcome.GONE:
            # A cancel takes effect at once, which proves the phase in which it happened.
            seen = {phase for client in clients for phase in phases_of(fleet, client)}
            if not seen <= IN_SERVER_LOG[cell.phase]:
                raise FaultNotInjectedError(f"clients left in {sorted(seen)}")
        await _check_aftermath(fleet, references, result)
    except* FAILURES as group:
        errors = _leaves(group)
        result.complaints += [f"{type(error).__name__}: {error}" for error in errors]
        states = [error.state for error in errors if isinstance(error, OverdueError)]
        result.state = "\n".join(filter(None, states)) or await state_of(fleet)
        result.was_missed = any(isinstance(error, FaultNotInjectedError) for error in errors)
    result.took_s = time.monotonic() - began
    return result


async def _injure(fleet: Fleet, cell: Cell, hold: Hold) -> list[float]:
    """Inject the fault and wait for its effects; return the times until blocks were free."""
    before = holders(fleet)
    fault_at = time.time()
    async with cell.inject(fleet, hold):
        fallen = {name for name, p in fleet.processes.items() if not p.is_running}
        survivors = {holder for holder in before if holder.worker not in fallen}
        if cell.release is Release.AT_ONCE:
            if cell.bound is Bound.CANCEL:
                await _wait_told(fleet, hold)
            await hold.let_go()
        if cell.outcome is Outcome.CUT:
            for client in hold.clients:
                client.go_on_reading()
        await _wait_over(fleet, cell, hold)
        await _wait_free(fleet, survivors)
        if cell.release is Release.WHEN_FREE:
            await hold.let_go()
    times = times_until_free(fleet, hold, survivors, fault_at)
    if cell.bound is Bound.CANCEL and not times:
        # No worker held anything: measure how long the server kept the request.
        times = times_until_dropped(fleet, hold.clients, fault_at)
    return times


async def _wait_told(fleet: Fleet, hold: Hold) -> None:
    """Wait until workers were told to stop, so that the continuing step is the last."""
    told: set[str] = set()

    def all_told(sighting: Sighting) -> bool:
        if isinstance(sighting.frame, End):
            told.add(str(sighting.frame.key))
        return told >= {str(key) for key in hold.keys}

    async with fleet.within(END_DEADLINE_S, "END frames for every attempt"):
        await fleet.proxy.sightings.wait_for(all_told)


async def _wait_over(fleet: Fleet, cell: Cell, hold: Hold) -> None:
    """Wait until every question has reached its expected end."""
    if cell.outcome not in (Outcome.GONE, Outcome.STALLED):
        for client in hold.clients:
            async with fleet.within(END_DEADLINE_S, f"the end of the answer to {client.name}"):
                await client.is_over.wait()
    if cell.outcome is not Outcome.CUT:
        async with fleet.within(END_DEADLINE_S, "the server to log the end of every question"):
            await until(lambda: all(outcomes_of(fleet, client) for client in hold.clients))


async def _wait_free(fleet: Fleet, held_by: set[Holder]) -> None:
    what = f"the end of {sorted(map(str, held_by))} on their workers"
    async with fleet.within(FREE_DEADLINE_S, what):
        await until(lambda: held_by <= {end.holder for end in ends_of_attempts(fleet)})


async def _check_aftermath(fleet: Fleet, references: References, result: CellResult) -> None:
    """Check that nothing is left, all invariants hold, and a fresh request succeeds (I10)."""
    await fleet.settle()
    surface = result.cell.surfaces[0]
    wanted = await references.of(fleet, surface, FRESH)
    fresh = await ask(fleet, surface, FRESH)
    if fresh != wanted:
        result.complaints.append(f"a fresh request ended as {fresh.ends} with {fresh.text!r}")


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found

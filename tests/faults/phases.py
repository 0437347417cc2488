"""Hold points of the fault matrix: bring two questions into a phase and keep them there.

Mostly this works from outside the product: a held frame stops the process that waits for it. Only
the middle of a computation needs the gate before the device (worker.py). Phases are detected by
evidence (frames, log lines, counts), never by waiting for some time.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

import trio

from loadtest.harness.http import get
from transport.frames import (
    AttemptFrame,
    End,
    Ended,
    KvChunk,
    Prefill,
    Reserve,
    TokenCredit,
    Tokens,
)

from .client import Question
from .fleet import DECODES, PREFILLS, WORKERS, cordon, full
from .matches import hold_chunk, hold_last_tokens, hold_prefills
from .processes import FaultNotInjectedError, until
from .rules import Fate, Sighting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from triolet.audit import WorkerView
    from triolet.ids import AttemptKey

    from .client import Client
    from .fleet import Fleet
    from .rules import Rule

REACH_DEADLINE_S: Final = 60.0
QUIET_S: Final = 0.15
"""Many round trips: due credit would have arrived by then."""
FIRST_CHANCE_S: Final = 0.5
"""Time for the cell's two workers to get the waiting requests before others have room; none if the
fault removed these workers."""
MIN_TOKENS: Final = 4
"""Tokens a client must have to count as decoding."""
CHUNK: Final = 1
"""The chunk that is held: neither the first nor the last of a long prompt."""

LONG_PROMPT: Final = "and another dragon " * 150 + "Tell me a story."
SHORT_PROMPT: Final = "Tell me a story."


class Phase(Enum):
    """The phase of a request when the fault happens."""

    QUEUED = "QUEUED"
    RESERVED = "RESERVED"
    PREFILLING = "PREFILLING"
    TRANSFER = "TRANSFER"
    DECODING = "DECODING"
    PAUSED = "PAUSED"
    FINISHING = "FINISHING"


QUESTIONS: Final[dict[Phase, Question]] = {
    Phase.QUEUED: Question(SHORT_PROMPT, max_tokens=40, seed=11),
    Phase.RESERVED: Question(SHORT_PROMPT, max_tokens=40, seed=12),
    Phase.PREFILLING: Question(LONG_PROMPT, max_tokens=40, seed=13),
    Phase.TRANSFER: Question(LONG_PROMPT, max_tokens=40, seed=14),
    # Not held, so it must last until its fault happens.
    Phase.DECODING: Question(SHORT_PROMPT, max_tokens=700, seed=15),
    # With alternatives each token is a kilobyte or more, so that sockets fill soon.
    Phase.PAUSED: Question(SHORT_PROMPT, max_tokens=250, seed=16, top_logprobs=20),
    # Within the first window: holding one answer's frames also holds the other one's credit, and it
    # would never end.
    Phase.FINISHING: Question(SHORT_PROMPT, max_tokens=16, seed=17),
}


IN_SERVER_LOG: Final[dict[Phase, frozenset[str]]] = {
    # The server's name for it, when a request ends there.
    Phase.QUEUED: frozenset({"queued"}),
    Phase.RESERVED: frozenset({"prefilling"}),
    Phase.PREFILLING: frozenset({"prefilling"}),
    # The first token may be faster than the last chunk.
    Phase.TRANSFER: frozenset({"prefilling", "decoding"}),
    Phase.DECODING: frozenset({"decoding"}),
    Phase.PAUSED: frozenset({"decoding"}),
    Phase.FINISHING: frozenset({"finishing"}),
}


@dataclass(eq=False)
class Hold:
    """Two questions that are held in a phase.

    Attributes:
      clients: the clients that asked.
      keys: the attempts started on workers, one per client; none while queued.
      prefill: the prefill worker that has, or would get, them.
      decode: the decode worker that has, or would get, them.
      let_go: ends the hold.
      came_back: processes that were stopped during the fault, with the time they continued, by the
        clock of logs.
    """

    clients: list[Client]
    let_go: Callable[[], Awaitable[None]]
    keys: list[AttemptKey] = field(default_factory=list)
    prefill: str = PREFILLS[0]
    decode: str = DECODES[0]
    came_back: dict[str, float] = field(default_factory=dict)


@asynccontextmanager
async def held(
    fleet: Fleet, phase: Phase, clients: list[Client], prefill: str = PREFILLS[0]
) -> AsyncIterator[Hold]:
    """Ask, and yield once every question is in the phase. All go to the same two workers."""
    async with AsyncExitStack() as stack, trio.open_nursery() as readers:
        for client in clients:
            stack.callback(client.close)
        idle = {*WORKERS} - {prefill, DECODES[0]}
        with fleet.proxy.rule(cordon(tuple(idle))) as others:
            await fleet.announce()
            await _until_known(fleet, idle, "draining", lambda view: view.state == "draining")
            async with _HOLDS[phase](fleet, clients, readers) as hold:
                hold.prefill = prefill
                hold.keys = [frame.key for _, frame in fleet.proxy.seen(Reserve)]
                _check_places(fleet, hold)
                # From here on other workers are available.
                fleet.proxy.lift(others)
                await fleet.announce()
                yield hold
        readers.cancel_scope.cancel()


def _check_places(fleet: Fleet, hold: Hold) -> None:
    """Prove that the fault hits the workers of these questions, and in time."""
    _check_first(fleet.proxy.sightings.entries)
    begun = [*fleet.proxy.seen(Reserve), *fleet.proxy.seen(Prefill)]
    places = {sighting.link.worker for sighting, _ in begun} - {hold.prefill, hold.decode}
    if places:
        raise FaultNotInjectedError(f"questions also went to {sorted(places)}")
    if any(client.answer.is_done or client.answer.ends for client in hold.clients):
        raise FaultNotInjectedError("an answer ended before its fault happened")


def _check_first(sightings: Sequence[Sighting]) -> None:
    """Prove that every question still has its first attempt. The product tolerates a held phase for
    a second or two; on a busy machine that may pass before the fault happens."""
    for sighting in sightings:
        frame = sighting.frame
        if isinstance(frame, End) or (isinstance(frame, Reserve) and frame.attempt):
            worker = sighting.link.worker
            raise FaultNotInjectedError(
                f"attempt {frame.key} on {worker} was retried before the fault"
            )


async def _until_known(
    fleet: Fleet, names: set[str], what: str, is_so: Callable[[WorkerView], bool]
) -> None:
    """Wait until the server has read what workers announced: a question comes by another socket,
    and could be read first."""

    async def all_are() -> bool:
        return all(is_so(view) for view in (await fleet.audit()).workers if view.name in names)

    async with fleet.within(REACH_DEADLINE_S, f"the server to take {sorted(names)} for {what}"):
        await until(all_are)


async def _ask(fleet: Fleet, clients: list[Client], readers: trio.Nursery) -> None:
    for client in clients:
        async with fleet.within(REACH_DEADLINE_S, f"the server to take {client.name}"):
            await client.ask()
        readers.start_soon(client.read)


async def _reach(
    fleet: Fleet, clients: list[Client], what: str, wants: Callable[[Sighting], bool]
) -> None:
    """Wait until something was seen for every question.

    Raises:
      FaultNotInjectedError: the product gave up an attempt before, so it will never be seen.
    """
    found: set[bytes] = set()

    def is_last(sighting: Sighting) -> bool:
        _check_first([sighting])
        if wants(sighting):
            assert isinstance(sighting.frame, AttemptFrame)
            found.add(sighting.frame.request_id)
        return len(found) == len(clients)

    async with fleet.within(REACH_DEADLINE_S, f"{what} of {len(clients)} questions"):
        await fleet.proxy.sightings.wait_for(is_last)


@asynccontextmanager
async def _queued(
    fleet: Fleet, clients: list[Client], readers: trio.Nursery
) -> AsyncIterator[Hold]:
    """Make all workers announce that they have no room."""
    with fleet.proxy.rule(full(WORKERS)) as rule:
        await fleet.announce()
        theirs = {PREFILLS[0], DECODES[0]}
        await _until_known(fleet, theirs, "full", lambda v: not v.token_credit + v.row_credit)
        await _ask(fleet, clients, readers)
        async with fleet.within(REACH_DEADLINE_S, "all questions to be in the queue"):

            async def all_wait() -> bool:
                _, body = await get(fleet.url, "/load")
                return bool(json.loads(body)["queued"] == len(clients))

            await until(all_wait)

        async def let_go() -> None:
            await _let_in(fleet, clients, rule)

        yield Hold(clients, let_go)


async def _let_in(fleet: Fleet, clients: list[Client], rule: Rule) -> None:
    """Lift the rule that makes the fleet full, for the cell's two workers first: the server could
    otherwise read another worker's heartbeat first and send the requests there."""

    def are_begun() -> bool:
        num_asked = sum(not client.is_over.is_set() for client in clients)
        return len({frame.request_id for _, frame in fleet.proxy.seen(Reserve)}) >= num_asked

    with fleet.proxy.rule(full(tuple({*WORKERS} - {PREFILLS[0], DECODES[0]}))):
        fleet.proxy.lift(rule)
        await fleet.announce()
        with trio.move_on_after(FIRST_CHANCE_S):
            await until(are_begun)
    await fleet.announce()


@asynccontextmanager
async def _reserved(
    fleet: Fleet, clients: list[Client], readers: trio.Nursery
) -> AsyncIterator[Hold]:
    rule, silence = hold_prefills()
    with fleet.proxy.rule(rule), fleet.proxy.rule(silence):
        await _ask(fleet, clients, readers)
        await _reach(fleet, clients, "PREFILL", lambda s: isinstance(s.frame, Prefill))

        async def let_go() -> None:
            await fleet.proxy.release(rule)
            fleet.proxy.lift(silence)

        yield Hold(clients, let_go)


async def _ask_together(fleet: Fleet, clients: list[Client], readers: trio.Nursery) -> None:
    """Ask, and release prompts to prefill once all have arrived. The phase is short: the first
    question must not leave it before the last one reaches it."""
    async with _reserved(fleet, clients, readers) as hold:
        await hold.let_go()


@asynccontextmanager
async def _prefilling(
    fleet: Fleet, clients: list[Client], readers: trio.Nursery
) -> AsyncIterator[Hold]:
    worker = fleet.processes[PREFILLS[0]]
    try:
        async with _reserved(fleet, clients, readers) as reserved:
            await fleet.arm(worker.name, "hold 1")
            await reserved.let_go()
        async with fleet.within(REACH_DEADLINE_S, "a step of prefill to be held"):
            await worker.wait_line(lambda line: line.event == "step_reached")

        async def has_all() -> bool:
            views = (await fleet.audit()).workers
            audits = [view.audit for view in views if view.name == worker.name and view.audit]
            return any(audit.num_leases == len(clients) for audit in audits)

        async with fleet.within(REACH_DEADLINE_S, "prefill to have every prompt"):
            await until(has_all)

        async def let_go() -> None:
            worker.order("go")

        yield Hold(clients, let_go)
    finally:
        worker.order("go")


@asynccontextmanager
async def _transferring(
    fleet: Fleet, clients: list[Client], readers: trio.Nursery
) -> AsyncIterator[Hold]:
    with fleet.proxy.rule(hold_chunk(CHUNK)) as rule:
        await _ask_together(fleet, clients, readers)
        await _reach(
            fleet,
            clients,
            "a kept chunk",
            lambda s: isinstance(s.frame, KvChunk) and s.fate is Fate.HOLD,
        )
        yield Hold(clients, _releasing(fleet, rule))


@asynccontextmanager
async def _decoding(
    fleet: Fleet, clients: list[Client], readers: trio.Nursery
) -> AsyncIterator[Hold]:
    """Not held: the answer is long, and the fault follows its first tokens at once."""
    await _ask_together(fleet, clients, readers)
    async with fleet.within(REACH_DEADLINE_S, f"{MIN_TOKENS} tokens of each answer"):
        await until(lambda: all(len(c.answer.tokens) >= MIN_TOKENS for c in clients))
    yield Hold(clients, _nothing)


@asynccontextmanager
async def _paused(
    fleet: Fleet, clients: list[Client], readers: trio.Nursery
) -> AsyncIterator[Hold]:
    """Clients stop reading until every allowed position exists."""
    for client in clients:
        client.stop_reading()
    await _ask_together(fleet, clients, readers)
    async with fleet.within(REACH_DEADLINE_S, "every token that the windows allow"):

        async def all_wait() -> bool:
            return len(_waiting(fleet)) == len(clients) and await _is_quiet(fleet)

        await until(all_wait)

    async def let_go() -> None:
        for client in clients:
            client.go_on_reading()

    yield Hold(clients, let_go)


@asynccontextmanager
async def _finishing(
    fleet: Fleet, clients: list[Client], readers: trio.Nursery
) -> AsyncIterator[Hold]:
    rule = hold_last_tokens(QUESTIONS[Phase.FINISHING].max_tokens)
    with fleet.proxy.rule(rule):
        await _ask_together(fleet, clients, readers)
        await _reach(
            fleet,
            clients,
            "ENDED of decode",
            lambda s: isinstance(s.frame, Ended) and s.link.worker in DECODES,
        )

        async def server_knows() -> bool:
            views = (await fleet.audit()).workers
            return not any(view.before for view in views if view.name in DECODES)

        async with fleet.within(REACH_DEADLINE_S, "the server to know of every end on decode"):
            await until(server_knows)
        yield Hold(clients, _releasing(fleet, rule))


def _waiting(fleet: Fleet) -> set[AttemptKey]:
    """Return the attempts that have produced all the tokens they may."""
    allowed: dict[AttemptKey, int] = {}
    made: dict[AttemptKey, int] = {}
    for sighting in fleet.proxy.sightings.entries:
        match sighting.frame:
            case Reserve() as frame:
                allowed[frame.key] = frame.allowed
            case TokenCredit(rows=credits):
                allowed.update((row.key, row.allowed) for row in credits)
            case Tokens(rows=rows):
                made.update((row.key, row.position + 1) for row in rows)
    return {key for key, count in made.items() if count == allowed.get(key)}


async def _is_quiet(fleet: Fleet) -> bool:
    """Return whether no token comes although one is allowed: sockets are full, not just a
    window."""
    begin = len(fleet.proxy.sightings.entries)
    await trio.sleep(QUIET_S)
    later = fleet.proxy.sightings.entries[begin:]
    return not any(isinstance(sighting.frame, Tokens | TokenCredit) for sighting in later)


def _releasing(fleet: Fleet, rule: Rule) -> Callable[[], Awaitable[None]]:
    async def let_go() -> None:
        await fleet.proxy.release(rule)

    return let_go


async def _nothing() -> None:
    await trio.lowlevel.checkpoint()


_HOLDS = {
    Phase.QUEUED: _queued,
    Phase.RESERVED: _reserved,
    Phase.PREFILLING: _prefilling,
    Phase.TRANSFER: _transferring,
    Phase.DECODING: _decoding,
    Phase.PAUSED: _paused,
    Phase.FINISHING: _finishing,
}

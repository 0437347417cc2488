"""A whole fleet on an in-memory network for tests of recovery: the real server and real workers,
restarted when they end.

A test kills, pauses or disconnects a process through its `Slot`. A reader gets a `Record`; the
records of two runs are equal if a client could not tell the runs apart.
"""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar, TypeVarTuple

import trio

from server.contract.generation import Delta, Failed, GenerationRequest, TokenLogprob
from server.contract.request_events import AttemptFailed
from server.scheduling.links import Links
from server.scheduling.status import Observer
from simulation.fleet import worker_of
from tests.server.scheduling.fakes import server_config
from tests.server.tiny_text import tiny_text
from transport.memory_network import MemoryConnection, MemoryNetwork
from triolet.config import EngineConfig, LinkConfig, RoutingConfig, SpeculationConfig, WorkerConfig
from triolet.ids import Role

from .story import Deadly, story_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from decode.speculation import GuessSource
    from server.contract.generation import Finished
    from worker.engine_port import EnginePort
    from worker.worker_loop import WorkerLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STEP_S = 0.01
RESTART_S = 0.3
LINK = LinkConfig(kv_chunk_bytes=32, kv_window_bytes=64, kv_ring_bytes=512)
TEXT = tiny_text()


class Guessing(NamedTuple):
    """How each life of a decode worker guesses ahead: not at all by default."""

    make_source: Callable[[], GuessSource | None] = lambda: None
    config: SpeculationConfig = SpeculationConfig()


@dataclass
class Record:
    """What a client got, without times."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: tuple[str, str | None, int, int] | None = None

    def take(self, event: Delta | Finished | Failed) -> None:
        assert self.end is None, "an event came after the terminal one"
        if isinstance(event, Delta):
            self.text += event.text
            self.token_ids += event.token_ids
            self.logprobs += event.logprobs
            return
        counts = event.usage.prompt_tokens, event.usage.completion_tokens
        if isinstance(event, Failed):
            self.end = (event.error.code, None, *counts)
        else:
            self.end = (event.reason.value, event.stop_string, *counts)


class SeenByServer(Observer):
    """Counts what the tests ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.causes: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.routes: Counter[str] = Counter()
        self.poisonous: list[str] = []
        self.breakers: list[tuple[str, str]] = []
        self.pauses: list[float] = []
        self.unaffordable = 0

    def attempt_failed(self, event: AttemptFailed) -> None:
        self.causes[event.cause] += 1

    def prompt_routed(self, role: str, why: str) -> None:
        self.routes[f"{role}: {why}"] += 1

    def retry_unaffordable(self) -> None:
        self.unaffordable += 1

    def quarantined(self, what: str, request_id: str) -> None:
        self.poisonous.append(request_id)

    def breaker_changed(self, worker: str, state: str) -> None:
        self.breakers.append((worker.split("@", maxsplit=1)[0], state))

    def frames_dropped(self, reason: str, count: int = 1) -> None:
        self.dropped[reason] += count

    def server_paused(self, seconds: float) -> None:
        self.pauses.append(seconds)


class Network(MemoryNetwork):
    """Remembers the addresses that were dialled."""

    def __init__(self) -> None:
        super().__init__()
        self.dialled: dict[str, set[bytes]] = {}

    def connect(
        self, address: str, identity: bytes, *, hwm: int, max_frame_bytes: int
    ) -> MemoryConnection:
        self.dialled.setdefault(address, set()).add(identity)
        return super().connect(address, identity, hwm=hwm, max_frame_bytes=max_frame_bytes)

    def cut_all(self, address: str) -> None:
        """Cut every link that was ever dialled to an address."""
        for identity in self.dialled.get(address, ()):
            self.cut(address, identity)

    def heal_all(self, address: str) -> None:
        for identity in self.dialled.get(address, ()):
            self.heal(address, identity)


class Slot:
    """A worker's place: one life after the other, as a supervisor would have it.

    Attributes:
      lives: begun so far.
      engine: of the present life.
      shell: of the present life.
      prepare: changes each new engine.
      hold: no step begins while this is set to an event that is not.
    """

    def __init__(
        self,
        role: Role,
        name: str,
        network: Network,
        make_engine: Callable[[], EnginePort],
        guessing: Guessing,
    ) -> None:
        self.role = role
        self.name = name
        self.lives = 0
        self.prepare: Callable[[EnginePort], None] = lambda engine: None
        self.engine: EnginePort
        self.shell: WorkerLoop
        self._network = network
        self._make_engine = make_engine
        self._scope = trio.CancelScope()
        self._is_retired = False
        self.config = WorkerConfig(
            name=name,
            model_dir="",
            control_address=f"mem://{name}",
            kv_address=f"mem://{name}-kv" if role is Role.DECODE else None,
            engine=EngineConfig(block_size=4, max_num_seqs=16, max_num_batched_tokens=8),
            link=LINK,
            speculation=guessing.config,
        )
        self._make_source = guessing.make_source

    async def supervise(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Live again and again."""
        while not self._is_retired:
            self.engine = self._make_engine()
            self.prepare(self.engine)
            with trio.CancelScope() as self._scope:
                async with trio.open_nursery() as nursery:
                    worker = worker_of(
                        self.role,
                        self.config,
                        self.engine,
                        self,
                        self._network,
                        source=self._make_source() if self.role is Role.DECODE else None,
                    )
                    self.shell = await nursery.start(worker)
                    self.lives += 1
                    task_status.started()
                    task_status = trio.TASK_STATUS_IGNORED
            await trio.sleep(RESTART_S)

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Compute a step; see worker.shell.Device."""
        await trio.sleep(STEP_S)
        try:
            return fn(*args)
        except Deadly:
            self.kill()
            await trio.sleep_forever()
            raise

    def kill(self) -> None:
        """SIGKILL."""
        self._scope.cancel()

    def retire(self) -> None:
        """SIGKILL, and no other life."""
        self._is_retired = True
        self.kill()


class House:
    """Everything there is.

    Attributes:
      prefills: places of prefill workers.
      decodes: places of decode workers.
      fleet: the server's.
      seen: what it told its observer.
      records: of all requests, by number.
    """

    def __init__(
        self,
        make_engines: dict[Role, Callable[[], EnginePort]],
        counts: tuple[int, int],
        guessing: Guessing,
        **config: object,
    ) -> None:
        self.network = Network()
        self.prefills, self.decodes = (
            [
                Slot(role, f"{role}-{i}", self.network, make_engines[role], guessing)
                for i in range(count)
            ]
            for role, count in zip((Role.PREFILL, Role.DECODE), counts, strict=True)
        )
        self.seen = SeenByServer()
        self.records: dict[int, Record] = {}
        addresses = {
            "prefill_addresses": tuple(slot.config.control_address for slot in self.prefills),
            "decode_addresses": tuple(slot.config.control_address for slot in self.decodes),
        }
        settings = server_config(link=LINK, **addresses, **config)
        self.fleet = Links(settings, TEXT, self.network, self.seen)
        self.fleet.events.subscribe(AttemptFailed, self.seen.attempt_failed)
        self._news = trio.Event()

    async def ask(self, number: int, request: GenerationRequest) -> Record:
        """Submit a request and read it to its end."""
        record = self.records.setdefault(number, Record())
        async for events in self.fleet.submit(request):
            for _, event in events:
                record.take(event)
            self._news.set()
            self._news = trio.Event()
        return record

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until what was read makes something true."""
        with trio.fail_after(120):
            while not condition():
                await self._news.wait()

    async def check_idle(self) -> None:
        """Assert that nothing is left of any request once leases have run out."""
        await trio.sleep(LINK.lease_ttl_s + LINK.kv_stall_s + 1.0)
        self.fleet.check_accounting()
        status = self.fleet.status()
        assert (status.queued, status.running) == (0, 0)
        for slot in (*self.prefills, *self.decodes):
            if slot._is_retired:
                continue
            slot.engine.ledger.check_invariants()
            assert slot.engine.ledger.leased_blocks == 0, slot.name


@asynccontextmanager
async def open_house(
    prefills: int = 1,
    decodes: int = 2,
    *,
    num_blocks: int = 400,
    make_engines: dict[Role, Callable[[], EnginePort]] | None = None,
    prepare: Callable[[Slot, EnginePort], None] | None = None,
    guessing: Guessing | None = None,
    **config: object,
) -> AsyncIterator[House]:
    """Run a fleet of engines that tell the story, or of what `make_engines` makes."""
    roles = (Role.PREFILL, Role.DECODE)
    if make_engines is None:
        make_engines = {role: lambda: story_engine(num_blocks) for role in roles}
    # How fast a real engine is here and now must not decide where a prompt goes.
    config = {"routing": RoutingConfig(max_local_tokens=0), **config}
    house = House(make_engines, (prefills, decodes), guessing or Guessing(), **config)
    async with trio.open_nursery() as nursery:
        for slot in (*house.prefills, *house.decodes):
            if prepare is not None:
                slot.prepare = lambda engine, slot=slot: prepare(slot, engine)  # type: ignore[misc]
            await nursery.start(slot.supervise)
        await nursery.start(house.fleet.run)
        await house.fleet.wait_ready()
        await trio.sleep(0.6)  # every worker has said how things stand
        yield house
        nursery.cancel_scope.cancel()


async def read_all(house: House, requests: Iterable[GenerationRequest]) -> list[Record]:
    """Submit all at once and read them to their ends."""
    asked = list(requests)
    async with trio.open_nursery() as nursery:
        for number, request in enumerate(asked):
            nursery.start_soon(house.ask, number, request)
    return [house.records[number] for number in range(len(asked))]


async def disturb_at(house: House, disturb: Callable[[House], None], num_tokens: int) -> None:
    """Disturb a fleet as soon as a stream has so many tokens."""
    await house.until(lambda: any(len(r.token_ids) >= num_tokens for r in house.records.values()))
    disturb(house)

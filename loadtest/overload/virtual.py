"""A whole fleet in virtual time: the product's server and workers, links in memory, and devices of
modelled time. An hour of overload passes in minutes, and twice the same way.

Knows how the parts are put together; knows no load.
"""

from __future__ import annotations

import gc
import random
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

import decode.worker
import prefill.worker
from ops.simulation.clock import ClockAlarm, VirtualClock
from ops.simulation.deterministic import run
from ops.simulation.faults import CALM
from ops.simulation.modelled import COST, ModelledDevice, ModelledEngine, StepCost
from ops.simulation.network import Host
from ops.simulation.text import NumberText
from server.contract.charges import NO_CHARGES
from server.contract.generation import Delta, Failed, Finished, GenerationRequest
from server.scheduling.links import Links
from transport.memory_network import MemoryNetwork
from transport.memory_pipe import Conditions
from triolet.config import EngineConfig, LinkConfig, ServerConfig, WorkerConfig
from triolet.errors import RequestError
from triolet.ids import SECRET_BYTES, Role
from triolet.invariants import check_at_rest
from triolet.sampling import SamplingParams
from triolet.service_class import Scheduling
from triolet.units import KIB, SECONDS

from .arrivals import Arrival
from .outcomes import Fate, Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from server.contract.charges import Charges
    from server.contract.output_stream import OutputStream
    from server.scheduling.observer import FleetObserver
    from server.scheduling.output import RelayText
    from triolet.audit import FleetAudit
    from worker.worker_loop import WorkerLoop

    from .arrivals import Sizes


MODEL: Final = "modelled"
BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class FleetShape:
    """How large a fleet is.

    Attributes:
      prefills: workers.
      decodes: workers.
      max_num_seqs: rows of a decode step.
      num_blocks: of each pool.
      cost: of each worker's steps.
      server: bounds and switches of the server; addresses and links are added.
    """

    prefills: int = 1
    decodes: int = 1
    max_num_seqs: int = 32
    num_blocks: int = 1024
    cost: StepCost = COST
    server: ServerConfig = field(
        default_factory=lambda: ServerConfig(
            model_dir="", model_name=MODEL, prefill_addresses=(), decode_addresses=()
        )
    )


class Front(NamedTuple):
    """What the server is to its fleet, where somebody runs more of it than the fleet.

    Attributes:
      text: the model's.
      observer: told of what happens.
      charges: told what each request used.
    """

    text: RelayText
    observer: FleetObserver | None = None
    charges: Charges = NO_CHARGES


class _Calm(Conditions):
    """A network that loses nothing, in the simulator's own time."""

    def make_alarm(self) -> ClockAlarm:
        return ClockAlarm()


class VirtualFleet:
    """One server, its workers.

    Args:
      shape: how large it is.
      seed: of what is drawn at random.
      front: of the server; None for one that is nothing but its fleet.

    Attributes:
      fleet: takes requests.
    """

    def __init__(self, shape: FleetShape, seed: int, front: Front | None = None) -> None:
        self._shape = shape
        self._network = MemoryNetwork(seed)
        # Elsewhere, in time that passes by itself, links wait as Trio does.
        if isinstance(trio.lowlevel.current_clock(), VirtualClock):
            self._network.conditions = _Calm(seed, CALM)
        self._link = LinkConfig(kv_ring_bytes=1024 * KIB)
        self._host = Host(1)
        self._epochs = iter(range(1, 1_000_000))
        names = {
            Role.PREFILL: [f"prefill-{n}" for n in range(shape.prefills)],
            Role.DECODE: [f"decode-{n}" for n in range(shape.decodes)],
        }
        self._names = names
        config = replace(
            shape.server,
            prefill_addresses=tuple(map(_address, names[Role.PREFILL])),
            decode_addresses=tuple(map(_address, names[Role.DECODE])),
            link=self._link,
        )
        text, observer, charges = front or Front(NumberText())
        self.fleet = Links(
            config,
            text,
            self._network,
            observer,
            draw_epoch=lambda: next(self._epochs),
            charges=charges,
            kv_secret=bytes(SECRET_BYTES),
        )

    async def start(self, nursery: trio.Nursery) -> None:
        """Start everybody and wait until requests are taken."""
        for role, names in self._names.items():
            for name in names:
                await nursery.start(self._serve, role, name)
        await nursery.start(self.fleet.run)
        with trio.fail_after(60 * SECONDS):
            await self.fleet.wait_ready()

    async def _serve(
        self, role: Role, name: str, *, task_status: trio.TaskStatus[WorkerLoop]
    ) -> None:
        shape = self._shape
        engine_config = EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=shape.max_num_seqs)
        config = WorkerConfig(
            name=name,
            model_dir="",
            control_address=_address(name),
            kv_address=f"{_address(name)}/kv" if role is Role.DECODE else None,
            engine=engine_config,
            link=self._link,
        )
        engine = ModelledEngine(shape.num_blocks, engine_config, shape.cost)
        device = ModelledDevice(shape.cost)
        networks = (self._network, self._network)
        if role is Role.PREFILL:
            await prefill.worker.serve(
                config,
                engine,
                device,
                *networks,
                draw_epoch=lambda: next(self._epochs),
                make_ring=self._host.make_ring,
                task_status=task_status,
            )
        else:
            await decode.worker.serve(
                config,
                engine,
                device,
                *networks,
                draw_epoch=lambda: next(self._epochs),
                find_ring=self._host.find,
                task_status=task_status,
            )


@asynccontextmanager
async def virtual_fleet(
    shape: FleetShape, seed: int, front: Front | None = None
) -> AsyncIterator[VirtualFleet]:
    """Run a fleet. To be used inside `ops.simulation.deterministic.run`, or where the modelled
    time of its devices may pass in truth."""
    async with trio.open_nursery() as nursery:
        running = VirtualFleet(shape, seed, front)
        await running.start(nursery)
        yield running
        nursery.cancel_scope.cancel()


def _address(name: str) -> str:
    return f"memory:{name}"


VOCABULARY: Final = 900
"""Prompts are drawn out of so many tokens: no two begin alike."""
AT_ONCE_S: Final = 1e-6
"""A refusal takes no virtual time."""
KEY_BYTES: Final = 8
"""Of a request's first id, which name it whenever it comes again, as its body does over HTTP."""
REST_S: Final = 5 * SECONDS
"""After the last answer nothing may be leased after this time: more than a lease's life."""


@dataclass(frozen=True, slots=True)
class Course:
    """What came of a run.

    Attributes:
      outcomes: in the order of arrivals.
      prompt_tokens: that workers computed.
      left: what is still there although nobody is, in words.
      generator_cpu: cores that the generator took on average; 0 in virtual time.
    """

    outcomes: Sequence[Outcome]
    prompt_tokens: int
    left: tuple[str, ...]
    generator_cpu: float = 0.0


@dataclass(frozen=True, slots=True)
class VirtualLoad:
    """Arrivals, and who they are.

    Attributes:
      arrivals: in order.
      schedulings: of tenants with a weight or a share; others have the default's.
      do_return: whoever is refused comes once more, after exactly the time that it was told.
      seed: decides prompts and the order of tasks.
    """

    arrivals: Sequence[Arrival]
    schedulings: Mapping[str, Scheduling] = field(default_factory=dict)
    do_return: bool = False
    seed: int = 0


def drive(shape: FleetShape, load: VirtualLoad) -> Course:
    """Let everybody come and go in virtual time."""
    is_collecting = gc.isenabled()
    gc.disable()  # a run makes little garbage, and looking for it costs a tenth of the time
    try:
        return run(_Drive(shape, load).run, load.seed)
    finally:
        if is_collecting:
            gc.enable()


class _Drive:
    def __init__(self, shape: FleetShape, load: VirtualLoad) -> None:
        self._shape = shape
        self._load = load
        self._numbers = random.Random(f"prompts {load.seed}")
        self._began_at = 0.0

    async def run(self) -> Course:
        async with virtual_fleet(self._shape, self._load.seed) as running:
            outcomes = [Outcome(arrival) for arrival in self._load.arrivals]
            self._began_at = trio.current_time()
            async with trio.open_nursery() as nursery:
                for outcome in outcomes:
                    await trio.sleep_until(self._began_at + outcome.arrival.at_s)
                    self._come(running.fleet, outcome, nursery)
            await trio.sleep(REST_S)
            audit = await running.fleet.audit()
            running.fleet.check_accounting()
        return Course(outcomes, prompt_tokens(audit), tuple(map(str, check_at_rest(audit))))

    def _come(self, fleet: Links, outcome: Outcome, nursery: trio.Nursery) -> None:
        request = self._request(outcome.arrival)
        try:
            stream = _begin(fleet, request)
        except RequestError as error:
            refused(outcome, error, self._elapsed_s(outcome))
            if self._load.do_return and outcome.fate is Fate.REFUSED:
                nursery.start_soon(self._return, fleet, request, outcome)
        else:
            nursery.start_soon(self._read, stream, outcome)

    async def ask(self, fleet: Links, arrival: Arrival) -> None:
        """Ask for something that is not refused, and read it to its end."""
        await self._read(fleet.submit(self._request(arrival)), Outcome(arrival))

    async def _return(self, fleet: Links, request: GenerationRequest, first: Outcome) -> None:
        assert first.retry_after_s is not None
        await trio.sleep(first.retry_after_s)
        at_s = trio.current_time() - self._began_at
        first.again = again = Outcome(replace(first.arrival, at_s=at_s))
        try:
            stream = _begin(fleet, replace(request, request_id=self._numbers.randbytes(16)))
        except RequestError as error:
            refused(again, error, 0.0)
        else:
            await self._read(stream, again)

    def _request(self, arrival: Arrival) -> GenerationRequest:
        numbers = self._numbers
        scheduling = self._load.schedulings.get(arrival.tenant, Scheduling(arrival.tenant))
        request_id = numbers.randbytes(16)
        return GenerationRequest(
            request_id=request_id,
            prompt_ids=tuple(numbers.choices(range(1, VOCABULARY), k=arrival.prompt_tokens)),
            sampling=SamplingParams(max_tokens=arrival.output_tokens, seed=1, ignore_eos=True),
            deadline_s=arrival.deadline_s,
            scheduling=replace(scheduling, service_class=arrival.service_class),
            key=int.from_bytes(request_id[:KEY_BYTES], "big"),
        )

    async def _read(self, stream: OutputStream, outcome: Outcome) -> None:
        async for events in stream:
            for _, event in events:
                self._take(event, outcome)

    def _take(self, event: Delta | Finished | Failed, outcome: Outcome) -> None:
        now_s = self._elapsed_s(outcome)
        match event:
            case Delta():
                if outcome.first_s is None and event.token_ids:
                    outcome.first_s = now_s
                outcome.tokens += len(event.token_ids)
            case Finished():
                is_whole = outcome.tokens >= outcome.arrival.output_tokens
                outcome.fate = Fate.WHOLE if is_whole else Fate.CAPPED
                outcome.end_s = now_s
            case Failed(error=error):
                refused(outcome, error, now_s)

    def _elapsed_s(self, outcome: Outcome) -> float:
        return trio.current_time() - self._began_at - outcome.arrival.at_s


def _begin(fleet: Links, request: GenerationRequest) -> OutputStream:
    """Ask as the surface does: at the door, before the prompt is looked at, and then with it.

    Raises:
      RequestError: refused, here or there.
    """
    fleet.doorkeeper.refuse_early(
        request.scheduling,
        request.request_id,
        request.key,
        request.deadline_s,
        trio.current_time(),
    )
    return fleet.submit(request)


def capacity(shape: FleetShape, sizes: Sizes, num_clients: int, seconds: float) -> float:
    """Return the requests per second that a fleet answers to clients who each ask for the next
    thing as soon as they have the last: its throughput, whatever anybody waits.

    Args:
      shape: of the fleet, with nothing that refuses.
      sizes: of what they ask for.
      num_clients: at once; more than the fleet has rows.
      seconds: how long; the first quarter, in which they all come at once, does not count.
    """
    return run(_ClosedLoop(shape, sizes, num_clients, seconds).run, 0)


class _ClosedLoop:
    def __init__(self, shape: FleetShape, sizes: Sizes, num_clients: int, seconds: float) -> None:
        self._drive = _Drive(shape, VirtualLoad((), seed=1))
        self._shape = shape
        self._sizes = sizes
        self._num_clients = num_clients
        self._seconds = seconds
        self._ended_at: list[float] = []

    async def run(self) -> float:
        async with virtual_fleet(self._shape, 0) as running:
            began_at = trio.current_time()
            with trio.move_on_after(self._seconds):
                async with trio.open_nursery() as nursery:
                    for number in range(self._num_clients):
                        nursery.start_soon(self._client, running.fleet, number)
            from_s = began_at + self._seconds / 4
            counted = sum(at >= from_s for at in self._ended_at)
        return counted / (0.75 * self._seconds)

    async def _client(self, fleet: Links, number: int) -> None:
        numbers = random.Random(f"client {number}")
        while True:
            prompt, output = self._sizes.draw(numbers)
            await self._drive.ask(fleet, Arrival(0.0, prompt, output, deadline_s=600.0))
            self._ended_at.append(trio.current_time())


def refused(outcome: Outcome, error: RequestError, now_s: float) -> None:
    """Note that a request ended with an error: at once, with the time to come again, that is a
    refusal; later, before any token, it was dropped; everything else is a failure."""
    outcome.code, outcome.end_s = error.code, now_s
    outcome.retry_after_s = error.retry_after_s
    outcome.fate = Fate.FAILED
    if outcome.first_s is None and error.retry_after_s is not None:
        outcome.fate = Fate.REFUSED if now_s <= AT_ONCE_S else Fate.DROPPED


def prompt_tokens(audit: FleetAudit) -> int:
    """Return the tokens of prompts that a fleet's workers have computed."""
    accounts = [view.audit for view in audit.workers if view.audit is not None]
    return sum(a.computed_tokens if a.role is Role.PREFILL else a.prompt_tokens for a in accounts)

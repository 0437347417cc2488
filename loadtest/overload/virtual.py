"""Run an open loop against a fleet in virtual time; requests are timed from their planned arrival.

An hour of overload takes minutes, and every run is the same. There is no HTTP and no JSON.
"""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import trio

from server.contract.generation import Delta, Failed, Finished, GenerationRequest
from server.scheduling.admission import AdmissionAsk
from simulation.deterministic import run
from simulation.fleet import FleetShape, running_fleet
from triolet.errors import RequestError
from triolet.ids import Role
from triolet.invariants import check_at_rest
from triolet.sampling import SamplingParams
from triolet.service_class import Scheduling
from triolet.units import SECONDS

from .arrivals import Arrival
from .outcomes import Fate, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from server.contract.output_stream import OutputStream
    from server.scheduling.links import Links
    from triolet.audit import FleetAudit

    from .arrivals import Sizes


VOCABULARY: Final = 900
"""Number of tokens that prompts are drawn from. No two prompts have a common prefix."""
AT_ONCE_S: Final = 1e-6
"""A refusal takes no virtual time."""
KEY_BYTES: Final = 8
"""Bytes of a request's first id, the key of its retry, like its body over HTTP."""
REST_S: Final = 5 * SECONDS
"""Seconds after the last answer at which no block may be leased: longer than a lease."""


@dataclass(frozen=True, slots=True)
class Course:
    """Result of a run.

    Attributes:
      outcomes: outcomes in the order of arrivals.
      prompt_tokens: prompt tokens that workers computed.
      left: descriptions of leaked resources.
      generator_cpu: mean number of cores used by the load generator; 0 in virtual time.
    """

    outcomes: Sequence[Outcome]
    prompt_tokens: int
    left: tuple[str, ...]
    generator_cpu: float = 0.0


@dataclass(frozen=True, slots=True)
class VirtualLoad:
    """A load.

    Attributes:
      arrivals: requests in order.
      schedulings: scheduling of tenants with a weight or a share; others have the default.
      do_return: whether refused requests are retried once, after exactly `Retry-After`.
      seed: random seed of the prompts and the order of tasks.
    """

    arrivals: Sequence[Arrival]
    schedulings: Mapping[str, Scheduling] = field(default_factory=dict)
    do_return: bool = False
    seed: int = 0


def drive(shape: FleetShape, load: VirtualLoad) -> Course:
    """Run all requests in virtual time."""
    is_collecting = gc.isenabled()
    gc.disable()  # a run makes little garbage, and collecting it costs a tenth of the time
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
        async with running_fleet(self._shape, self._load.seed) as fleet:
            outcomes = [Outcome(arrival) for arrival in self._load.arrivals]
            self._began_at = trio.current_time()
            async with trio.open_nursery() as nursery:
                for outcome in outcomes:
                    await trio.sleep_until(self._began_at + outcome.arrival.at_s)
                    self._come(fleet, outcome, nursery)
            await trio.sleep(REST_S)
            audit = await fleet.audit()
            fleet.check_accounting()
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
        """Send a request that is not refused, and read it to its end."""
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
    """Submit a request as the API does: first admission without the prompt, then with it.

    Raises:
      RequestError: it was refused.
    """
    ask = AdmissionAsk(request.scheduling, request.deadline_s, request.request_id, request.key)
    fleet.admission.admit(ask, trio.current_time())
    return fleet.submit(request)


def capacity(shape: FleetShape, sizes: Sizes, num_clients: int, seconds: float) -> float:
    """Return a fleet's throughput in requests per second, in a closed loop.

    Args:
      shape: size of the fleet, without mechanisms that refuse.
      sizes: lengths of the requests.
      num_clients: number of concurrent clients, more than the fleet's rows.
      seconds: duration. The first quarter, with the burst at the start, does not count.
    """
    driver = _Drive(shape, VirtualLoad((), seed=1))
    ended_at: list[float] = []

    async def client(fleet: Links, number: int) -> None:
        numbers = random.Random(f"client {number}")
        while True:
            prompt, output = sizes.draw(numbers)
            await driver.ask(fleet, Arrival(0.0, prompt, output, deadline_s=600.0))
            ended_at.append(trio.current_time())

    async def ask_for_so_long() -> float:
        async with running_fleet(shape, 0) as fleet:
            began_at = trio.current_time()
            with trio.move_on_after(seconds):
                async with trio.open_nursery() as nursery:
                    for number in range(num_clients):
                        nursery.start_soon(client, fleet, number)
        counted = sum(at >= began_at + seconds / 4 for at in ended_at)
        return counted / (0.75 * seconds)

    return run(ask_for_so_long, 0)


def refused(outcome: Outcome, error: RequestError, now_s: float) -> None:
    """Record that a request ended with an error: an immediate one with Retry-After is a refusal, a
    later one before any token means dropped, and everything else is a failure."""
    outcome.code, outcome.end_s = error.code, now_s
    outcome.retry_after_s = error.retry_after_s
    outcome.fate = Fate.FAILED
    if outcome.first_s is None and error.retry_after_s is not None:
        outcome.fate = Fate.REFUSED if now_s <= AT_ONCE_S else Fate.DROPPED


def prompt_tokens(audit: FleetAudit) -> int:
    """Return the prompt tokens that a fleet's workers have computed."""
    accounts = [view.audit for view in audit.workers if view.audit is not None]
    return sum(a.computed_tokens if a.role is Role.PREFILL else a.prompt_tokens for a in accounts)

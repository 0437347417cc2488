"""A fleet of real processes with a known capacity: a server, and workers that only take time.

With `cost=None` the workers compute the demo model instead.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import trio

from simulation.modelled import COST, StepCost
from triolet.audit import FleetAudit
from triolet.invariants import check_at_rest
from triolet.service_class import ServiceClass

from ..harness.http import get
from ..harness.servers import ServerProcess, running
from ..harness.streams import COMPLETIONS, Clients, StreamBrokenError, completion, post
from .arrivals import Arrival
from .lab_process import EVERYTHING, command
from .outcomes import Fate, Outcome
from .virtual import Course, prompt_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ..harness.streams import Stream
    from .arrivals import Sizes


ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
KV_POOL: Final = "96MiB"
"""1000 blocks of the demo model, so that rows limit decode, not blocks."""


@dataclass(frozen=True, slots=True)
class RealShape:
    """Size of a fleet.

    Attributes:
      prefills: number of prefill workers.
      decodes: number of decode workers.
      max_num_seqs: rows of a decode step.
      cost: cost of a step; None to compute the demo model.
      mechanisms: name of the enabled mechanisms.
      server_options: further options of the server.
    """

    prefills: int = 1
    decodes: int = 1
    max_num_seqs: int = 32
    cost: StepCost | None = COST
    mechanisms: str = EVERYTHING
    server_options: tuple[str, ...] = ()


@contextmanager
def real_fleet(
    shape: RealShape, logs: Path, popen: type[subprocess.Popen[bytes]] = subprocess.Popen
) -> Iterator[ServerProcess]:
    """Run a fleet of a supervisor, one server and workers; its log is `fleet.log` in `logs`.

    Args:
      shape: size of the fleet.
      logs: folder of the log, created if missing.
      popen: starts the supervisor.

    Raises:
      ServerDidNotStartError: it did not start; has the end of its log.
    """
    logs.mkdir(parents=True, exist_ok=True)
    started = [
        *(*command(shape.mechanisms, shape.cost), "serve", "--threads", "1"),
        *("--prefill", str(shape.prefills), "--decode", str(shape.decodes)),
        *("--max-num-seqs", str(shape.max_num_seqs), "--kv-pool", KV_POOL),
        *("--log-level", "info", *shape.server_options),
    ]
    environment = os.environ | ENVIRONMENT
    with running(ServerProcess(started, logs / "fleet.log", environment, popen=popen)) as fleet:
        yield fleet


async def audit_of(fleet: ServerProcess) -> FleetAudit:
    """Return the audit of the fleet.

    Raises:
      ConnectionError: the server does not answer, or the answer is not an audit.
    """
    status, body = await get(fleet.url, "/fleet/audit")
    if status != 200:
        raise ConnectionError(f"no audit: {body.decode()}")
    return FleetAudit.from_json(body)


FIRST_ID, LAST_ID = 256, 2000
"""Token ids of the demo model that are parts of words. No two prompts have a common prefix."""
PATIENCE_S: Final = 300.0
"""Timeout of clients that measure a fleet's capacity."""
GRACE_S: Final = 5.0
"""Seconds after a request's deadline until a client gives up."""
REST_S: Final = 30.0
"""Seconds after the last answer until everything must be released."""
POLL_S: Final = 0.25
OVERLOADED: Final = "overloaded"
TIERS: Final = {
    ServiceClass.CRITICAL: "priority",
    ServiceClass.DEFAULT: "default",
    ServiceClass.SHEDDABLE: "flex",
}


@dataclass(frozen=True, slots=True)
class RealLoad:
    """A load.

    Attributes:
      arrivals: requests in order.
      do_return: whether refused requests are retried once, after exactly `Retry-After`.
      seed: random seed of the prompts.
    """

    arrivals: Sequence[Arrival]
    do_return: bool = False
    seed: int = 0


async def drive(fleet: ServerProcess, load: RealLoad) -> Course:
    """Run all requests, and wait until the fleet is idle."""
    before = await audit_of(fleet)
    numbers = random.Random(f"prompts {load.seed}")
    asked = [_request(arrival, numbers) for arrival in load.arrivals]
    outcomes = [Outcome(arrival) for arrival in load.arrivals]
    began_at, began_cpu_s = trio.current_time(), time.process_time()
    async with Clients(fleet.url, trio.current_time).reading() as clients:
        async with trio.open_nursery() as nursery:
            for outcome, request in zip(outcomes, asked, strict=True):
                due = began_at + outcome.arrival.at_s
                await trio.sleep_until(due)
                nursery.start_soon(_come, clients, request, outcome, due, load.do_return)
        cpu_share = (time.process_time() - began_cpu_s) / (trio.current_time() - began_at)
    audit, left = await _at_rest(fleet)
    computed = prompt_tokens(audit) - prompt_tokens(before)
    return Course(outcomes, computed, left, generator_cpu=cpu_share)


async def capacity(fleet: ServerProcess, sizes: Sizes, num_clients: int, seconds: float) -> float:
    """Return a fleet's throughput in requests per second, in a closed loop.

    Args:
      fleet: a fleet without mechanisms that refuse.
      sizes: lengths of the requests.
      num_clients: number of concurrent clients, more than the fleet's rows.
      seconds: duration. The first quarter, with the burst at the start, does not count.
    """
    ended_at: list[float] = []
    began_at = trio.current_time()

    async def client(clients: Clients, number: int) -> None:
        numbers = random.Random(f"client {number}")
        while True:
            prompt, output = sizes.draw(numbers)
            arrival = Arrival(0.0, prompt, output, deadline_s=PATIENCE_S)
            answer = await clients.ask(_request(arrival, numbers))
            if answer.code:
                raise StreamBrokenError(f"while capacity was measured: {answer.code}")
            answer.check()
            ended_at.append(trio.current_time())

    with trio.move_on_after(seconds):
        async with (
            Clients(fleet.url, trio.current_time).reading() as clients,
            trio.open_nursery() as nursery,
        ):
            for number in range(num_clients):
                nursery.start_soon(client, clients, number)
    await _at_rest(fleet)
    return sum(at >= began_at + seconds / 4 for at in ended_at) / (0.75 * seconds)


async def _come(
    clients: Clients, request: bytes, outcome: Outcome, due: float, do_return: bool
) -> None:
    await _ask(clients, request, outcome, due)
    if not do_return or outcome.fate is not Fate.REFUSED or outcome.retry_after_s is None:
        return
    # Not earlier than Retry-After says: the time to receive the refusal is added.
    await trio.sleep(outcome.retry_after_s)
    at_s = outcome.arrival.at_s + trio.current_time() - due
    outcome.again = Outcome(replace(outcome.arrival, at_s=at_s))
    await _ask(clients, request, outcome.again, trio.current_time())


async def _ask(clients: Clients, request: bytes, outcome: Outcome, due: float) -> None:
    outcome.late_s = trio.current_time() - due
    answer: Stream | None = None
    with (
        trio.move_on_at(due + outcome.arrival.deadline_s + GRACE_S),
        suppress(StreamBrokenError),
    ):
        answer = await clients.ask(request)
    outcome.end_s = trio.current_time() - due
    if answer is None:
        outcome.code = "no_answer"
        return
    outcome.code, outcome.tokens = answer.code, answer.num_tokens
    outcome.retry_after_s = answer.retry_after_s
    if answer.times and not (outcome.code and not outcome.tokens):
        outcome.first_s = answer.times[0] - due
    if answer.status == 200 and not outcome.code:
        is_whole = outcome.tokens >= outcome.arrival.output_tokens
        outcome.fate = Fate.WHOLE if is_whole else Fate.CAPPED
    elif answer.status != 200 and answer.retry_after_s is not None:
        outcome.fate = Fate.REFUSED
    elif outcome.code == OVERLOADED and not outcome.tokens:
        outcome.fate = Fate.DROPPED  # its stream had started without tokens


async def _at_rest(fleet: ServerProcess) -> tuple[FleetAudit, tuple[str, ...]]:
    """Return the fleet's audit once everything is released, or at the deadline."""
    deadline = trio.current_time() + REST_S
    while True:
        audit = await audit_of(fleet)
        left = tuple(map(str, check_at_rest(audit)))
        if not left or trio.current_time() > deadline:
            return audit, left
        await trio.sleep(POLL_S)


def _request(arrival: Arrival, numbers: random.Random) -> bytes:
    headers = {"x-request-timeout-ms": str(round(1000 * arrival.deadline_s))}
    prompt = numbers.choices(range(FIRST_ID, LAST_ID), k=arrival.prompt_tokens)
    fields = completion(
        prompt,
        arrival.output_tokens,
        model="demo",
        stream=True,
        stream_options={"include_usage": True},
        service_tier=TIERS[arrival.service_class],
    )
    return post(COMPLETIONS, fields, headers)

"""A fleet of real processes whose capacity is a formula: one server, and paced workers.

Knows how to start, audit and stop them; knows no load. With `cost=None` the workers are the
product's own and compute the demo model.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import tempfile
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from triolet.audit import FleetAudit
from triolet.invariants import check_at_rest
from triolet.service_class import ServiceClass

from ..harness.processes import RoleProcess, get
from .arrivals import Arrival
from .http_client import Asker, BrokenAnswerError, request_bytes
from .modelled import COST, StepCost
from .outcomes import Fate, Outcome
from .switched_server import EVERYTHING
from .virtual import Course, prompt_tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from .arrivals import Sizes
    from .http_client import Answer


SERVER: Final = "server"
START_DEADLINE_S: Final = 240.0
"""Three interpreters, two of which import torch: seconds on a machine with nothing else to do."""
START_POLL_S: Final = 0.1
ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
KV_POOL: Final = "96MiB"
"""1000 blocks of the demo model: rows are what decode runs out of, not blocks."""


class FleetDidNotStartError(Exception):
    """A process ended, or requests were not taken in time."""


@dataclass(frozen=True, slots=True)
class RealShape:
    """How large a fleet is.

    Attributes:
      prefills: workers.
      decodes: workers.
      max_num_seqs: rows of a decode step.
      cost: of a step; None lets the demo model be computed.
      mechanisms: what of the server is switched on, by name.
      server_options: more of them.
    """

    prefills: int = 1
    decodes: int = 1
    max_num_seqs: int = 32
    cost: StepCost | None = COST
    mechanisms: str = EVERYTHING
    server_options: tuple[str, ...] = ()


class RealFleet:
    """Its processes.

    Attributes:
      port: of the server.
      processes: by name.
    """

    def __init__(self, shape: RealShape, directory: Path, logs: Path) -> None:
        # Bound and never listening: nobody else gets the port, while the server is away either.
        self._kept = socket.socket()
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._kept.bind(("127.0.0.1", 0))
        self.port: int = self._kept.getsockname()[1]
        self.processes = {
            name: RoleProcess(name, command, os.environ | ENVIRONMENT, logs / f"{name}.log")
            for name, command in commands(shape, directory, self.port).items()
        }

    async def start(self, nursery: trio.Nursery) -> None:
        """Start everything and wait until requests are taken.

        Raises:
          FleetDidNotStartError: with the last words of whoever ended.
        """
        for process in self.processes.values():
            process.start(nursery)
        with trio.move_on_after(START_DEADLINE_S):
            while True:
                for process in self.processes.values():
                    if not process.is_running:
                        raise FleetDidNotStartError(f"{process.name}: {process.last_words()}")
                try:
                    status, _ = await get(self.port, "/health/ready")
                except (OSError, trio.TooSlowError):
                    status = 0
                if status == 200:
                    return
                await trio.sleep(START_POLL_S)
        raise FleetDidNotStartError(f"not ready within {START_DEADLINE_S:.0f} s")

    async def stop(self) -> None:
        """End every process."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for process in self.processes.values():
                    nursery.start_soon(process.terminate)
        self._kept.close()

    async def audit(self) -> FleetAudit:
        """Return every process's account of itself.

        Raises:
          OSError: the server does not answer, or not with an audit.
        """
        status, body = await get(self.port, "/fleet/audit")
        if status != 200:
            raise ConnectionError(f"no audit: {body.decode()}")
        return FleetAudit.from_json(body)


@asynccontextmanager
async def real_fleet(shape: RealShape, logs: Path) -> AsyncIterator[RealFleet]:
    """Run a fleet; end it, and everything that it left, at the end."""
    await trio.Path(logs).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="overload-") as directory:
        async with trio.open_nursery() as nursery:
            fleet = RealFleet(shape, Path(directory), logs)
            try:
                await fleet.start(nursery)
                yield fleet
            finally:
                await fleet.stop()
                nursery.cancel_scope.cancel()


def commands(shape: RealShape, directory: Path, port: int) -> dict[str, list[str]]:
    """Return what starts each process."""
    belongs = ("--supervisor-pid", str(os.getpid()))
    server = [
        *(sys.executable, "-m", "loadtest.overload.switched_server", shape.mechanisms),
        *(SERVER, "--port", str(port)),
        *shape.server_options,
        *belongs,
    ]
    started = {SERVER: server}
    worker = [sys.executable, "-m", "ops.cli"]
    if shape.cost is not None:
        paced = "loadtest.overload.paced_worker"
        worker = [sys.executable, "-m", paced, *map(str, shape.cost)]
    for role, number in (("prefill", shape.prefills), ("decode", shape.decodes)):
        for name in (f"{role}-{n}" for n in range(number)):
            control = f"ipc://{directory}/{name}.control"
            server += [f"--{role}", control]
            started[name] = [
                *(*worker, role, "--name", name, "--control", control, "--threads", "1"),
                *("--max-num-seqs", str(shape.max_num_seqs), "--kv-pool", KV_POOL),
                *(("--kv", f"ipc://{directory}/{name}.kv") if role == "decode" else ()),
                *belongs,
            ]
    return started


FIRST_ID, LAST_ID = 256, 2000
"""Ids of the demo model that are parts of words: no prompt begins like another one."""
PATIENCE_S: Final = 300.0
"""Of clients that find out what a fleet can do."""
GRACE_S: Final = 5.0
"""Beyond a request's deadline: a server that has not answered by then is not waited for."""
REST_S: Final = 30.0
"""After the last answer everything has to be back within this time."""
POLL_S: Final = 0.25
OVERLOADED: Final = "overloaded"
TIERS: Final = {
    ServiceClass.CRITICAL: "priority",
    ServiceClass.DEFAULT: "default",
    ServiceClass.SHEDDABLE: "flex",
}


@dataclass(frozen=True, slots=True)
class RealLoad:
    """Arrivals, and who they are.

    Attributes:
      arrivals: in order.
      do_return: whoever is refused comes once more, after exactly the time that it was told.
      seed: decides prompts.
    """

    arrivals: Sequence[Arrival]
    do_return: bool = False
    seed: int = 0


async def drive(fleet: RealFleet, load: RealLoad) -> Course:
    """Let everybody come and go; return when the fleet is at rest."""
    before = await fleet.audit()
    numbers = random.Random(f"prompts {load.seed}")
    asked = [_request(fleet.port, load, arrival, numbers) for arrival in load.arrivals]
    outcomes = [Outcome(arrival) for arrival in load.arrivals]
    asker = Asker(fleet.port)
    began_at, began_cpu_s = trio.current_time(), time.process_time()
    async with trio.open_nursery() as nursery:
        for outcome, request in zip(outcomes, asked, strict=True):
            due = began_at + outcome.arrival.at_s
            await trio.sleep_until(due)
            nursery.start_soon(_come, asker, request, outcome, due, load.do_return)
    cpu_share = (time.process_time() - began_cpu_s) / (trio.current_time() - began_at)
    await asker.close()
    audit, left = await _at_rest(fleet)
    return Course(
        outcomes,
        prompt_tokens(audit) - prompt_tokens(before),
        left,
        generator_cpu=cpu_share,
    )


async def capacity(fleet: RealFleet, sizes: Sizes, num_clients: int, seconds: float) -> float:
    """Return the requests per second that a fleet answers to clients who each ask for the next
    thing as soon as they have the last: its throughput, whatever anybody waits.

    Args:
      fleet: with nothing that refuses.
      sizes: of what they ask for.
      num_clients: at once; more than the fleet has rows.
      seconds: how long; the first quarter, in which they all come at once, does not count.
    """
    asker, load, ended_at = Asker(fleet.port), RealLoad(()), list[float]()
    began_at = trio.current_time()

    async def client(number: int) -> None:
        numbers = random.Random(f"client {number}")
        while True:
            prompt, output = sizes.draw(numbers)
            arrival = Arrival(0.0, prompt, output, deadline_s=PATIENCE_S)
            answer = await asker.ask(_request(fleet.port, load, arrival, numbers))
            if answer.status != 200 or answer.code:
                raise BrokenAnswerError(f"while capacity was measured: {answer}")
            ended_at.append(trio.current_time())

    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for number in range(num_clients):
                nursery.start_soon(client, number)
    await asker.close()
    await _at_rest(fleet)
    return sum(at >= began_at + seconds / 4 for at in ended_at) / (0.75 * seconds)


async def _come(
    asker: Asker, request: bytes, outcome: Outcome, due: float, do_return: bool
) -> None:
    await _ask(asker, request, outcome, due)
    if not do_return or outcome.fate is not Fate.REFUSED or outcome.retry_after_s is None:
        return
    # Sooner than told by nobody: what a client takes to hear of it comes on top.
    await trio.sleep(outcome.retry_after_s)
    at_s = outcome.arrival.at_s + trio.current_time() - due
    outcome.again = Outcome(replace(outcome.arrival, at_s=at_s))
    await _ask(asker, request, outcome.again, trio.current_time())


async def _ask(asker: Asker, request: bytes, outcome: Outcome, due: float) -> None:
    outcome.late_s = trio.current_time() - due
    answer: Answer | None = None
    with (
        trio.move_on_at(due + outcome.arrival.deadline_s + GRACE_S),
        suppress(BrokenAnswerError, OSError),
    ):
        answer = await asker.ask(request)
    outcome.end_s = trio.current_time() - due
    if answer is None:
        outcome.code = "no_answer"
        return
    outcome.code, outcome.tokens = answer.code, answer.tokens
    outcome.retry_after_s = answer.retry_after_s
    if answer.first_at is not None and not (answer.code and not answer.tokens):
        outcome.first_s = answer.first_at - due
    if answer.status == 200 and not answer.code:
        is_whole = answer.tokens >= outcome.arrival.output_tokens
        outcome.fate = Fate.WHOLE if is_whole else Fate.CAPPED
    elif answer.status != 200 and answer.retry_after_s is not None:
        outcome.fate = Fate.REFUSED
    elif answer.code == OVERLOADED and not answer.tokens:
        outcome.fate = Fate.DROPPED  # its stream had begun, with nothing in it


async def _at_rest(fleet: RealFleet) -> tuple[FleetAudit, tuple[str, ...]]:
    """Return the account of the fleet once nothing is left, or after a while what is."""
    deadline = trio.current_time() + REST_S
    while True:
        audit = await fleet.audit()
        left = tuple(map(str, check_at_rest(audit)))
        if not left or trio.current_time() > deadline:
            return audit, left
        await trio.sleep(POLL_S)


def _request(port: int, load: RealLoad, arrival: Arrival, numbers: random.Random) -> bytes:
    headers = {"x-request-timeout-ms": str(round(1000 * arrival.deadline_s))}
    fields: dict[str, object] = {
        "model": "demo",
        "prompt": numbers.choices(range(FIRST_ID, LAST_ID), k=arrival.prompt_tokens),
        "max_tokens": arrival.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "service_tier": TIERS[arrival.service_class],
    }
    return request_bytes(port, fields, headers)

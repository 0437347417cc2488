"""Inject faults into running processes under load, with proof that each fault happened.

An injector returns only once the fault is visible in the system (a process has exited or stopped);
a sent signal is no proof. Leftovers after a fault are counted here too.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from ..harness.http import get
from ..harness.metrics import KvBlocks, blocks_of, samples
from ..harness.servers import HasNotHappenedError, is_gone, seconds_of, state_of, wait_until
from ..harness.streams import StreamBrokenError
from .answers import key_headers
from .client import ask_all

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from random import Random

    from ..harness.servers import FleetLog
    from .answers import Ask
    from .client import Story


STOP_S = 3.0
"""Longer than a lease (2 s), so that the stopped process must fence itself when it continues."""
PROOF_TIMEOUT_S = 60.0
RESTART_TIMEOUT_S = 180.0
"""Timeout of a restart: loading the model takes a while on a busy machine."""


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that happened.

    Attributes:
      fault: name of the fault.
      victim: name of the process.
      pid: pid of the process.
      at: time on Trio's clock.
      epoch_s: time in seconds since the epoch, for log lines.
      proof: evidence that it happened.
    """

    fault: str
    victim: str
    pid: int
    at: float
    epoch_s: float
    proof: str


async def kill(log: FleetLog, victim: str, fault: str) -> Injected:
    """SIGKILL a process and wait until it has exited and its replacement is ready."""
    pid = log.pids()[victim]
    at, epoch_s = trio.current_time(), time.time()
    os.kill(pid, signal.SIGKILL)
    await wait_until(lambda: is_gone(pid), PROOF_TIMEOUT_S, f"{victim} (pid {pid}) is gone")
    await wait_until(
        lambda: bool(_deaths(log, victim, epoch_s)), PROOF_TIMEOUT_S, f"{victim} is reported dead"
    )
    how = _deaths(log, victim, epoch_s)[0]["how"]
    await _ready_again(log, victim, epoch_s)
    return Injected(fault, victim, pid, at, epoch_s, f"pid {pid} gone, {how}")


async def stop_and_continue(log: FleetLog, victim: str, fault: str) -> Injected:
    """SIGSTOP a worker for longer than a lease, SIGCONT it, and wait until it has fenced itself."""
    pid = log.pids()[victim]
    at, epoch_s = trio.current_time(), time.time()
    os.kill(pid, signal.SIGSTOP)
    try:
        await wait_until(lambda: state_of(pid) == "T", PROOF_TIMEOUT_S, f"{victim} is in state T")
        await trio.sleep(STOP_S)
        was_stopped = state_of(pid) == "T"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert was_stopped, "it was continued by another process"
    await wait_until(
        lambda: bool(after(log, "fenced", epoch_s, process=victim)),
        PROOF_TIMEOUT_S,
        f"{victim} fenced itself",
    )
    return Injected(fault, victim, pid, at, epoch_s, f"pid {pid} in state T, then fenced itself")


async def drain(log: FleetLog, victim: str, fault: str) -> Injected:
    """SIGTERM a worker and wait until it has exited and its replacement is ready."""
    pid = log.pids()[victim]
    at, epoch_s = trio.current_time(), time.time()
    os.kill(pid, signal.SIGTERM)
    # It may let its streams finish first, up to the drain deadline.
    await wait_until(lambda: is_gone(pid), RESTART_TIMEOUT_S, f"{victim} (pid {pid}) has exited")
    await _ready_again(log, victim, epoch_s)
    return Injected(fault, victim, pid, at, epoch_s, f"pid {pid} gone after SIGTERM")


def after(log: FleetLog, event: str, epoch_s: float, **fields: object) -> list[dict[str, Any]]:
    """Return the log lines of an event since a moment."""
    return [entry for entry in log.of(event, **fields) if seconds_of(entry) >= epoch_s]


def _deaths(log: FleetLog, victim: str, epoch_s: float) -> list[dict[str, Any]]:
    return after(log, "process_died", epoch_s, name=victim)


async def _ready_again(log: FleetLog, victim: str, epoch_s: float) -> None:
    await wait_until(
        lambda: bool(after(log, "process_ready", epoch_s, name=victim)),
        RESTART_TIMEOUT_S,
        f"the restarted {victim} is ready",
    )


INJECTORS: dict[str, Callable[[FleetLog, str, str], Awaitable[Injected]]] = {
    "decode-kill": kill,
    "prefill-kill": kill,
    "server-kill": kill,
    "decode-stop": stop_and_continue,
    "prefill-stop": stop_and_continue,
    "decode-drain": drain,
    "prefill-drain": drain,
}


def pick_victim(log: FleetLog, fault: str, rng: Random) -> str:
    """Return the process to inject a fault into."""
    role = fault.partition("-")[0]
    return role if role == "server" else rng.choice(log.names(role))


async def inject(log: FleetLog, fault: str, rng: Random) -> Injected:
    """Inject one fault and wait for its end.

    Raises:
      HasNotHappenedError: it had no effect, or the fleet did not recover.
    """
    return await INJECTORS[fault](log, pick_victim(log, fault, rng), fault)


SETTLE_S = 30.0
"""Seconds after the last answer: leases of dead servers expire after 2 s and a heartbeat reports
it, later on a busy machine."""
POLL_S = 0.1


async def blocks_when_settled(url: str) -> KvBlocks:
    """Return the blocks by state once none is leased, or at the deadline."""
    give_up = trio.current_time() + SETTLE_S
    while True:
        _, body = await get(url, "/metrics")
        blocks = blocks_of(body.decode())
        if blocks.is_all_free or trio.current_time() > give_up:
            return blocks
        await trio.sleep(POLL_S)


async def violations_now(url: str) -> list[str]:
    """Return the violations of the fleet's audit."""
    status, body = await get(url, "/fleet/audit")
    if status != 200:
        return [f"the audit answered {status}"]
    return [json.dumps(violation) for violation in json.loads(body)["violations"]]


FIRST_MOMENT, LAST_MOMENT = 0.05, 0.85
"""Shares of answered requests between which faults occur. They leave requests for after a fault."""
MAX_JITTER_S = 0.5
"""Maximum random delay of a fault after the answer that triggers it."""
WHOLE_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Disturbed:
    """Result of a run.

    Attributes:
      stories: stories of all requests.
      injected: the faults that happened, in order.
      elapsed_s: duration of the load.
    """

    stories: list[Story] = field(default_factory=list)
    injected: list[Injected] = field(default_factory=list)
    elapsed_s: float = 0.0


async def ask_under_faults(
    url: str,
    log: FleetLog,
    asks: Sequence[Ask],
    clients: int,
    faults: Sequence[str],
    rng: Random,
    *,
    retries_broken: bool,
    last_moment: float = LAST_MOMENT,
    max_jitter_s: float = MAX_JITTER_S,
    key: str = "",
) -> Disturbed:
    """Send all requests and inject faults one after the other, at random moments.

    Args:
      url: address of the server.
      log: log of its fleet.
      asks: the requests.
      clients: number of concurrent clients.
      faults: names in INJECTORS.
      rng: random source of moments and victims.
      retries_broken: whether a broken connection is tried again; else it is a failure.
      last_moment: share of answers after which no fault starts.
      max_jitter_s: maximum delay between the answer and the fault.
      key: API key of an operator, if the server has tenants.

    Raises:
      HasNotHappenedError: a fault had no effect, or the fleet did not recover.
    """
    run = Disturbed()
    num_ended = 0
    somebody_ended = trio.Event()

    def on_end(_: Story) -> None:
        nonlocal num_ended, somebody_ended
        num_ended += 1
        somebody_ended.set()
        somebody_ended = trio.Event()

    async def disturb() -> None:
        moments = sorted(rng.uniform(FIRST_MOMENT, last_moment) for _ in faults)
        for moment, fault in zip(moments, faults, strict=True):
            while num_ended < moment * len(asks):
                await somebody_ended.wait()
            await trio.sleep(rng.uniform(0, max_jitter_s))
            if num_ended < len(asks):
                run.injected.append(await inject(log, fault, rng))
                await wait_whole(url, log, key)

    began_at = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(disturb)
        run.stories = await ask_all(url, asks, clients, on_end, retries_broken=retries_broken)
        run.elapsed_s = trio.current_time() - began_at
    return run


async def wait_whole(url: str, log: FleetLog, key: str = "") -> None:
    """Wait until the server is connected to every worker that was ever started.

    Args:
      url: address of the server.
      log: log of its fleet.
      key: API key of an operator, if the server has tenants.

    Raises:
      HasNotHappenedError: a worker is missing at the deadline.
    """
    wanted = set(log.names("prefill") + log.names("decode"))
    present: set[str] = set()
    with trio.move_on_after(WHOLE_TIMEOUT_S):
        while not wanted <= present:
            await trio.sleep(POLL_S)
            present = await _workers_up(url, key)
        return
    raise HasNotHappenedError(f"workers that did not come back: {sorted(wanted - present)}")


async def _workers_up(url: str, key: str) -> set[str]:
    try:
        _, body = await get(url, "/metrics", key_headers(key))
    except StreamBrokenError:
        return set()
    return {
        labels.partition('worker="')[2].partition('"')[0]
        for name, labels, value in samples(body.decode())
        if name == "triolet_worker_up" and value == 1.0
    }

"""Faults that are done to running processes, each of which proves that it happened.

An injector returns only when the fault shows in the system itself (a process gone, a process
stopped), never because a signal was sent. Whole fault suites have passed because nothing was ever
injected.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from .processes import is_gone, seconds_of, state_of, wait_until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from random import Random

    from .processes import FleetLog

STOP_S = 3.0
"""Longer than a lease lives (2 s): the process that wakes is a zombie and must fence itself."""
PROOF_TIMEOUT_S = 60.0
RESTART_TIMEOUT_S = 180.0
"""A worker loads its model again; on a busy machine that takes a while."""


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that happened.

    Attributes:
      fault: which.
      victim: the process's name.
      pid: of the life that was hit.
      at: on Trio's clock.
      epoch_s: seconds since the epoch, for log lines.
      proof: what showed that it happened.
    """

    fault: str
    victim: str
    pid: int
    at: float
    epoch_s: float
    proof: str


async def kill(log: FleetLog, victim: str, fault: str) -> Injected:
    """SIGKILL a process and wait until it is gone and the next life of it is ready."""
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
    """SIGSTOP a worker for longer than leases live, SIGCONT it, wait until it fenced itself."""
    pid = log.pids()[victim]
    at, epoch_s = trio.current_time(), time.time()
    os.kill(pid, signal.SIGSTOP)
    try:
        await wait_until(lambda: state_of(pid) == "T", PROOF_TIMEOUT_S, f"{victim} is in state T")
        await trio.sleep(STOP_S)
        was_stopped = state_of(pid) == "T"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert was_stopped, "somebody else let it go on"
    await wait_until(
        lambda: bool(after(log, "fenced", epoch_s, process=victim)),
        PROOF_TIMEOUT_S,
        f"{victim} fenced itself",
    )
    return Injected(fault, victim, pid, at, epoch_s, f"pid {pid} in state T, then fenced itself")


async def drain(log: FleetLog, victim: str, fault: str) -> Injected:
    """SIGTERM a worker and wait until it has left and the next life of it is ready."""
    pid = log.pids()[victim]
    at, epoch_s = trio.current_time(), time.time()
    os.kill(pid, signal.SIGTERM)
    # It may let its streams finish first, for as long as a drain may take.
    await wait_until(lambda: is_gone(pid), RESTART_TIMEOUT_S, f"{victim} (pid {pid}) has left")
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
        f"the next life of {victim} is ready",
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
    """Return the process that a fault is done to."""
    role = fault.partition("-")[0]
    return role if role == "server" else rng.choice(log.names(role))


async def inject(log: FleetLog, fault: str, rng: Random) -> Injected:
    """Do one fault and see it through.

    Raises:
      HasNotHappenedError: it did not show, or the fleet did not get whole again.
    """
    return await INJECTORS[fault](log, pick_victim(log, fault, rng), fault)

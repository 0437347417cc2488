"""One rollout of the benchmark: start it, break the candidate once it gets requests, follow it, and
count what users saw."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

from ..harness.progress import progress
from .candidates import MODEL
from .traffic import returned

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ..harness.control import Admin
    from .candidates import Candidate
    from .fleet import BenchFleet
    from .traffic import Asked, Users


PLAN: Final[dict[str, object]] = {
    "shares": (0.1, 0.5, 1.0),
    "bake_s": 15.0,
    "max_step_s": 300.0,
    "retention_s": 8.0,
    "min_requests": 20,
    "despite_freeze": True,
}
"""Of all rollouts. In the shortest first step the candidate gets 30 requests. No freeze holds them
up, because some kill processes of the stable version."""
LONGEST_S: Final = 600.0
"""Longest time to the first step, and from there to the end."""
AFTER_S: Final = 3.0
"""Time after the verdict in which requests to the candidate are looked for."""
SHOWN: Final = 120
"""Characters of a text in the table."""
KILLED: Final = ("decode", "control", "prefill", "server")
"""Roles of which one process after the other is killed."""
KILL_EVERY_S: Final = 7.0
STOPPED: Final = ("promoted", "rolled_back", "paused")


class Versions(NamedTuple):
    """Digests of a rollout's versions."""

    stable: str
    candidate: str


class Course(NamedTuple):
    """What happened in a rollout. Times are Unix times.

    Attributes:
      candidate: name of the candidate.
      phase: phase in which it ended or was paused.
      step: step in which it did.
      said: the verdict.
      fault_at: when the candidate got requests and its devices broke; None if it never did.
      verdict_at: time of the verdict.
      last_at: when the last request to the candidate was sent before it was sent away.
      canary: requests to the candidate.
      failed: requests to the candidate that failed.
      failed_stable: requests to the stable version, or without a version, that failed.
      strays: users that went back to the stable version before the verdict, and answers of two
        versions.
      resumed: answers of which a resumption or repetition was compared, too.
      pairs: shadow copies that were compared.
      waiting: rows of shadow copies that ran while a request to the stable version waited.
      leaks: requests to the candidate in the log before its first step.
    """

    candidate: str
    phase: str
    step: int
    said: str
    fault_at: float | None
    verdict_at: float
    last_at: float
    canary: int
    failed: int
    failed_stable: list[str]
    strays: list[str]
    resumed: int
    pairs: int
    waiting: int
    leaks: int

    @property
    def found_s(self) -> float | None:
        """Time from the fault to the verdict."""
        return None if self.fault_at is None else self.verdict_at - self.fault_at

    @property
    def late_s(self) -> float:
        """Time from a rollback to the last new request to the candidate."""
        return max(0.0, self.last_at - self.verdict_at) if self.phase == "rolled_back" else 0.0

    def shown(self) -> dict[str, object]:
        """Return a row of a table."""
        return {
            "candidate": self.candidate,
            "end": f"{self.phase}, step {self.step}",
            "found s": self.found_s,
            "late s": self.late_s,
            "canary": self.canary,
            "said": self.said[:SHOWN],
            "wrong": "; ".join([*self.failed_stable, *self.strays])[:SHOWN],
        }


async def roll_out(
    fleet: BenchFleet,
    admin: Admin,
    users: Users,
    candidate: Candidate,
    versions: Versions,
    ref: str,
    plan: Mapping[str, object],
) -> Course:
    """Run a rollout to its end.

    Args:
      fleet: the fleet.
      admin: its control.
      users: its users, who send requests meanwhile.
      candidate: the candidate.
      versions: digests of both versions.
      ref: name of the candidate in the store.
      plan: fields of the order that starts it.

    Raises:
      trio.TooSlowError: it did not end.
      OrderRefusedError: it could not be started.
    """
    fleet.repair_devices(versions.candidate)
    if candidate.fault is not None and candidate.is_always_faulty:
        fleet.break_devices(versions.candidate, candidate.fault)
    users.is_chat = bool(candidate.template)
    began_at, num_sticky = time.time(), len(users.versions)
    own = {"golden": candidate.golden, "shadow_share": candidate.shadow_share or None}
    await admin.order("/admin/rollouts", **plan, **own, model=MODEL, ref=ref)
    begun = await admin.until(MODEL, lambda one: one["step"] or one["phase"] in STOPPED, LONGEST_S)
    fault_at = time.time() if begun["step"] else None
    if candidate.fault is not None:
        fleet.break_devices(versions.candidate, candidate.fault)
    async with trio.open_nursery() as nursery:
        if candidate.is_killed:
            nursery.start_soon(_kill, fleet)
        stopped = await admin.until(MODEL, lambda one: one["phase"] in STOPPED, LONGEST_S)
        nursery.cancel_scope.cancel()
    await trio.sleep(AFTER_S)
    if stopped["phase"] == "paused":
        await admin.order(f"/admin/rollouts/{MODEL}/rollback")
    await admin.until(MODEL, lambda one: one["is_over"], LONGEST_S)
    tries = [one for one in users.versions[num_sticky:] if len(one) > 1]
    mixed = [f"one answer, of {one}" for one in tries if len({*one}) > 1]
    course = _course_of(users.since(began_at), versions, stopped)
    num_leaks = fleet.records_of(versions.candidate, began_at, begun["began_at"])
    return course._replace(
        candidate=candidate.name,
        fault_at=fault_at,
        strays=[*course.strays, *mixed],
        resumed=len(tries),
        leaks=num_leaks,
    )


def _course_of(asked: Sequence[Asked], versions: Versions, stopped: dict[str, Any]) -> Course:
    """Return what happened in a rollout, as far as its requests and its end say."""
    verdict, shadow = stopped["history"][-1], stopped["shadow"]
    canary = [one for one in asked if one.version == versions.candidate]
    return Course(
        "",
        stopped["phase"],
        stopped["step"],
        verdict["said"],
        None,
        verdict["at"],
        max((one.sent_at for one in canary), default=0.0),
        len(canary),
        sum(bool(one.failure) for one in canary),
        [one.failure for one in asked if one.failure and one.version != versions.candidate],
        returned((one for one in asked if one.ended_at < verdict["at"]), *versions),
        0,
        shadow["pairs"],
        shadow["rows_while_waiting"],
        0,
    )


async def _kill(fleet: BenchFleet) -> None:
    """Kill one process after the other."""
    for number, role in enumerate(cycle(KILLED)):
        await trio.sleep(KILL_EVERY_S)
        pids = fleet.process.log.pids()
        names = sorted(name for name in pids if role in name)
        victim = names[number // len(KILLED) % len(names)]
        with suppress(ProcessLookupError):
            os.kill(pids[victim], signal.SIGKILL)
        progress(f"  killed {victim}")


def middle(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that there are."""
    there = [value for value in values if value is not None]
    return median(there) if there else None

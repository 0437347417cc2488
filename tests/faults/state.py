"""Test helper that describes the state of the fleet under test after a timeout, for the person who
reads the report.

The state is read before the fault is undone: the proxy's rules are still active, and clients still
connected. A
process that does not answer is listed as silent.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from loadtest.harness.http import get
from transport.frames import AttemptFrame, ServerHeartbeat, WorkerHeartbeat
from triolet.audit import FleetAudit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triolet.audit import WorkerView

    from .fleet import Fleet
    from .processes import RoleProcess
    from .rules import Sighting

ANSWER_S: Final = 5.0
"""Timeout for the server, which may itself be stuck: longer than it waits for workers (1 s)."""
LAST_FRAMES: Final = 24
LAST_LINES: Final = 6
NOT_SHOWN: Final = frozenset({"event", "level", "timestamp", "process", "model", "model_digest"})


async def state_of(fleet: Fleet) -> str:
    """Return processes, rules, queue, workers with attempts and leases, and the latest frames."""
    lines = [_process(process) for process in fleet.processes.values()]
    lines += fleet.proxy.describe()
    try:
        with trio.fail_after(ANSWER_S):
            _, status = await get(fleet.url, "/fleet/status")
            _, audit = await get(fleet.url, "/fleet/audit")
        lines += lines_of(msgspec.json.decode(status), FleetAudit.from_json(audit))
    except (OSError, ValueError, trio.TooSlowError) as error:
        lines.append(f"the server does not report its state: {error!r}")
    lines += _last_frames(fleet.proxy.sightings.entries)
    for process in fleet.processes.values():
        lines += _last_lines(process)
    return "\n".join(lines)


def lines_of(status: dict[str, Any], audit: FleetAudit) -> Iterator[str]:
    """Yield the server's account of itself, then of each worker."""
    server = audit.server
    yield (
        f"server@{server.epoch}: {server.in_flight} in flight, {server.waiting} in the queue, "
        f"{server.running} with an attempt, {server.connections} connections"
    )
    told = {worker["name"]: worker for worker in status["workers"]}
    for view in audit.workers:
        yield _worker(view, told.get(view.name, {}))
        for attempt in view.after:
            told_so = [word for word in ("asked", "granted", "wanted") if _is(attempt, word)]
            yield f"  attempt {attempt.attempt}: {', '.join(told_so) or 'not asked'}"
        for lease in () if view.audit is None else view.audit.leases:
            yield (
                f"  lease {lease.attempt}: {lease.state}, {lease.num_blocks} blocks, "
                f"{lease.age_s:.1f} s old, named {lease.renewed_ago_s:.1f} s ago, "
                f"{lease.num_tokens} tokens of {lease.allowed}"
            )


def _is(attempt: object, word: str) -> bool:
    return bool(getattr(attempt, f"is_{word}"))


def _worker(view: WorkerView, told: dict[str, Any]) -> str:
    words = [
        f"{view.name}@{view.epoch}: {view.state}",
        f"breaker {told.get('breaker')}",
        f"credit {view.token_credit} tokens, {view.row_credit} rows",
        f"{view.available_blocks} blocks",
        f"sequences {told.get('sequences')}",
        told.get("trouble") or "",
        f"no audit: {view.silence}" if view.audit is None else f"ends {dict(view.audit.ended)}",
        "" if view.audit is None else f"dropped {dict(view.audit.dropped)}",
    ]
    return ", ".join(word for word in words if word)


def _process(process: RoleProcess) -> str:
    return f"process {process.name}: {process.state}"


def _last_frames(sightings: list[Sighting]) -> Iterator[str]:
    beats = (ServerHeartbeat, WorkerHeartbeat)
    now = time.monotonic()
    for one in [one for one in sightings if not isinstance(one.frame, beats)][-LAST_FRAMES:]:
        key = f" {one.frame.key}" if isinstance(one.frame, AttemptFrame) else ""
        yield (
            f"frame {now - one.at:.2f} s ago: {type(one.frame).__name__}{key} "
            f"{one.way.name.lower()} {one.link.client}-{one.link.worker}: {one.fate.name.lower()}"
        )


def _last_lines(process: RoleProcess) -> Iterator[str]:
    now = time.time()
    for line in process.lines.entries[-LAST_LINES:]:
        when = f"{now - line.at:.2f} s ago" if line.at else "at some time"
        said = {name: value for name, value in line.fields.items() if name not in NOT_SHOWN}
        yield f"log of {process.name} {when}: {line.event} {said}"

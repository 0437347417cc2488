"""Tests of the fault matrix's evidence: the attempts that a worker holds, derived from frames and
log lines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from tests.faults.evidence import Holder, holders
from tests.faults.rules import Fate, Link, Sighting, Way
from transport.frames import End, EndReason, KvTarget, Prefill
from transport.parts import Peer
from triolet.ids import Role
from triolet.sampling import SamplingParams

from .processes import LogLine

if TYPE_CHECKING:
    from tests.faults.fleet import Fleet
    from transport.frames import AnyFrame

REQUEST_ID = bytes(16)


def prefill(attempt: int) -> Prefill:
    target = KvTarget(Peer(Role.DECODE, "d0", 1), "ipc://d0")
    return Prefill(REQUEST_ID, attempt, b"", target, SamplingParams(), 0, 1.0)


def end(attempt: int) -> End:
    return End(REQUEST_ID, attempt, EndReason.SUPERSEDED)


def fleet_of(*frames: tuple[AnyFrame, Fate], ended: tuple[AnyFrame, ...] = ()) -> Fleet:
    link = Link("server", "p0", "control")
    entries = [Sighting(0.0, link, Way.TO_WORKER, frame, fate) for frame, fate in frames]
    lines = [
        LogLine(0.0, "attempt_ended", {"attempt": str(cast("Any", frame).key), "reason": "length"})
        for frame in ended
    ]
    p0 = SimpleNamespace(lines=SimpleNamespace(entries=lines))
    proxy = SimpleNamespace(sightings=SimpleNamespace(entries=entries))
    return cast("Fleet", SimpleNamespace(proxy=proxy, processes={"p0": p0}))


def test_what_was_begun_and_has_not_ended_is_held() -> None:
    fleet = fleet_of((prefill(0), Fate.PASS), (prefill(1), Fate.PASS), ended=(prefill(0),))
    assert holders(fleet) == {Holder("p0", str(prefill(1).key))}


def test_what_is_kept_back_has_not_begun() -> None:
    assert holders(fleet_of((prefill(0), Fate.HOLD))) == set()


def test_what_was_told_to_end_need_not_have_begun() -> None:
    fleet = fleet_of((end(0), Fate.PASS), (prefill(0), Fate.PASS), (prefill(1), Fate.PASS))
    assert holders(fleet) == {Holder("p0", str(prefill(1).key))}

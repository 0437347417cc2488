"""Tests of the stand-in for lost actors of a fleet on Ray: which actors it takes, for how long, and
which it leaves alone. Its processes are real; Ray's answers are given."""

from __future__ import annotations

import os
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import pytest
import trio

from ops.settings.form import Settings
from ops.supervisor.starter import Starter
from ops.targets.actors import actor_name, stood_in_for
from ops.targets.owned_process import OwnedProcess
from ops.targets.stand_in import StandIn
from triolet.config import RayConfig, ServerConfig
from triolet.ids import Place, Role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

PATIENCE_S: Final = 60.0
PROGRAM: Final = """
import json, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print(json.dumps({"event": "server_ready", "url": ""}), flush=True)
sys.stdin.read()
"""


def name(zone: str, role: Role = Role.DECODE, number: int = 0, model: str = "") -> str:
    return actor_name(Place(model, role, zone), number)


@pytest.mark.parametrize(
    ("lost", "taken_by_b"),
    [
        ([name("b")], True),
        ([name("a")], False),
        ([name("a"), name("a", Role.SERVER, 1)], False),
        ([name("a"), name("a", Role.SERVER)], True),
        ([name("c"), name("c", Role.SERVER)], False),
        ([name("c"), name("c", Role.SERVER), name("a", Role.SERVER)], True),
        ([name("b", model="chat")], True),
        ([name("b", model="other")], False),
    ],
)
def test_a_zone_without_its_stand_in_falls_to_the_next(
    lost: Sequence[str], taken_by_b: bool
) -> None:
    place = Place("chat", Role.SERVER, "b")
    found = stood_in_for(lost, place, RayConfig(zones=("a", "b", "c")))
    assert (lost[0] in found) == taken_by_b


@pytest.mark.parametrize("present", ["abcd", "bd", "c", "ad"])
def test_every_lost_process_has_one_stand_in(present: str) -> None:
    config = RayConfig(zones=tuple("abcd"))
    lost = [name(zone) for zone in "abcd"]
    lost += [name(zone, Role.SERVER) for zone in "abcd" if zone not in present]
    places = (Place("", Role.SERVER, zone) for zone in present)
    taken = [one for place in places for one in stood_in_for(lost, place, config)]
    assert sorted(taken) == sorted(lost)


def test_workers_on_gpus_are_left_to_ray() -> None:
    lost = [name("", Role.SERVER, 1), name("")]
    place = Place("", Role.SERVER, "")
    assert stood_in_for(lost, place, RayConfig(gpus=1)) == lost[:1]
    assert stood_in_for(lost, place, RayConfig()) == sorted(lost)


@dataclass
class Fleet:
    """What Ray tells about a fleet's actors.

    Attributes:
      lost: names of the actors that it restarts.
      over: names of those whose process serves.
      made: the processes that were started for them.
      looks: how often the stand-in has asked.
    """

    lost: set[str] = field(default_factory=set)
    over: set[str] = field(default_factory=set)
    made: dict[str, OwnedProcess] = field(default_factory=dict)
    looks: int = 0

    def look(self) -> set[str]:
        self.looks += 1
        return set(self.lost)

    def make(self, name: str) -> OwnedProcess:
        settings = replace(
            Settings(), server=ServerConfig(drain_timeout_s=PATIENCE_S, exit_grace_s=PATIENCE_S)
        )
        command = (sys.executable, "-c", PROGRAM)
        self.made[name] = OwnedProcess(name, Role.SERVER, settings, "", "", command, Starter())
        return self.made[name]

    async def wait_looks(self) -> None:
        """Wait until it has looked, and acted on that."""
        enough = self.looks + 2
        while self.looks < enough:  # noqa: ASYNC110 (a thread counts)
            await trio.sleep(0.001)

    async def wait_ready(self, name: str) -> int:
        while name not in self.made or not self.made[name].state.is_ready:  # noqa: ASYNC110
            await trio.sleep(0.001)
        pid = self.made[name].state.pid
        assert pid is not None
        return pid


@asynccontextmanager
async def standing_in(fleet: Fleet, max_stand_ins: int = 4) -> AsyncIterator[None]:
    config = RayConfig(watch_s=0.001, max_stand_ins=max_stand_ins)
    place, leaving = Place("", Role.SERVER, ""), trio.Event()
    is_over = fleet.over.__contains__
    one = StandIn(place, config, fleet.look, is_over, Starter(), fleet.make)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.run, leaving)
            await fleet.wait_looks()
            yield
            leaving.set()


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_lost_process_is_stood_in_for_until_its_own_serves() -> None:
    fleet = Fleet()
    async with standing_in(fleet):
        fleet.lost = {name("")}
        pid = await fleet.wait_ready(name(""))
        fleet.lost = set()
        await fleet.wait_looks()
        assert not has_ended(pid)
        fleet.over.add(name(""))
        while not has_ended(pid):  # noqa: ASYNC110 (the kernel sends no event)
            await trio.sleep(0.001)
        # It can be lost again.
        del fleet.made[name("")]
        fleet.over.clear()
        fleet.lost = {name("")}
        second = await fleet.wait_ready(name(""))
    assert has_ended(second)


async def test_what_was_lost_before_is_left_to_the_stand_in_that_was_there() -> None:
    fleet = Fleet(lost={name("")})
    async with standing_in(fleet):
        assert not fleet.made
        fleet.lost = set()
        await fleet.wait_looks()
        fleet.lost = {name("")}
        await fleet.wait_ready(name(""))


async def test_no_more_processes_run_than_allowed() -> None:
    fleet = Fleet()
    names = [name("", number=number) for number in range(3)]
    async with standing_in(fleet, max_stand_ins=2):
        fleet.lost = {*names}
        for one in names[:2]:
            await fleet.wait_ready(one)
        await fleet.wait_looks()
        assert sorted(fleet.made) == names[:2]
        fleet.lost = {names[2]}
        fleet.over.add(names[0])
        await fleet.wait_ready(names[2])

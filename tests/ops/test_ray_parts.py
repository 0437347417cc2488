"""Tests of Ray actors that fail to start, to run or to leave. `ray` is a fake module; everything
else is production code."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest
import trio

from ops.settings.form import Settings
from ops.supervisor.starter import Starter
from ops.targets.actors import WorkerState
from ops.targets.owned_process import OwnedProcess
from triolet.config import RayConfig
from triolet.ids import Place, Role

if TYPE_CHECKING:
    from collections.abc import Iterator

ELSEWHERE: Final = "192.0.2.1"
"""An address that no machine has (reserved by RFC 5737)."""
PATIENCE_S: Final = 60.0
MODULES: Final = ("ops.targets.ray_worker", "ops.targets.ray_target")


class FakeRayError(Exception):
    """Stands for all of Ray's errors: failed tasks, dead actors and timeouts."""


class FakeRay:
    """Fake module with an actor whose `leave` fails, and a node with an address of another
    machine."""

    def __init__(self) -> None:
        self.killed: list[object] = []
        self.actor = SimpleNamespace(exit_actor=lambda: None)
        self.state = WorkerState()
        self.is_silent = False
        self.restarting: dict[str, dict[str, str]] = {}
        self.exceptions = SimpleNamespace(ActorDiedError=FakeRayError, RayError=FakeRayError)
        self.util = SimpleNamespace(get_node_ip_address=lambda: ELSEWHERE)
        self.asked = SimpleNamespace(
            _actor_id=b"own",
            state=SimpleNamespace(remote=lambda: self.state),
            leave=SimpleNamespace(remote=lambda: None),
        )

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(get_node_labels=dict)

    def get_actor(self, name: str) -> object:
        if name != "/decode//0":
            raise ValueError(name)
        return self.asked

    def get(self, asked: object, timeout: float) -> object:
        if isinstance(asked, WorkerState) and not self.is_silent:
            return asked
        raise FakeRayError(f"leave() failed within {timeout} s")

    def kill(self, actor: object) -> None:
        self.killed.append(actor)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    fake = FakeRay()
    strategies = SimpleNamespace(In=None, NodeLabelSchedulingStrategy=None)
    for name, module in {
        "ray": fake,
        "ray._private": SimpleNamespace(),
        "ray._private.state": SimpleNamespace(actors=lambda **_: fake.restarting),
        "ray.exceptions": fake.exceptions,
        "ray.util": fake.util,
        "ray.util.scheduling_strategies": strategies,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = signal.getsignal(signal.SIGTERM)
    yield fake
    signal.signal(signal.SIGTERM, before)
    for name in MODULES:
        sys.modules.pop(name, None)


def worker() -> Any:  # noqa: ANN401 (the module is imported with the fake)
    module = import_module("ops.targets.ray_worker")
    settings = {"ray": {"retry_s": PATIENCE_S}, "decode": {"drain_timeout_s": 0.1}}
    place = Place("", Role.DECODE)
    return module.RayWorker(place, 0, msgspec.json.encode(settings), ("false",))


async def test_an_address_that_is_not_the_nodes_own_is_told_and_tried_again() -> None:
    settings = replace(Settings(), ray=RayConfig(retry_s=0.01))
    process = OwnedProcess("decode-0", Role.DECODE, settings, "", ELSEWHERE, ("false",), Starter())
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.run)
            for _ in range(2):
                while not process.state.is_stuck:
                    await trio.lowlevel.checkpoint()
                assert process.state.trouble.startswith(f"no port of {ELSEWHERE} can be opened: ")
                process.state = WorkerState()
            process.leaving.set()


def test_an_actor_is_asked_to_leave_twice_and_its_process_is_gone(ray: FakeRay) -> None:
    actor = worker()
    assert ray.killed == []
    for _ in range(2):
        actor.leave()
        assert not actor._thread.is_alive()


def test_an_actor_whose_thread_fails_ends_with_it(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def fail(_: OwnedProcess) -> None:
        raise KeyError("lost")

    codes: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(OwnedProcess, "run", fail)
        patch.setattr("os._exit", codes.append)
        worker()._thread.join(PATIENCE_S)
    assert (codes, ray.killed) == ([1], [])
    assert "KeyError: 'lost'" in capfd.readouterr().err


async def test_an_actor_that_fails_to_leave_is_removed(ray: FakeRay) -> None:
    module = import_module("ops.targets.ray_target")
    target = module.RayTarget(Settings(), None)
    told: list[str] = []
    await target._leave(Place("", Role.DECODE), 0, told.append)
    assert told == ["decode-0 drains"]
    assert ray.killed == [ray.asked]


def test_only_actors_of_this_fleet_are_lost(ray: FakeRay) -> None:
    module = import_module("ops.targets.ray_worker")
    assert module.lost_actors() == set()
    ray.restarting = {"other": {"Name": "/decode//0"}, "gone": {"Name": "/decode//1"}}
    ray.restarting["unnamed"] = {"Name": ""}
    assert module.lost_actors() == set()
    ray.restarting[b"own".hex()] = {"Name": "/decode//0"}
    assert module.lost_actors() == {"/decode//0"}


def test_a_loss_is_over_when_the_process_serves_or_its_actor_has_left(ray: FakeRay) -> None:
    is_over = partial(import_module("ops.targets.ray_worker").is_over, within_s=1)
    assert is_over("/decode//1")
    assert not is_over("/decode//0")
    ray.state = WorkerState(is_ready=True)
    assert is_over("/decode//0")
    ray.is_silent = True
    assert not is_over("/decode//0")

"""Tests of the Controller: operations, wakes, evictions, and resuming after a restart."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.control.controller import Controller, ControlStep, Past
from ops.control.model_states import HOLDING, RESTING, RUNNING
from ops.control.models import owner_of
from ops.control.operations import NoRoom, Operation, OperationStatus, UnknownModel, WantedState
from ops.control.residency import HOST
from ops.supervisor.model_status import ModelStatus, RunningWorker
from ops.supervisor.model_status import RunState as SupervisedState
from transport.control_protocol import Activity, ModelActivity, ModelState
from triolet.config import ControlConfig, ControlledModelConfig
from triolet.ids import Role
from triolet.status import GpuMemory

NO_PAST = Past({}, {}, {}, ())
START_S = 10.0
"""A time after which every server has reported."""


class Fleet:
    """A controller with a fake supervisor that completes steps on command."""

    def __init__(
        self,
        *models: ControlledModelConfig,
        budget: int = 100,
        past: Past = NO_PAST,
        sizes: dict[str, int] | None = None,
        turn_after_s: float = 30.0,
    ) -> None:
        ids = itertools.count()
        self.now = 0.0
        config = ControlConfig(models=models, room_timeout_s=1e6, turn_after_s=turn_after_s)
        guesses = {one.name: 40 for one in models} | (sizes or {})
        self.control = Controller(config, budget, guesses, past, lambda: f"op{next(ids)}", self.now)
        self.steps: list[ControlStep] = []
        self.now = START_S

    def state(self, name: str) -> ModelState:
        return self.control.models[name].state

    def order(self, name: str, wanted: WantedState) -> Operation:
        return self.control.order(name, wanted, "user:me", self.now, self.now)

    def tick(self, after_s: float = 0.1) -> list[ControlStep]:
        self.now += after_s
        new = self.control.tick(self.now, self.now)
        self.steps += new
        return new

    def do(self, failure: str | None = None) -> None:
        """Complete the oldest step of the supervisor."""
        step = self.steps.pop(0)
        self.control.step_done(step.operation, failure, self.now, self.now)

    def settle(self) -> None:
        """Complete steps until none is left."""
        self.tick()
        while self.steps:
            self.do()
            self.tick()

    def see(self, name: str, *, is_there: bool, is_ready: bool = True) -> None:
        """Report the only worker of a model."""
        pid = 7 if is_there else None
        worker = RunningWorker(f"{name}.decode-0", Role.DECODE, pid, is_ready)
        state = SupervisedState.RUNNING if is_there else SupervisedState.FAILED
        its = ModelStatus(name, state, [worker], None if is_there else "it died thrice")
        self.control.note_workers([its], self.now, self.now, self.now)

    def see_on_gpu(self, name: str, gpu: str, num_bytes: int, total_bytes: int = 100) -> None:
        """Report the two workers of a model, which share a GPU."""
        held = GpuMemory(gpu, num_bytes // 2, total_bytes)
        roles = (Role.PREFILL, Role.DECODE)
        workers = [RunningWorker(f"{name}.{role}-0", role, 7, True, held) for role in roles]
        its = ModelStatus(name, SupervisedState.RUNNING, workers)
        self.control.note_workers([its], self.now, self.now, self.now)

    def say(self, *in_flight: tuple[str, int], server: str = "server") -> None:
        said = tuple(ModelActivity(name, n, 0, 0.0 if n else None, True) for name, n in in_flight)
        self.control.note_activity(Activity(server, said), self.now)


def model(name: str, **fields: object) -> ControlledModelConfig:
    return ControlledModelConfig(name, f"/models/{name}", **fields)  # type: ignore[arg-type]


def test_a_load_runs_its_steps_and_a_second_one_is_the_same_operation() -> None:
    fleet = Fleet(model("a"))
    operation = fleet.order("a", WantedState.LOAD)
    assert fleet.order("a", WantedState.LOAD) is operation
    assert fleet.tick() == [ControlStep(operation, is_start=True)]
    assert fleet.tick() == []
    assert fleet.order("a", WantedState.LOAD) is operation
    assert (fleet.state("a"), operation.status) == (ModelState.LOADING, OperationStatus.RUNNING)
    fleet.do()
    assert (fleet.state("a"), operation.status) == (ModelState.WARM, OperationStatus.DONE)
    fleet.say(("a", 0))
    assert fleet.state("a") is ModelState.SERVING
    again = fleet.order("a", WantedState.LOAD)
    assert (again.status, again.progress) == (OperationStatus.DONE, "a is already serving")
    assert fleet.tick() == []


def test_sleep_and_unload_differ_in_where_they_end() -> None:
    fleet = Fleet(model("a"))
    for wanted, state in (
        (WantedState.SLEEP, ModelState.SLEEPING),
        (WantedState.UNLOAD, ModelState.STAGED),
    ):
        fleet.order("a", WantedState.LOAD)
        fleet.settle()
        fleet.order("a", wanted)
        fleet.tick()
        assert fleet.state("a") is ModelState.DRAINING
        fleet.do()
        assert fleet.state("a") is state
    fleet.order("a", WantedState.SLEEP)
    assert fleet.tick() == []
    assert fleet.state("a") is ModelState.STAGED


def test_an_order_during_another_one_comes_after_it_and_the_last_one_counts() -> None:
    fleet = Fleet(model("a"))
    load = fleet.order("a", WantedState.LOAD)
    fleet.tick()
    sleep = fleet.order("a", WantedState.SLEEP)
    unload = fleet.order("a", WantedState.UNLOAD)
    assert (sleep.status, sleep.progress) == (
        OperationStatus.FAILED,
        "replaced by a later unload",
    )
    fleet.settle()
    assert (load.status, unload.status) == (OperationStatus.DONE, OperationStatus.DONE)
    assert fleet.state("a") is ModelState.STAGED


def test_a_failed_load_leaves_nothing_running_and_requests_do_not_repeat_it_at_once() -> None:
    fleet = Fleet(model("a"))
    operation = fleet.order("a", WantedState.LOAD)
    fleet.tick()
    fleet.do("config.json is missing")
    assert (operation.status, operation.progress) == (
        OperationStatus.FAILED,
        "config.json is missing",
    )
    assert [step.is_start for step in fleet.tick()] == [False]
    fleet.do()
    assert fleet.state("a") is ModelState.SLEEPING
    fleet.control.wake("a", fleet.now, fleet.now)
    assert fleet.tick() == []
    assert fleet.control.outlook.news(fleet.now)[0].predicted_ready_s is None
    fleet.now += 10.0
    fleet.control.wake("a", fleet.now, fleet.now)
    assert [step.is_start for step in fleet.tick()] == [True]


def test_workers_that_could_not_be_ended_are_told_of_as_they_are() -> None:
    fleet = Fleet(model("a"))
    fleet.order("a", WantedState.LOAD)
    fleet.settle()
    operation = fleet.order("a", WantedState.SLEEP)
    fleet.tick()
    fleet.do("the fleet is restarting")
    assert operation.status is OperationStatus.FAILED
    fleet.see("a", is_there=True)
    assert fleet.state("a") is ModelState.WARM


def test_workers_start_and_die_without_an_operation() -> None:
    fleet = Fleet(model("a"))
    seen = []
    for is_there, is_ready in ((True, False), (True, True), (True, False), (True, True)):
        fleet.tick()
        fleet.see("a", is_there=is_there, is_ready=is_ready)
        seen.append(fleet.state("a"))
    assert seen == [ModelState.LOADING, ModelState.WARM] * 2
    fleet.tick()
    fleet.see("a", is_there=False, is_ready=False)
    fleet.settle()
    assert fleet.state("a") is ModelState.SLEEPING
    fleet.control.wake("a", fleet.now, fleet.now)
    assert fleet.tick() == []


def test_a_version_that_is_being_replaced_keeps_its_memory() -> None:
    fleet = Fleet(model("a", keep_alive_s=1.0), model("b"), budget=60)
    fleet.order("a", WantedState.LOAD)
    fleet.settle()
    fleet.control.models["a"].is_kept = True
    with pytest.raises(NoRoom, match="b takes 40 B and does not fit"):
        fleet.order("b", WantedState.LOAD)
    fleet.tick(after_s=100.0)
    assert fleet.state("a") is not ModelState.DRAINING
    fleet.control.models["a"].is_kept = False
    fleet.tick()
    assert fleet.state("a") is ModelState.DRAINING


def test_a_version_on_the_workers_of_another_one_is_as_ready_and_keeps_it_loaded() -> None:
    lent = model("chat-2", workers_of="chat", keep_alive_s=1.0)
    fleet = Fleet(model("chat", keep_alive_s=60.0), lent, sizes={"chat-2": 0})
    states = {news.name: news.state for news in fleet.control.outlook.news(fleet.now)}
    assert states == dict.fromkeys(("chat", "chat-2"), ModelState.STAGED)
    fleet.control.wake(owner_of(fleet.control.models, "chat-2"), fleet.now, fleet.now)
    fleet.settle()
    assert fleet.state("chat") in RUNNING
    for _ in range(4):
        fleet.now += 50.0
        used = (ModelActivity("chat", 0, 0, None, True), ModelActivity("chat-2", 0, 0, 0.0, True))
        fleet.control.note_activity(Activity("server", used), fleet.now)
        fleet.settle()
        assert fleet.state("chat") in RUNNING
    fleet.now += 70.0
    fleet.settle()
    assert fleet.state("chat") not in RUNNING
    assert fleet.state("chat-2") in RUNNING, "it has no workers that could end"


def test_what_does_not_fit_is_refused_with_figures_and_a_remedy() -> None:
    fleet = Fleet(model("a", pinned=True), model("b"), budget=60)
    fleet.order("a", WantedState.LOAD)
    fleet.settle()
    with pytest.raises(
        NoRoom,
        match=r"b takes 40 B and does not fit: the budget is 60 B, of which a \(pinned, or "
        r"replaced only once it is ready\) hold 40 B; raise control.memory_bytes",
    ):
        fleet.order("b", WantedState.LOAD)
    assert fleet.control.outlook.news(fleet.now)[1].predicted_ready_s is None
    fleet.control.wake("b", fleet.now, fleet.now)
    assert fleet.tick() == []
    with pytest.raises(UnknownModel, match="no model is called 'c'; this fleet has a, b"):
        fleet.order("c", WantedState.LOAD)


def test_files_that_are_gone_are_named() -> None:
    fleet = Fleet(model("a"))
    fleet.control.note_files("a", are_there=False, now=fleet.now)
    with pytest.raises(NoRoom, match="the files of a are missing from /models/a"):
        fleet.order("a", WantedState.LOAD)
    assert fleet.order("a", WantedState.UNLOAD).status is OperationStatus.DONE
    fleet.control.note_files("a", are_there=True, now=fleet.now)
    fleet.order("a", WantedState.LOAD)
    assert len(fleet.tick()) == 1


def test_a_wake_evicts_an_idle_model_once_it_was_resident_for_a_minute() -> None:
    fleet = Fleet(model("a"), model("b"), budget=60)
    fleet.control.wake("a", fleet.now, fleet.now)
    fleet.settle()
    fleet.say(("a", 1))
    fleet.control.wake("b", fleet.now, fleet.now)
    assert fleet.tick() == []
    b = fleet.control.models["b"].waiting
    assert b is not None
    assert b.progress == "waiting for memory of a"
    predicted_s = fleet.control.outlook.news(fleet.now)[1].predicted_ready_s
    assert predicted_s is not None
    assert 55 < predicted_s < 65
    for _ in range(80):
        fleet.say(("a", 1))
        assert fleet.tick(1.0) == []
    fleet.say(("a", 0))
    (stop,) = fleet.tick()
    assert (stop.operation.model, stop.operation.actor) == ("a", "memory")
    fleet.do()
    (start,) = fleet.tick()
    assert (start.operation, start.is_start) == (b, True)
    fleet.do()
    assert fleet.state("a") is ModelState.SLEEPING


def seconds_to_load_beside_three_smaller_ones(turn_after_s: float) -> float | None:
    """Return when a wanted model of size 80 runs, while three models of size 40 take turns: one
    starts every 35 s and has requests for 70 s. Two of them fit, and never are two idle."""
    small = ["s0", "s1", "s2"]
    fleet = Fleet(
        *map(model, small), model("large"), sizes={"large": 80}, turn_after_s=turn_after_s
    )
    busy_until = dict.fromkeys(small, 0.0)
    for second in range(1000):
        if second % 35 == 0:
            name = small[second // 35 % 3]
            busy_until[name] = second + 70
        if second == 200:
            wanted = fleet.order("large", WantedState.LOAD)
        is_busy = {name: second < until for name, until in busy_until.items()}
        for name in small:
            if is_busy[name] and fleet.state(name) in RESTING:
                fleet.control.wake(name, fleet.now, fleet.now)
        fleet.say(*((name, int(is_busy[name])) for name in small), ("large", 0))
        fleet.tick(1.0)
        while fleet.steps:
            fleet.do()
        if second > 200 and wanted.status is OperationStatus.DONE:
            return second - 200
    return None


def test_a_large_load_comes_before_younger_ones_once_it_has_waited() -> None:
    assert seconds_to_load_beside_three_smaller_ones(turn_after_s=1e6) is None
    took_s = seconds_to_load_beside_three_smaller_ones(turn_after_s=30.0)
    assert took_s is not None
    assert 30 < took_s <= 30 + 70 + 10


def test_a_turn_ends_where_a_model_in_the_way_is_never_idle() -> None:
    fleet = Fleet(model("busy"), model("s"), model("large"), sizes={"large": 80})
    fleet.order("busy", WantedState.LOAD)
    fleet.settle()
    fleet.say(("busy", 1))
    large = fleet.order("large", WantedState.LOAD)
    fleet.tick(31.0)
    younger = fleet.order("s", WantedState.LOAD)
    assert fleet.tick() == []
    assert younger.progress == "waiting for memory of large"
    predicted = {one.name: one.predicted_ready_s for one in fleet.control.outlook.news(fleet.now)}
    assert (predicted["s"] or 0.0) > 60.0, "the large one is to be loaded first"
    for _ in range(9):
        fleet.say(("busy", 1))
        assert younger.status is OperationStatus.WAITING
        fleet.tick(10.0)
    fleet.settle()
    assert (large.status, younger.status) == (OperationStatus.WAITING, OperationStatus.DONE)


def test_a_load_that_a_never_idle_model_keeps_out_ends_no_idle_one() -> None:
    fleet = Fleet(model("busy"), model("s"), model("large"), sizes={"large": 80})
    for name in ("busy", "s"):
        fleet.order(name, WantedState.LOAD)
        fleet.settle()
    for _ in range(100):
        fleet.say(("busy", 1), ("s", 0))
        fleet.tick(1.0)
    large = fleet.order("large", WantedState.LOAD)
    for _ in range(130):
        fleet.say(("busy", 1), ("s", 0))
        assert fleet.tick(1.0) == []
    assert (large.status, fleet.state("s")) == (OperationStatus.WAITING, ModelState.SERVING)
    fleet.say(("busy", 0), ("s", 0))
    ended = {step.operation.model for step in fleet.tick()}
    assert ended == {"busy", "s"}, "both at once, when that is enough"


def test_a_gpu_is_shared_within_its_budget_and_gives_no_pool_to_this_machine() -> None:
    models = [model(name, pool_bytes=30) for name in ("a", "b")]
    fleet = Fleet(*models, budget=1000)
    for name in ("a", "b"):
        fleet.order(name, WantedState.LOAD)
        fleet.settle()
        fleet.see_on_gpu(name, "GPU-1", 60)
        fleet.control.note_size(name, 20)
        assert fleet.control.models[name].size_bytes == 20, "without the pool, which is on the GPU"
    assert fleet.control.budgets == {HOST: 1000, "GPU-1": 95}
    fleet.say(("a", 0), ("b", 0))
    # Each fit when it started; together they exceed the budget.
    fleet.tick(60.0)
    fleet.settle()
    assert sorted(fleet.state(name) for name in "ab") == [ModelState.SERVING, ModelState.SLEEPING]
    (asleep,) = (name for name in "ab" if fleet.state(name) is ModelState.SLEEPING)
    (other,) = {"a", "b"} - {asleep}
    fleet.say((other, 1))
    waiting = fleet.order(asleep, WantedState.LOAD)
    fleet.tick(60.0)
    assert (waiting.status, waiting.progress) == (
        OperationStatus.WAITING,
        f"waiting for memory of {other}",
    )
    fleet.say((other, 0))
    fleet.settle()
    assert fleet.state(asleep) in RUNNING
    assert fleet.state(other) is ModelState.SLEEPING


def test_a_load_for_another_gpu_does_not_wait_for_the_one_that_comes_first() -> None:
    fleet = Fleet(*(model(name) for name in ("busy", "large", "other")), budget=1000)
    for name, gpu, num_bytes in (
        ("large", "GPU-1", 80),
        ("other", "GPU-2", 80),
        ("busy", "GPU-1", 60),
    ):
        fleet.order(name, WantedState.LOAD)
        fleet.settle()
        fleet.see_on_gpu(name, gpu, num_bytes)
        fleet.control.note_size(name, 20)
        fleet.say(("busy", 1))
        if name != "busy":
            fleet.order(name, WantedState.SLEEP)
            fleet.settle()
    large = fleet.order("large", WantedState.LOAD)
    fleet.tick(31.0)
    assert large.progress == "waiting for memory of busy"
    other = fleet.order("other", WantedState.LOAD)
    fleet.settle()
    assert (large.status, other.status) == (OperationStatus.WAITING, OperationStatus.DONE)


def test_a_model_too_large_for_its_gpu_is_refused_with_figures() -> None:
    fleet = Fleet(model("a"), budget=1000)
    fleet.order("a", WantedState.LOAD)
    fleet.settle()
    fleet.see_on_gpu("a", "GPU-1", 98)
    fleet.order("a", WantedState.SLEEP)
    fleet.settle()
    with pytest.raises(
        NoRoom, match=r"a takes 98 .* of the GPU GPU-1 .*budget is 95 .*gpu_memory_sh"
    ):
        fleet.order("a", WantedState.LOAD)


def test_keep_alive_ends_an_idle_model() -> None:
    fleet = Fleet(model("a", keep_alive_s=30.0), model("b", keep_alive_s=30.0, pinned=True))
    for name in "ab":
        fleet.order(name, WantedState.LOAD)
    fleet.settle()
    fleet.say(("a", 0), ("b", 0))
    assert fleet.tick(29.0) == []
    assert [(s.operation.model, s.is_start) for s in fleet.tick(2.0)] == [("a", False)]


def test_a_server_that_fell_silent_keeps_nothing() -> None:
    fleet = Fleet(model("a", keep_alive_s=30.0))
    fleet.order("a", WantedState.LOAD)
    fleet.settle()
    fleet.say(("a", 1), server="one")
    fleet.say(("a", 0), server="two")
    for _ in range(40):
        fleet.say(("a", 0), server="two")
        if fleet.tick(1.0):
            return
    pytest.fail("the requests of a server that is gone kept the model")


def test_what_runs_more_than_the_budget_is_made_smaller() -> None:
    fleet = Fleet(model("a"), model("b"))
    for name in "ab":
        fleet.order(name, WantedState.LOAD)
    fleet.settle()
    fleet.now += 100
    fleet.say(("a", 1), ("b", 0))
    fleet.control.note_size("a", 90)
    assert fleet.tick() == [], "the other one may be smaller than was guessed"
    fleet.control.note_size("b", 40)
    assert [s.operation.model for s in fleet.tick()] == ["b"]


def test_a_pool_counts_as_memory_before_its_blocks_are_used() -> None:
    fleet = Fleet(replace(model("a"), pool_bytes=30))
    fleet.order("a", WantedState.LOAD)
    fleet.settle()
    size = fleet.control.models["a"]
    for measured, counted in ((50, 80), (60, 80), (85, 85), (70, 85), (0, 85)):
        fleet.control.note_size("a", measured)
        assert size.size_bytes == counted
    fleet.order("a", WantedState.SLEEP)
    fleet.settle()
    fleet.order("a", WantedState.LOAD)
    fleet.settle()
    fleet.control.note_size("a", 40)
    assert size.size_bytes == 70, "these are other processes"


def test_load_times_are_measured_and_predicted() -> None:
    fleet = Fleet(model("a"))
    fleet.order("a", WantedState.LOAD)
    fleet.tick()
    fleet.now += 7.0
    (news,) = fleet.control.outlook.news(fleet.now)
    assert news.predicted_ready_s == 0.0  # longer than the guess
    fleet.do()
    fleet.order("a", WantedState.UNLOAD)
    fleet.settle()
    (news,) = fleet.control.outlook.news(fleet.now)
    assert news.predicted_ready_s == pytest.approx(7.0)


def test_operations_of_an_earlier_process_are_taken_up() -> None:
    half = [
        Operation("1", "a", WantedState.LOAD, "user:me", 0.0, OperationStatus.RUNNING),
        Operation("2", "b", WantedState.SLEEP, "memory", 0.0, OperationStatus.RUNNING),
        Operation("3", "b", WantedState.LOAD, "request", 0.0, OperationStatus.WAITING),
        Operation("4", "gone", WantedState.LOAD, "request", 0.0, OperationStatus.WAITING),
        Operation("5", "c", WantedState.UNLOAD, "user:me", 0.0, OperationStatus.RUNNING),
    ]
    past = Past({"b": ModelState.DRAINING, "c": ModelState.SERVING}, {"a": 50}, {}, half)
    fleet = Fleet(*map(model, "abc"), past=past, budget=200)
    fleet.see("b", is_there=True)
    fleet.see("c", is_there=True)
    assert fleet.control.models["a"].size_bytes == 50
    fleet.settle()
    assert [one.status for one in half] == [
        OperationStatus.DONE,
        OperationStatus.FAILED,
        OperationStatus.DONE,
        OperationStatus.FAILED,
        OperationStatus.DONE,
    ]
    assert fleet.state("a") in RUNNING
    assert fleet.state("b") in RUNNING
    assert fleet.state("c") is ModelState.STAGED
    assert set(fleet.control.changed) == {"1", "2", "3", "4", "5"}


NAMES = "abcd"
MOVES = st.one_of(
    st.tuples(st.just("wake"), st.sampled_from(NAMES)),
    st.tuples(st.just("load"), st.sampled_from(NAMES)),
    st.tuples(st.just("sleep"), st.sampled_from(NAMES)),
    st.tuples(st.just("unload"), st.sampled_from(NAMES)),
    st.tuples(st.just("busy"), st.sampled_from(NAMES)),
    st.tuples(st.just("idle"), st.sampled_from(NAMES)),
    st.tuples(st.just("done"), st.sampled_from(["", "", "", "it failed"])),
    st.tuples(st.just("time"), st.sampled_from([0.1, 1.0, 30.0, 61.0])),
)


def check_steps(fleet: Fleet, steps: list[ControlStep], busy: set[str]) -> None:
    """Check invariants of the decisions in one tick."""
    control = fleet.control
    for step in steps:
        chosen = control.models[step.operation.model]
        if step.operation.actor in ("memory", "keep-alive"):
            assert step.operation.model not in busy
            assert not chosen.config.pinned
        if step.operation.actor == "memory":
            assert fleet.now - chosen.since >= 60.0
    if any(step.is_start for step in steps):
        held = sum(one.size_bytes for one in control.models.values() if one.state in HOLDING)
        assert held <= control.budgets[HOST]


@settings(max_examples=60)
@given(st.lists(MOVES, max_size=40), st.integers(60, 130))
def test_whatever_happens_the_budget_holds_and_every_wanted_model_runs_in_the_end(
    moves: list[tuple[str, object]], budget: int
) -> None:
    sizes = {"a": 10, "b": 20, "c": 40, "d": 50}
    fleet = Fleet(
        *(model(n, pinned=n == "a", keep_alive_s=90.0 if n == "b" else None) for n in NAMES),
        budget=budget,
        sizes=sizes,
    )
    busy: set[str] = set()
    wanted: list[Operation] = []
    for move, what in moves:
        match move, what:
            case "wake", str(name):
                fleet.control.wake(name, fleet.now, fleet.now)
            case (("load" | "sleep" | "unload"), str(name)):
                wanted.append(fleet.order(name, WantedState(move)))
            case "busy", str(name):
                busy.add(name)
            case "idle", str(name):
                busy.discard(name)
            case "done", str(failure) if fleet.steps:
                fleet.do(failure or None)
        fleet.now += what if isinstance(what, float) else 0.1
        fleet.say(*((name, int(name in busy)) for name in NAMES))
        check_steps(fleet, fleet.tick(0.0), busy)
    for _ in range(15):
        fleet.now += 61.0
        fleet.say(*((name, 0) for name in NAMES))
        check_steps(fleet, fleet.tick(0.0), set())
        while fleet.steps:
            fleet.do()
    assert all(operation.is_over for operation in wanted)
    assert all(one.live is None for one in fleet.control.models.values())
    last = {operation.model: operation for operation in wanted}
    assert not [one for one in last.values() if "no room" in one.progress]

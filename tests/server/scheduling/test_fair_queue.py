"""Tests of the fair queue against a slow reference model, and of its properties for tenants and
classes."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count, repeat
from typing import TYPE_CHECKING, TypeVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.scheduling.queue import UNKNOWN_TOKENS, FairQueue, QueuePlace
from triolet.config import QueueConfig
from triolet.service_class import Scheduling, ServiceClass

from .slow_queue import SlowQueue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

EXPECTED = 10
CONFIG = QueueConfig(
    expected_completion_tokens=EXPECTED, completion_memory=0.0, head_start_tokens=0
)
ORDERS = count(1)
K = TypeVar("K")
CLAIMS = [
    Scheduling("a", weight=1.0),
    Scheduling("a", weight=1.0, service_class=ServiceClass.CRITICAL),
    Scheduling("b", weight=2.0, max_running=2),
    Scheduling("b", weight=2.0, service_class=ServiceClass.BATCH, max_running=2),
    Scheduling("c", weight=4.0, kv_share=0.25),
    Scheduling("d", weight=0.5, service_class=ServiceClass.SHEDDABLE),
]


def place(
    scheduling: Scheduling,
    prompt_tokens: int = 10,
    max_tokens: int = 10,
    priority: int = 0,
    due: float = 9.0,
) -> QueuePlace:
    return QueuePlace(scheduling, priority, due, next(ORDERS), prompt_tokens, max_tokens)


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 120), head_start=st.sampled_from((0, 60)))
def test_it_is_the_slow_obvious_queue(seed: int, steps: int, head_start: int) -> None:
    rng = random.Random(seed)
    config = replace(CONFIG, min_class_share=0.0, head_start_tokens=head_start)
    queue: FairQueue[int] = FairQueue(config)
    slow = SlowQueue(EXPECTED)
    for name in range(steps):
        kind = rng.random()
        running = [one.name for one in slow.all.values() if one.is_running]
        waiting = [one.name for one in slow.all.values() if not one.is_running]
        if kind < 0.4:
            new = QueuePlace(
                rng.choice(CLAIMS),
                rng.choice((-1, 0, 0, 0, 1)),
                float(rng.randrange(3)),
                name,
                rng.randrange(1, 40),
                rng.randrange(1, 20),
            )
            assert_ahead(queue, slow, new)
            queue.add(name, new)
            slow.add(name, new)
        elif kind < 0.65:
            turn = queue.first()
            if not head_start:  # a head start changes the choice, but never whether there is one
                assert ({turn} if turn is not None else set()) <= slow.turns(), (turn, slow)
            assert (turn is None) == (not slow.turns()), slow
            if turn is not None:
                queue.take(turn)
                slow.take(turn)
        elif kind < 0.75 and running:
            name = rng.choice(running)
            queue.give_back(name)
            slow.give_back(name)
        elif kind < 0.95 and slow.all:
            name = rng.choice(running or waiting)
            queue.end(name, used := rng.randrange(30))
            slow.end(name, used)
        elif waiting:
            # A request that is set aside returns to its old place.
            queue.set_aside(rng.choice(waiting))
            queue.restore()
        else:
            slow.kv_tokens = rng.randrange(200)
            queue.note_pools(slow.kv_tokens, 0)
        assert len(queue) == sum(not one.is_running for one in slow.all.values())
        assert queue.num_running == sum(one.is_running for one in slow.all.values())
    assert_nothing_is_left(queue, slow)


def assert_ahead(queue: FairQueue[int], slow: SlowQueue, new: QueuePlace) -> None:
    ahead = queue.tokens_ahead(new._replace(prompt_tokens=0, max_tokens=UNKNOWN_TOKENS))
    all_of_class = sum(
        one.place.prompt_tokens
        for one in slow.all.values()
        if not one.is_running and one.place.scheduling.service_class <= new.scheduling.service_class
    )
    assert slow.tokens_ahead(new) <= ahead <= all_of_class


def assert_nothing_is_left(queue: FairQueue[int], slow: SlowQueue) -> None:
    for name in list(slow.all):
        queue.end(name, 0)
    assert (len(queue), queue.num_running, queue.num_tenants) == (0, 0, 0)
    for line in queue.classes:
        assert (line.num_waiting, line.num_running, line.aging_credit) == (0, 0, 0.0)
        assert line.ready_tokens() == 0
        assert not line.is_waiting


def next_turn(queue: FairQueue[K]) -> K:
    """Take the next request. The queue conserves work: if one waits, one runs."""
    turn = queue.first()
    assert turn is not None
    queue.take(turn)
    return turn


def all_turns(queue: FairQueue[K], until: K | None = None) -> list[K]:
    """Take requests while any may run, up to this one; return their keys."""
    turns = []
    while queue.first() not in (None, until):
        turns.append(next_turn(queue))
    return turns


def served(
    queue: FairQueue[int], sizes: Mapping[Scheduling, Iterator[tuple[int, int]]], num_turns: int
) -> dict[Scheduling, int]:
    """Keep all tenants waiting, take turns, and return the tokens used by each."""
    names = count()
    asked: dict[int, tuple[Scheduling, int, int]] = {}
    used = dict.fromkeys(sizes, 0)

    def come(scheduling: Scheduling) -> None:
        prompt_tokens, completion_tokens = next(sizes[scheduling])
        asked[name := next(names)] = (scheduling, prompt_tokens, completion_tokens)
        queue.add(name, place(scheduling, prompt_tokens, max_tokens=1000))

    for scheduling in sizes:
        for _ in range(4):
            come(scheduling)
    running: list[int] = []
    for _ in range(num_turns):
        turn = next_turn(queue)
        running.append(turn)
        if len(running) > 3:
            over = running.pop(0)
            scheduling, prompt_tokens, completion_tokens = asked[over]
            used[scheduling] += prompt_tokens + completion_tokens
            queue.end(over, completion_tokens)
        come(asked[turn][0])
    return used


def drawn(rng: random.Random, most: int) -> Iterator[tuple[int, int]]:
    while True:
        yield rng.randint(1, most), rng.randint(1, 200)


def test_without_tenants_flows_have_equal_shares_whatever_they_ask_for() -> None:
    asks = {"": (10, 90), "heavy": (400, 100), "light": (20, 5)}
    sizes = {Scheduling(flow=flow): repeat(ask) for flow, ask in asks.items()}
    shares = served(FairQueue(QueueConfig()), sizes, 1500).values()
    assert max(shares) < 1.2 * min(shares)


def test_flows_of_a_tenant_take_nothing_from_another() -> None:
    sizes = {Scheduling("a", flow=flow): repeat((50, 50)) for flow in "xyz"}
    sizes[other := Scheduling("b")] = repeat((50, 50))
    used = served(FairQueue(QueueConfig()), sizes, 600)
    assert used[other] == pytest.approx(sum(used.values()) / 2, rel=0.1)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_tenants_have_their_shares_by_weight_whatever_they_ask_for(seed: int) -> None:
    rng = random.Random(seed)
    weights = (1.0, 2.0, 4.0)
    schedulings = [Scheduling(f"weighs {weight}", weight) for weight in weights]
    sizes = {scheduling: drawn(rng, rng.choice((10, 100, 400))) for scheduling in schedulings}
    used = served(FairQueue(QueueConfig()), sizes, 1500)
    shares = [used[scheduling] / scheduling.weight for scheduling in schedulings]
    # Running requests are charged but not used up, and each may be ahead by one largest request.
    assert max(shares) - min(shares) <= 5 * 600


def test_weights_of_1_2_4_give_shares_within_5_percent_in_the_long_run() -> None:
    rng = random.Random(7)
    schedulings = [Scheduling(f"weighs {weight}", weight) for weight in (1.0, 2.0, 4.0)]
    used = served(FairQueue(QueueConfig()), {c: drawn(rng, 300) for c in schedulings}, 4000)
    total = sum(used.values())
    for scheduling in schedulings:
        assert used[scheduling] / total == pytest.approx(scheduling.weight / 7, rel=0.05)


def test_equal_weights_are_even_by_jains_index() -> None:
    rng = random.Random(8)
    schedulings = [Scheduling(f"tenant {number}") for number in range(10)]
    sizes = {scheduling: drawn(rng, 40 * (1 + at)) for at, scheduling in enumerate(schedulings)}
    used = served(FairQueue(QueueConfig()), sizes, 4000).values()
    assert sum(used) ** 2 / (len(used) * sum(one**2 for one in used)) >= 0.99


@pytest.mark.parametrize(
    "below", [ServiceClass.DEFAULT, ServiceClass.SHEDDABLE, ServiceClass.BATCH]
)
def test_a_lower_class_never_starves(below: ServiceClass) -> None:
    rng = random.Random(9)
    flood = Scheduling("flood", service_class=ServiceClass.CRITICAL)
    low = Scheduling("low", service_class=below)
    used = served(FairQueue(QueueConfig()), {flood: drawn(rng, 50), low: drawn(rng, 50)}, 3000)
    share = used[low] / sum(used.values())
    assert QueueConfig().min_class_share * 0.8 < share < QueueConfig().min_class_share * 1.3


def test_three_lower_classes_have_what_they_are_promised_at_once() -> None:
    rng = random.Random(10)
    schedulings = [Scheduling("all", service_class=service_class) for service_class in ServiceClass]
    used = served(FairQueue(QueueConfig()), {c: drawn(rng, 50) for c in schedulings}, 4000)
    for scheduling in schedulings[1:]:
        assert used[scheduling] > 0.8 * QueueConfig().min_class_share * used[schedulings[0]]
    assert used[schedulings[0]] > 0.8 * sum(used.values())


def test_who_idled_has_saved_nothing() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    busy, idle = Scheduling("busy"), Scheduling("idle")
    for number in range(50):
        queue.add(f"busy {number}", place(busy, 100))
        queue.take(f"busy {number}")
        queue.end(f"busy {number}", 10)
    for number in range(20):
        queue.add(f"now busy {number}", place(busy, 100))
        queue.add(f"now idle {number}", place(idle, 100))
    turns = []
    for _ in range(20):
        turn = next_turn(queue)
        turns.append("busy" in turn)
    assert 8 <= sum(turns) <= 12


def test_who_comes_alone_in_the_midst_of_a_flood_is_next() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    for number in range(1000):
        queue.add(f"flood {number}", place(Scheduling("flood")))
        if number % 3 == 0:
            queue.take(f"flood {number}")
    quiet = Scheduling("quiet")
    assert queue.tokens_ahead(place(quiet)) <= 10
    queue.add("quiet", place(quiet))
    turns = []
    while "quiet" not in turns:
        turn = next_turn(queue)
        turns.append(turn)
    assert len(turns) <= 2


def test_of_a_tenant_its_priority_then_who_is_due_then_who_came_first() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    scheduling = Scheduling("one")
    for name, priority, due in (
        ("late", 0, 9.0),
        ("soon", 0, 1.0),
        ("later", 0, 9.0),
        ("urgent", -1, 50.0),
        ("patient", 3, 0.0),
    ):
        queue.add(name, place(scheduling, priority=priority, due=due))
    turns = all_turns(queue)
    assert turns == ["urgent", "soon", "late", "later", "patient"]


def test_a_tenant_with_all_that_it_may_have_is_skipped_until_it_gives_back() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    full, other = Scheduling("full", max_running=1), Scheduling("other")
    for name in ("full 1", "full 2"):
        queue.add(name, place(full))
    queue.take("full 1")
    assert queue.first() is None
    queue.add("other", place(other))
    assert queue.first() == "other"
    queue.take("other")
    assert queue.first() is None
    queue.end("full 1", 5)
    assert queue.first() == "full 2"


def test_a_share_of_kv_is_kept_but_never_refuses_the_only_one() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    queue.note_pools(1000, 0)
    scheduling = Scheduling("a", kv_share=0.1)
    queue.add("large", place(scheduling, 500))
    assert queue.first() == "large"
    queue.take("large")
    queue.add("small", place(scheduling, 1))
    assert queue.first() is None
    queue.note_pools(100_000, 0)
    assert queue.first() == "small"


def test_who_starts_again_keeps_its_place_and_pays_once() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    a, b = Scheduling("a"), Scheduling("b")
    queue.add("a 1", place(a))
    queue.take("a 1")
    for number in range(2, 6):
        queue.add(f"a {number}", place(a))
        queue.add(f"b {number}", place(b))
    queue.give_back("a 1")
    assert queue.first() == "a 1"
    queue.take("a 1")
    turns = []
    for _ in range(8):
        turn = next_turn(queue)
        turns.append(turn[0])
    assert sorted(turns[:4]) == ["a", "a", "b", "b"] or turns[:3].count("b") == 2


def test_a_paused_class_has_no_turn_and_holds_up_nobody() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    queue.add("batch", place(Scheduling("a", service_class=ServiceClass.BATCH)))
    queue.add("default", place(Scheduling("a")))
    queue.pause({ServiceClass.DEFAULT})
    assert queue.first() == "batch"
    queue.pause({ServiceClass.BATCH})
    assert queue.first() == "default"
    queue.take("default")
    assert queue.first() is None
    queue.pause(())
    assert queue.first() == "batch"


def test_without_fairness_rank_and_arrival_decide() -> None:
    queue: FairQueue[str] = FairQueue(QueueConfig(fair=False))
    batch, default = (
        Scheduling("a", service_class=ServiceClass.BATCH),
        Scheduling("b", max_running=1),
    )
    queue.add("batch", place(batch))
    for number in range(3):
        queue.add(f"a {number}", place(Scheduling("a"), due=9.0 - number))
        queue.add(f"b {number}", place(default, 1, due=9.0 - number))
    turns = all_turns(queue)
    assert turns == ["a 0", "b 0", "a 1", "b 1", "a 2", "b 2", "batch"]


def test_what_is_ahead_is_what_will_go_first() -> None:
    rng = random.Random(11)
    for _ in range(30):
        queue: FairQueue[int] = FairQueue(CONFIG)
        schedulings = [Scheduling(f"t{number}", rng.choice((1.0, 2.0))) for number in range(6)]
        largest = 60
        tokens = {}
        for name in range(rng.randrange(10, 200)):
            skewed = schedulings[min(int(rng.expovariate(1.0)), 5)]
            tokens[name] = rng.randrange(1, largest)
            queue.add(name, place(skewed, tokens[name], max_tokens=0))
        newcomer = rng.choice(schedulings)
        predicted = queue.tokens_ahead(place(newcomer, 0, UNKNOWN_TOKENS))
        queue.add(-1, place(newcomer, 5, max_tokens=0))
        truth = 0
        while queue.first() != -1:
            truth += tokens[next_turn(queue)]
        # One request of each tenant may be running, and one group counts up to twice.
        assert (
            truth - len(schedulings) * largest
            <= predicted
            <= 2 * truth + len(schedulings) * largest
        )


def test_many_tenants_leave_nothing_behind() -> None:
    queue: FairQueue[int] = FairQueue(CONFIG)
    for name in range(5000):
        queue.add(name, place(Scheduling(f"tenant {name}")))
        queue.take(name)
        queue.end(name, 3)
    assert queue.num_tenants == 0
    assert sum(len(line) for line in queue.classes) == 0


def test_tenants_that_come_once_beside_others_are_forgotten() -> None:
    queue: FairQueue[int] = FairQueue(CONFIG)
    queue.add(-1, place(Scheduling("always")))
    for name in range(1000):
        queue.add(name, place(Scheduling(f"tenant {name}")))
        for _ in range(2):
            turn = next_turn(queue)
            if turn < 0:
                queue.end(turn, 10)
                queue.add(turn, place(Scheduling("always")))
            else:
                queue.end(turn, 10)
    assert queue.num_tenants <= 3
    assert len(queue.classes[ServiceClass.DEFAULT]) <= 4


@pytest.mark.parametrize(
    "wrong",
    [{"min_class_share": 1.5}, {"completion_memory": -0.1}, {"expected_completion_tokens": 0}],
)
def test_settings_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(msgspec.ValidationError, match=next(iter(wrong))):
        msgspec.convert(wrong, QueueConfig)

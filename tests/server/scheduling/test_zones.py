"""Tests of zones: pairs that keep KV in a zone, and zones that fall silent and return."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from server.scheduling.routing import Need, choose_pair, choose_route
from server.scheduling.status import Observer
from server.scheduling.workers import BrokenPaths, PrefixChain
from triolet.config import LocalPrefill, RecoveryConfig, RoutingConfig
from triolet.ids import AttemptKey
from triolet.service_class import Placement, Scheduling

from .fakes import BLOCK_SIZE, FakeDecode, FakePrefill, make_request
from .test_dispatch import world_of

if TYPE_CHECKING:
    from server.scheduling.workers import Worker

    from .world import World

KEY = AttemptKey(b"x" * 16, 0)
PENALTY_S = 0.5
TEN = Need(10, 10, cross_zone_s=PENALTY_S)
RATE = 1000.0
"""Prompt tokens per second of every prefill worker, so that the penalty is 500 tokens."""


def prefill(name: str, zone: str = "", **values: float) -> FakePrefill:
    values = {"prompt_tokens_per_s": RATE, "token_credit": 10_000, **values}
    return FakePrefill(name, labels={"zone": zone} if zone else {}, **values)  # type: ignore[arg-type]


def decode(name: str, zone: str = "", **values: int) -> FakeDecode:
    return FakeDecode(name, labels={"zone": zone} if zone else {}, **values)  # type: ignore[arg-type]


def chosen(world: World, need: Need = TEN) -> tuple[str, str]:
    pair = choose_pair(world.workers, need, BrokenPaths(RecoveryConfig()), world.now)
    assert pair is not None
    return world.of[pair.decode].name, world.of[pair.prefill].name


@pytest.mark.parametrize(
    ("waiting_tokens", "expected"),
    [(PENALTY_S * RATE, "p-near"), (PENALTY_S * RATE + 1, "p-far")],
)
def test_kv_stays_in_the_zone_unless_the_wait_there_is_longer_than_the_penalty(
    waiting_tokens: float, expected: str
) -> None:
    world = world_of(prefill("p-far", "b"), prefill("p-near", "a"), decode("d0", "a"))
    world.workers[1].reserve(KEY, num_tokens=int(waiting_tokens))
    assert chosen(world) == ("d0", expected)


def test_a_zone_is_preferred_where_no_rate_is_known() -> None:
    quiet = {"prompt_tokens_per_s": 0.0}
    world = world_of(
        prefill("p0-far", "b", **quiet), prefill("p1-near", "a", **quiet), decode("d0", "a")
    )
    assert chosen(world) == ("d0", "p1-near")


def test_a_pair_in_one_zone_is_better_than_the_best_decode_worker_across_zones() -> None:
    world = world_of(prefill("p0", "b"), decode("d-best", "a"), decode("d1", "b", num_blocks=500))
    assert chosen(world) == ("d1", "p0")
    alone = world_of(prefill("p0", "b"), decode("d-best", "a"))
    assert chosen(alone) == ("d-best", "p0"), "a pair across zones is better than none"


def test_a_zone_does_not_outweigh_a_prefix_that_decode_holds() -> None:
    world = world_of(prefill("p0", "b"), decode("d-warm", "a"), decode("d1", "b"))
    warm = world.workers[1]
    chain = PrefixChain(range(100 * BLOCK_SIZE), b"")
    warm.prefixes.keep(chain, warm.capacity)
    need = Need(100 * BLOCK_SIZE, 100 * BLOCK_SIZE, chain=chain, cross_zone_s=PENALTY_S)
    assert chosen(world, need) == ("d-warm", "p0")


def test_workers_without_a_zone_are_one_zone() -> None:
    world = world_of(prefill("p0", "a"), prefill("p1"), decode("d0"))
    assert chosen(world) == ("d0", "p1")


def test_a_server_prefers_its_own_zone_among_decode_workers_with_equal_streams() -> None:
    world = world_of(prefill("p0"), decode("d0", "a", num_blocks=900), decode("d1", "b"))
    need = TEN._replace(home_zone="a")
    assert (chosen(world), chosen(world, need)) == (("d1", "p0"), ("d0", "p0"))
    world.workers[1].reserve(KEY)
    assert chosen(world, need) == ("d1", "p0"), "streams count more"


def test_decode_computes_more_itself_if_kv_would_move_to_another_zone() -> None:
    config = RoutingConfig(LocalPrefill.AUTO)
    local_tokens = []
    for zone in ("a", "b"):
        world = world_of(prefill("p0", zone), decode("d0", "a"))
        worker = world.workers[1]
        assert worker.beat is not None
        load = replace(worker.load, prompt_tokens_per_s=RATE / 2, step_s=0.01, chunk_tokens=64)
        worker.heartbeat(replace(worker.beat, load=load), world.now)
        paths = BrokenPaths(RecoveryConfig())
        route = choose_route(world.workers, Need(200, 200), paths, config, 0.0, world.now)
        assert route is not None
        local_tokens.append(route.local_tokens)
    assert local_tokens[0] < local_tokens[1]


RECOVERY = RecoveryConfig()


def two_zones(*zones: str) -> World:
    """Return a world with a worker of each role in each zone."""
    zones = zones or ("a", "b")
    return world_of(
        *(prefill(f"p-{zone}", zone) for zone in zones),
        *(decode(f"d-{zone}", zone) for zone in zones),
    )


def workers_of(world: World, zone: str) -> list[Worker]:
    return [worker for worker in world.workers if world.of[worker].name[2:] == zone]


def silence(world: World, zone: str, cause: str = "silent", seconds: float = 2.0) -> None:
    """Lose a zone's workers, and let time pass."""
    for worker in workers_of(world, zone):
        world.lose(worker, cause)
    world.sweep(seconds)


def shares(world: World, zone: str) -> set[float]:
    return {round(worker.breaker.share, 9) for worker in workers_of(world, zone)}


def return_(world: World, zone: str) -> None:
    for worker in workers_of(world, zone):
        world.greet(worker)
    world.sweep()


def test_a_zone_that_returns_gets_more_work_step_by_step() -> None:
    world = two_zones()
    silence(world, "a", seconds=1.9)
    assert shares(world, "a") == {1.0}, "not silent for long enough"
    assert world.requests.recovery.lost_zones == set()
    world.sweep(0.1)
    assert world.requests.recovery.lost_zones == {"a"}
    return_(world, "a")
    seen = []
    for _ in range(10):
        seen += shares(world, "a")
        assert bool(world.requests.recovery.lost_zones) is (seen[-1] < 1.0)
        world.sweep(RECOVERY.zone_return_s)
    assert seen == [pytest.approx(n / 10) for n in range(1, 11)]
    assert shares(world, "b") == {1.0}


def test_a_lost_zone_whose_workers_leave_or_have_another_version_is_not_lost() -> None:
    for change in ("leave", "upgrade"):
        world = two_zones()
        silence(world, "a")
        assert world.requests.recovery.lost_zones == {"a"}
        for worker in workers_of(world, "a"):
            if change == "leave":
                worker.is_leaving = True
            else:
                world.of[worker].fingerprint = "another"
                world.greet(worker)
        world.sweep()
        assert world.requests.recovery.lost_zones == set()


@pytest.mark.parametrize(("num_steps", "num_rows"), [(0, 1), (2, 3), (9, 8)])
def test_a_returning_zone_gets_its_share_of_rows_and_the_other_zone_the_rest(
    num_steps: int, num_rows: int
) -> None:
    world = two_zones()
    silence(world, "a")
    return_(world, "a")
    world.sweep(num_steps * RECOVERY.zone_return_s)
    for number in range(16):
        world.submit(make_request(number))
    counts = {zone: max(len(w.shares) for w in workers_of(world, zone)) for zone in ("a", "b")}
    assert counts == {"a": num_rows, "b": 8}, "a share of eight rows, rounded up"
    world.end()


@pytest.mark.parametrize(
    ("zones", "cause"),
    [
        pytest.param(("a", "b"), "farewell", id="it left in order"),
        pytest.param(("a",), "silent", id="there is no other zone"),
        pytest.param(("", "b"), "silent", id="the workers have no zone"),
    ],
)
def test_zones_that_are_not_held_back(zones: tuple[str, ...], cause: str) -> None:
    world = two_zones(*zones)
    silence(world, zones[0], cause)
    return_(world, zones[0])
    assert shares(world, zones[0]) == {1.0}


def test_a_zone_with_one_live_worker_is_not_evicted() -> None:
    world = two_zones()
    world.lose(workers_of(world, "a")[0], "silent")
    world.sweep(5.0)
    assert shares(world, "a") == {1.0}


def test_a_zone_is_released_when_it_is_the_last_one() -> None:
    world = two_zones()
    silence(world, "a")
    return_(world, "a")
    silence(world, "b")
    assert shares(world, "a") == {1.0}
    return_(world, "b")
    assert shares(world, "b") == {1.0}, "both were away at once"
    silence(world, "b")
    return_(world, "b")
    assert shares(world, "b") == {0.1}


def test_silence_during_its_return_starts_it_over() -> None:
    world = two_zones()
    silence(world, "a")
    return_(world, "a")
    world.sweep(3 * RECOVERY.zone_return_s)
    assert shares(world, "a") == {0.4}
    silence(world, "a", seconds=60.0)
    return_(world, "a")
    assert shares(world, "a") == {0.1}


class Changes(Observer):
    """Records breaker changes."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[tuple[str, str]] = []

    def breaker_changed(self, worker: str, state: str) -> None:
        self.states.append((worker, state))


def test_each_change_of_a_zone_is_reported_once() -> None:
    world, changes = two_zones(), Changes()
    world.requests.recovery._zones._observer = changes
    silence(world, "a", seconds=3.0)
    world.sweep(1.0)
    return_(world, "a")
    for _ in range(12):
        world.sweep(RECOVERY.zone_return_s)
    assert changes.states == [("zone a", "open"), ("zone a", "half_open"), ("zone a", "closed")]


def test_a_zone_is_held_back_also_while_a_bound_request_waits_for_the_other() -> None:
    world = two_zones()
    silence(world, "a")
    return_(world, "a")
    bound = Scheduling("bound", placement=Placement(frozenset({"b"})))
    for number in range(12):
        world.submit(make_request(number, scheduling=bound))
    for number in range(20, 24):
        world.submit(make_request(number))
    assert len(workers_of(world, "a")[1].shares) == 1
    world.end()

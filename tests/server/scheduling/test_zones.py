"""Tests of zones: pairs that keep KV in a zone, and zones that fall silent and return."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from server.scheduling.routing import Need, choose_pair, choose_route
from server.scheduling.workers import BrokenPaths, PrefixChain
from triolet.config import LocalPrefill, RecoveryConfig, RoutingConfig
from triolet.ids import AttemptKey

from .fakes import BLOCK_SIZE, FakeDecode, FakePrefill
from .test_dispatch import world_of

if TYPE_CHECKING:
    from .world import World

KEY = AttemptKey(b"x" * 16, 0)
PENALTY_S = 0.5
TEN = Need(10, 10, cross_zone_s=PENALTY_S)
RATE = 1000.0
"""Prompt tokens per second of every prefill worker: the penalty is 500 tokens."""


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

"""Tests of pools: which workers a tenant may use, and which requests wait for each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from server.scheduling.admission import num_crowding
from server.scheduling.queue import FairQueue
from triolet.config import LocalPrefill, RoutingConfig
from triolet.errors import RequestError
from triolet.service_class import ANYWHERE, Placement, Scheduling, ServiceClass

from .fakes import FakeDecode, FakePrefill, make_request
from .test_dispatch import world_of
from .test_fair_queue import CONFIG, place
from .world import Reader, World

ACME = Placement(pools=frozenset({"acme"}))
OVERFLOW = ACME._replace(has_overflow=True)
ROWS = 2


def tenant(placement: Placement = ANYWHERE, name: str = "") -> Scheduling:
    return Scheduling(name or ("shared" if placement is ANYWHERE else "acme"), placement=placement)


def world_with(*pools: str, num_blocks: int = 1000) -> World:
    """Return a world with a worker of each role in each pool."""
    labels = [{"pool": pool} if pool else {} for pool in pools]
    return world_of(
        *(FakePrefill(f"p-{one.get('pool', '')}", labels=one) for one in labels),
        *(
            FakeDecode(
                f"d-{one.get('pool', '')}", labels=one, row_credit=ROWS, num_blocks=num_blocks
            )
            for one in labels
        ),
    )


def submit(world: World, number: int, placement: Placement = ANYWHERE) -> Reader:
    return world.submit(make_request(number, scheduling=tenant(placement)))


def workers_of(world: World, reader: Reader) -> tuple[str, str] | None:
    """Return the names of a request's workers; None while it waits."""
    attempt = reader.request.attempt
    if attempt is None:
        return None
    return world.of[attempt.pair.decode].name, world.of[attempt.pair.prefill].name


OWN, SHARED = ("d-acme", "p-acme"), ("d-", "p-")


def test_a_pool_is_only_for_those_who_name_it() -> None:
    world = world_with("", "acme")
    own = [submit(world, number, ACME) for number in range(4)]
    shared = [submit(world, number) for number in range(10, 14)]
    assert [workers_of(world, one) for one in own] == [OWN] * ROWS + [None] * 2
    assert [workers_of(world, one) for one in shared] == [SHARED] * ROWS + [None] * 2
    world.end()
    assert all(one.finished for one in (*own, *shared))


def test_overflow_goes_to_the_shared_pool_and_no_further() -> None:
    world = world_with("", "acme", "other")
    found = [workers_of(world, submit(world, number, OVERFLOW)) for number in range(5)]
    assert found == [OWN] * ROWS + [SHARED] * ROWS + [None]
    world.end()


def test_overflow_works_without_a_worker_of_the_own_pool() -> None:
    world = world_with("")
    assert workers_of(world, submit(world, 1, OVERFLOW)) == SHARED
    world.end()


@pytest.mark.parametrize(("waiting", "other"), [(ACME, ANYWHERE), (ANYWHERE, ACME)])
def test_a_full_pool_holds_up_only_its_own_requests(waiting: Placement, other: Placement) -> None:
    world = world_with("", "acme")
    for number in range(20):
        submit(world, number, waiting)
    assert workers_of(world, submit(world, 99, other)) is not None
    world.end()


def test_a_large_request_keeps_its_pool_from_those_behind_it_and_no_other_pool() -> None:
    world = world_with("", "acme", num_blocks=40)
    world.submit(make_request(1, prompt="x" * 60, scheduling=tenant()))
    large = world.submit(make_request(2, prompt="x" * 120, scheduling=tenant()))
    small = submit(world, 3)
    assert workers_of(world, large) is None
    assert workers_of(world, small) is None, "it does not overtake"
    assert workers_of(world, submit(world, 4, ACME)) == OWN
    world.end()


def test_a_refusal_names_the_pool_without_workers() -> None:
    world = world_with("", "other")
    with pytest.raises(RequestError) as refused:
        submit(world, 1, ACME)
    assert (refused.value.status, refused.value.code) == (503, "no_worker")
    assert "no decode worker in the pool acme is available" in refused.value.message
    assert workers_of(world, submit(world, 2)) == SHARED


def test_requests_end_when_their_pool_stays_away_and_others_go_on() -> None:
    world = world_with("", "acme")
    for worker in world.workers:
        if world.of[worker].name in OWN:
            world.lose(worker)
    waiting, shared = submit(world, 1, ACME), submit(world, 2)
    world.settle()
    world.read(shared)
    world.sweep(world.config.worker_wait_s)
    world.read(waiting)
    assert "in the pool acme" in waiting.failed.error.message
    assert shared.finished


def test_only_workers_of_its_pool_decide_what_fits() -> None:
    world = world_of(
        FakePrefill("p-acme", labels={"pool": "acme"}),
        FakeDecode("d-acme", labels={"pool": "acme"}, num_blocks=10),
        FakePrefill("p-"),
        FakeDecode("d-"),
    )
    request = make_request(1, prompt="x" * 60, scheduling=tenant(ACME))
    with pytest.raises(RequestError, match="the largest decode pool holds 40"):
        world.submit(request)


def test_local_prefill_stays_in_the_pool() -> None:
    world = world_of(
        FakePrefill("p-"), FakeDecode("d-"), FakeDecode("d-acme", labels={"pool": "acme"})
    )
    world.sweep(RoutingConfig(LocalPrefill.AUTO).prefill_grace_s)
    assert workers_of(world, submit(world, 1, ACME)) == ("d-acme", "d-acme")
    world.end()


def queue_with(count: int, placement: Placement) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue(CONFIG)
    queue.note_pools(10**6, 16)
    for number in range(count):
        queue.add(str(number), place(tenant(placement)))
    return queue


def test_estimates_count_only_those_who_wait_for_the_same_workers() -> None:
    queue = queue_with(8, ANYWHERE)
    critical = replace(tenant(ANYWHERE), service_class=ServiceClass.CRITICAL)
    queue.add("own", place(tenant(ACME)))
    queue.add("critical", place(critical, 1000))
    assert queue.tokens_ahead(place(tenant(ACME))) == 10
    assert queue.tokens_ahead(place(tenant(ANYWHERE))) == 1080
    assert num_crowding(queue, tenant(ACME, "another"), 1, most=9) == 0
    assert num_crowding(queue, tenant(ANYWHERE, "another"), 5, most=9) == 9


def test_who_waits_longer_with_fewer_workers_is_told_so() -> None:
    world = world_with("", "acme")
    for worker in world.workers:
        fake = world.of[worker]
        if isinstance(fake, FakePrefill):
            world.announce(fake, prompt_tokens_per_s=300.0 if fake.name == "p-" else 100.0)
    admission = world.requests.admission
    assert admission._scaled(100.0, ANYWHERE) == pytest.approx(400 / 3)
    assert admission._scaled(100.0, ACME) == 400.0
    assert admission._scaled(100.0, OVERFLOW) == 100.0


def test_a_tenant_leaves_no_rows_of_its_own_pool_to_others() -> None:
    queue = queue_with(16, ACME)
    queue.add("quiet", place(Scheduling("quiet")))
    queue.take("quiet")
    for number in range(15):
        assert queue.first() == str(number)
        queue.take(str(number))
    assert queue.first([ACME]) is None


def test_without_fair_shares_pools_are_kept_apart_too() -> None:
    world = world_with("", "acme")
    world = World(2, 2, connect=False, queue=CONFIG.__class__(fair=False))
    for worker, pool in zip(world.workers, ("", "acme") * 2, strict=True):
        world.of[worker].labels = {"pool": pool} if pool else {}
        world.greet(worker)
    names = [workers_of(world, submit(world, number, ACME)) for number in range(2)]
    assert names == [("decode-1", "prefill-1")] * 2
    world.end()

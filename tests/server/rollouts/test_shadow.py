"""Tests of shadow copies: on fake workers, and under load on modelled devices, in virtual time."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from server.contract.generation import Failed, Finished
from server.rollouts.shadow import ShadowCopies, copy_of
from simulation.deterministic import run
from simulation.fleet import FleetShape, running_fleet
from tests.server.scheduling import fakes
from tests.server.scheduling.fakes import make_request
from tests.server.scheduling.test_fleet import Cluster, read_all, read_some, running
from transport.frames import RefuseReason, Reserve
from transport.rollout_protocol import ShadowComparison
from triolet.service_class import Placement, Scheduling, ServiceClass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trio.testing import MockClock

    from server.contract.generation import GenerationRequest
    from server.scheduling.links import Links

QUIET_S = 2.0
"""Longer than the copies of these tests take."""


def copies(stable: Links, candidate: Links, share: float = 1.0, most: int = 4) -> ShadowCopies:
    made = ShadowCopies(stable, candidate, most)
    made.share = share
    return made


def reserves(cluster: Cluster) -> list[Reserve]:
    return [one for one in cluster.decode.received if isinstance(one, Reserve)]


async def ask(cluster: Cluster, number: int = 1, **more: object) -> Finished | Failed:
    _, end = await read_all(cluster.fleet.submit(make_request(number, **more)))  # type: ignore[arg-type]
    return end


async def test_equal_versions_compare_as_equal(autojump_clock: MockClock) -> None:
    async with running() as stable, running() as own:
        with copies(stable.fleet, own.fleet) as shadow:
            for number in range(1, 4):
                await ask(stable, number, seed=number, max_tokens=10 * number)
                await trio.sleep(QUIET_S)
            sums = shadow.sums
    assert (sums.pairs, sums.same_finish, sums.failed, sums.skipped) == (3, 3, 0, 0)
    assert (sums.tokens, sums.equal_tokens, sums.rows_while_waiting) == ((60, 60), 60, 0)
    assert 0 < sums.ttft_s[1] < 3 * QUIET_S
    for itl_s in sums.itl_s:
        assert itl_s == pytest.approx(3 * 0.01, rel=0.2), "a fake step takes 10 ms"


def test_a_copy_is_the_same_request_in_the_lowest_class() -> None:
    placement = Placement(zones=frozenset({"west"}))
    asked = replace(
        make_request(7, seed=3, stop=("x",), priority=-5),
        cache_salt=b"salt",
        origin_id=b"another choice",
        scheduling=Scheduling("alice", service_class=ServiceClass.CRITICAL, placement=placement),
    )
    copy = copy_of(asked)
    for name in ("prompt_ids", "sampling", "stop", "deadline_s"):
        assert getattr(copy, name) == getattr(asked, name)
    lowest = Scheduling(service_class=ServiceClass.BATCH, placement=placement)
    assert copy.scheduling == lowest, "in the tenant's zones, but not at its expense"
    assert copy.request_id != asked.request_id
    assert copy.cache_salt not in (b"", asked.cache_salt), "no user finds its KV"
    assert copy.cache_salt == copy_of(asked).cache_salt, "other copies do"
    assert (copy.is_silent, copy.origin_id, copy.cache) == (True, b"", None)


async def test_a_stop_string_ends_both(autojump_clock: MockClock) -> None:
    async with running() as stable, running() as own:
        with copies(stable.fleet, own.fleet) as shadow:
            await ask(stable, stop=("fährt",), max_tokens=40)
            await trio.sleep(QUIET_S)
    assert (shadow.sums.pairs, shadow.sums.same_finish) == (1, 1)
    assert shadow.sums.tokens[0] == shadow.sums.tokens[1] < 40


async def test_a_version_that_differs_shows_where_and_how(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as stable, running() as own:
        own.decode.end_at = 30
        with copies(stable.fleet, own.fleet) as shadow:
            stream = stable.fleet.submit(make_request(max_tokens=50))
            await read_all(stream)
            monkeypatch.setattr(fakes, "STORY", fakes.STORY.replace("日本", "中国"))
            await trio.sleep(QUIET_S)
    same = len("Der Zug fährt über die Brücke 🚂 und ".encode())
    assert same > 30
    assert (shadow.sums.pairs, shadow.sums.same_finish) == (1, 0)
    assert (shadow.sums.tokens, shadow.sums.equal_tokens) == ((50, 31), 30)


async def test_the_id_of_a_request_decides_whether_it_is_copied(autojump_clock: MockClock) -> None:
    copied: dict[float, list[int]] = {}
    for share in (0.0, 0.25, 0.5, 1.0):
        async with running() as stable, running() as own:
            with copies(stable.fleet, own.fleet, share) as shadow:
                copied[share] = []
                for number in range(1, 21):
                    before = shadow.sums.pairs
                    request_id = bytes([13 * number % 256]) * 16
                    asked = replace(make_request(max_tokens=1), request_id=request_id)
                    await read_all(stable.fleet.submit(asked))
                    await trio.sleep(0.2)
                    copied[share] += [number] * (shadow.sums.pairs - before)
    assert copied[0.0] == []
    assert 0 < len(copied[0.25]) < 15
    assert set(copied[0.25]) < set(copied[0.5]), "a larger share only adds requests"
    assert copied[1.0] == [*range(1, 21)]


async def test_requests_of_excluded_tenants_are_not_copied(autojump_clock: MockClock) -> None:
    async with running() as stable, running() as own:
        with copies(stable.fleet, own.fleet) as shadow:
            shadow.excluded_tenants = ("alice",)
            for number, tenant in enumerate(("alice", "bob"), 1):
                await ask(stable, number, scheduling=Scheduling(tenant))
                await trio.sleep(QUIET_S)
                assert shadow.sums.pairs == number - 1


async def test_no_more_copies_run_than_allowed(autojump_clock: MockClock) -> None:
    async with running() as stable, running() as own:
        own.decode_process.is_held = True
        with copies(stable.fleet, own.fleet, most=2) as shadow:
            for number in range(1, 6):
                await ask(stable, number)
            await trio.sleep(0.1)
            assert own.fleet.status().running == 2
            assert shadow.sums.skipped == 3
        assert own.fleet.status().running == 0, "left at once"
        own.decode_process.is_held = False


async def test_a_failed_copy_is_counted_and_no_pair(autojump_clock: MockClock) -> None:
    async with running() as stable, running() as own:
        with copies(stable.fleet, own.fleet) as shadow:
            own.decode.refusal = RefuseReason.TOO_LONG
            await ask(stable)
            await trio.sleep(QUIET_S)
            assert shadow.sums == ShadowComparison(failed=1)
            own.fleet.admission.is_draining = True
            await ask(stable, 2)
            await trio.sleep(QUIET_S)
            assert shadow.sums == ShadowComparison(failed=2), "a refusal, too"
            own.fleet.admission.is_draining = False
            stable.decode.refusal = RefuseReason.TOO_LONG
            assert isinstance(await ask(stable, 3), Failed)
            await trio.sleep(QUIET_S)
            assert shadow.sums == ShadowComparison(failed=2), "failed originals are not copied"


async def test_none_begins_while_a_request_waits(autojump_clock: MockClock) -> None:
    async with running() as stable, running() as own:
        with copies(stable.fleet, own.fleet) as shadow:
            short = stable.fleet.submit(make_request(1, max_tokens=5))
            long = [stable.fleet.submit(make_request(n, max_tokens=60)) for n in range(2, 12)]
            assert stable.fleet.in_flight(is_waiting=True)
            await read_all(short)
            await trio.sleep(0.01)
            assert stable.fleet.in_flight(is_waiting=True)
            assert (shadow.sums, reserves(own)) == (ShadowComparison(skipped=1), [])
            for stream in long:
                await read_all(stream)


async def test_all_end_in_the_turn_in_which_a_request_begins_to_wait(
    autojump_clock: MockClock,
) -> None:
    async with running() as stable, running() as own:
        with copies(stable.fleet, own.fleet) as shadow:
            await ask(stable, max_tokens=200)
            await trio.sleep(0.1)
            shadow.share = 0.0
            streams = [stable.fleet.submit(make_request(n)) for n in range(2, 10)]
            assert (stable.fleet.in_flight(is_waiting=True), own.fleet.status().running) == (0, 1)
            streams.append(stable.fleet.submit(make_request(10)))
            assert (stable.fleet.in_flight(is_waiting=True), own.fleet.status().running) == (1, 0)
            assert shadow.sums == ShadowComparison(skipped=1)
            for stream in streams:
                await read_all(stream)
            assert own.decode.rows == {}


async def test_a_request_that_waits_again_ends_them_too(autojump_clock: MockClock) -> None:
    """Its worker died."""
    async with running() as stable, running() as own:
        with copies(stable.fleet, own.fleet) as shadow:
            await ask(stable, max_tokens=200)
            stream = stable.fleet.submit(make_request(2, max_tokens=100))
            await read_some(stream, 3)
            assert own.fleet.status().running == 1
            await stable.restart_decode()
            assert own.fleet.status().running == 0
            assert (shadow.sums.rows_while_waiting, shadow.sums.skipped) == (0, 1)
            shadow.share = 0.0
            await read_all(stream)


class Stubborn(ShadowCopies):
    """A mutant: its copies do not end when a request waits."""

    def turn_over(self) -> None:
        pass


async def loaded(kind: type[ShadowCopies], seed: int) -> tuple[ShadowComparison, Counter[str]]:
    """Return the sums of copies under load of 80 % with bursts, and what was seen of them."""
    numbers, seen = random.Random(seed), Counter[str]()
    async with (
        running_fleet(FleetShape(max_num_seqs=4), seed) as stable,
        running_fleet(FleetShape(max_num_seqs=8), seed + 1) as own,
        trio.open_nursery() as nursery,
    ):

        async def look() -> None:
            while True:
                await trio.sleep(0.003)
                is_running, is_waiting = (
                    own.status().running > 0,
                    stable.in_flight(is_waiting=True) > 0,
                )
                seen["running"] += is_running
                seen["waiting"] += is_waiting
                seen["both"] += is_running and is_waiting

        nursery.start_soon(look)
        with kind(stable, own, 4) as shadow:
            shadow.share = 0.5
            for request in requests(numbers):
                await trio.sleep(numbers.expovariate(1.0) if request is None else 0.0)
                if request is not None:
                    nursery.start_soon(read_all, stable.submit(request))
            await trio.sleep(5.0)
        nursery.cancel_scope.cancel()
    return shadow.sums, seen


def requests(numbers: random.Random) -> Iterator[GenerationRequest | None]:
    """Yield bursts of requests, each followed by None for a pause."""
    for _ in range(10):
        for _ in range(numbers.choice((1, 2, 3, 9))):
            made = make_request(max_tokens=numbers.randint(4, 40), seed=numbers.randrange(1000))
            yield replace(
                made,
                request_id=numbers.randbytes(16),
                prompt_ids=tuple(numbers.randrange(1, 1000) for _ in range(30)),
            )
        yield None


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_under_load_no_copy_runs_while_a_request_waits(seed: int) -> None:
    sums, seen = run(lambda: loaded(ShadowCopies, seed), seed)
    assert (sums.rows_while_waiting, seen["both"]) == (0, 0)
    assert seen["waiting"] > 20
    assert seen["running"] > 20
    assert sums.pairs > 0
    assert sums.skipped > 0
    assert sums.equal_tokens == sums.tokens[0] == sums.tokens[1], "modelled workers are equal"


def test_the_count_and_the_look_notice_copies_that_do_not_end() -> None:
    sums, seen = run(lambda: loaded(Stubborn, 0), 0)
    assert sums.rows_while_waiting > 0
    assert seen["both"] > 0

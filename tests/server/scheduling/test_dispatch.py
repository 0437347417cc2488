"""Tests of dispatch: which worker gets which request, and which requests are refused."""

from __future__ import annotations

import msgspec
import pytest

from server.scheduling.admission import FULL_RETRY_S, num_crowding, refuse_unfit
from server.scheduling.queue import FairQueue
from server.scheduling.roster import AdmissionLimits
from server.scheduling.routing import Need, choose_pair, streams_on
from server.scheduling.workers import BrokenPaths
from transport.frames import Reserve
from transport.liveness import PeerState
from triolet.config import QueueConfig, RecoveryConfig
from triolet.errors import RequestError
from triolet.ids import AttemptKey
from triolet.service_class import Band, Scheduling, ServiceClass

from .fakes import BLOCK_SIZE, FakeDecode, FakePrefill, make_request
from .test_fair_queue import place
from .world import World

KEY = AttemptKey(b"x" * 16, 0)
TEN = Need(10, 10)


def world_of(*fakes: FakeDecode | FakePrefill) -> World:
    decodes = [f for f in fakes if isinstance(f, FakeDecode)]
    prefills = [f for f in fakes if isinstance(f, FakePrefill)]
    world = World(len(prefills), len(decodes), connect=False)
    world.prefills, world.decodes = prefills, decodes
    ordered: list[FakeDecode | FakePrefill] = [*prefills, *decodes]
    for worker, fake in zip(world.workers, ordered, strict=True):
        world.of[worker] = fake
        world.greet(worker)
    return world


def chosen(world: World, need: Need = TEN) -> tuple[str, str] | None:
    pair = choose_pair(world.workers, need, BrokenPaths(RecoveryConfig()), world.now)
    return None if pair is None else (world.of[pair.decode].name, world.of[pair.prefill].name)


def test_decode_with_most_blocks_and_prefill_with_least_to_do() -> None:
    world = world_of(
        FakePrefill("p0"),
        FakePrefill("p1"),
        FakeDecode("d0", num_blocks=20),
        FakeDecode("d1", num_blocks=30),
    )
    assert chosen(world) == ("d1", "p0")
    world.workers[3].reserve(KEY, num_blocks=15)
    world.workers[0].reserve(KEY, num_tokens=5)
    assert chosen(world) == ("d0", "p1")


def test_streams_are_spread_whatever_else_pools_hold() -> None:
    world = world_of(
        FakePrefill(), FakeDecode("d0", num_blocks=900), FakeDecode("d1", num_blocks=850)
    )
    names = []
    for number in range(4):
        pair = choose_pair(world.workers, TEN, BrokenPaths(RecoveryConfig()), world.now)
        assert pair is not None
        names.append(world.of[pair.decode].name)
        pair.decode.reserve(AttemptKey(number.to_bytes(16, "big"), 0), num_blocks=3)
    assert names == ["d0", "d1"] * 2


def test_streams_of_other_servers_count() -> None:
    world = world_of(FakePrefill(), FakeDecode("d0"), FakeDecode("d1"))
    first = world.workers[1]
    heard = world.of[first].heartbeat()
    busy = msgspec.structs.replace(heard.load, running=2, waiting=1)
    first.heartbeat(msgspec.structs.replace(heard, load=busy), world.now)
    assert (streams_on(first), chosen(world)) == (3, ("d1", "prefill-0"))
    first.reserve(KEY)
    first.granted(KEY)
    first.heartbeat(msgspec.structs.replace(heard, load=busy), world.now)
    assert streams_on(first) == 3


def test_a_pool_that_is_nearly_full_comes_last() -> None:
    world = world_of(
        FakePrefill(), FakeDecode("d0", num_blocks=16), FakeDecode("d1", num_blocks=16)
    )
    idle, busy = world.workers[1:]
    idle.available_blocks = 4
    busy.reserve(KEY)
    assert chosen(world) == ("d1", "prefill-0")
    idle.available_blocks = 5
    assert chosen(world) == ("d0", "prefill-0")


def test_a_worker_that_is_still_stuck_gets_nothing_although_it_answers() -> None:
    world = world_of(FakePrefill(), FakeDecode())
    decode = world.workers[1]
    fake = world.of[decode]
    stuck = msgspec.structs.replace(fake.heartbeat(), progress=7, has_work=True)
    while decode.monitor.check(world.now) is PeerState.ALIVE:
        world.now += 0.5
        decode.heartbeat(stuck, world.now)
    decode.lost(world.now)
    decode.welcomed(fake.welcome(), world.now)
    decode.heartbeat(stuck, world.now)
    assert chosen(world) is None
    decode.heartbeat(msgspec.structs.replace(stuck, progress=8), world.now)
    assert chosen(world) == ("decode-0", "prefill-0")


def test_running_sequences_keep_a_block_each_to_grow() -> None:
    world = world_of(FakePrefill(), FakeDecode(num_blocks=4))
    need = Need(4 * BLOCK_SIZE, 4 * BLOCK_SIZE)
    assert chosen(world, need) is not None
    world.workers[1].reserve(KEY)
    assert chosen(world, need) is None
    assert chosen(world, Need(3 * BLOCK_SIZE, 3 * BLOCK_SIZE)) is not None


def test_replayed_tokens_need_blocks_too() -> None:
    world = world_of(FakePrefill(), FakeDecode(num_blocks=4))
    assert chosen(world, Need(BLOCK_SIZE, 4 * BLOCK_SIZE + 1)) is None


def test_a_heartbeat_counts_granted_leases_and_not_those_still_asked_for() -> None:
    world = world_of(FakePrefill(), FakeDecode(num_blocks=10))
    decode = world.workers[1]
    decode.reserve(KEY, num_blocks=4)
    assert decode.available_blocks == 6
    heard = world.of[decode].heartbeat()
    decode.heartbeat(heard, world.now)
    assert decode.available_blocks == heard.load.free_blocks - 4
    decode.granted(KEY)
    decode.heartbeat(heard, world.now)
    assert decode.available_blocks == heard.load.free_blocks
    decode.release(KEY, 4)
    assert decode.available_blocks == heard.load.free_blocks + 4


def test_a_prompt_longer_than_all_credit_goes_to_an_idle_prefill_worker_alone() -> None:
    world = world_of(FakePrefill(token_credit=8), FakeDecode())
    assert chosen(world, Need(100, 100)) is not None
    world.workers[0].reserve(KEY, num_tokens=1)
    assert chosen(world, Need(100, 100)) is None
    assert chosen(world, Need(7, 7)) is not None


def test_a_prefill_worker_is_given_no_more_ahead_than_its_pace_makes_of_the_time() -> None:
    world = world_of(FakePrefill(prompt_tokens_per_s=40.0), FakeDecode())
    need = TEN._replace(backlog_s=0.25)
    world.workers[0].reserve(KEY, num_tokens=9)
    assert chosen(world, need) is not None  # and never idles for lack of a next prompt
    world.workers[0].reserve(KEY._replace(attempt=2), num_tokens=1)
    assert chosen(world, need) is None
    assert chosen(world, need._replace(backlog_s=None)) is not None


def test_a_long_prompt_on_a_prefill_worker_holds_up_none_that_overtakes_it_there() -> None:
    world = world_of(FakePrefill(prompt_tokens_per_s=40.0, token_credit=10_000), FakeDecode())
    need = TEN._replace(backlog_s=0.25, overtaken_s=2.0)
    batch = ServiceClass.BATCH
    world.workers[0].reserve(KEY, num_tokens=100, band=Band(batch))
    assert chosen(world, need) is not None
    long = need._replace(prompt_tokens=200)
    assert chosen(world, long) is not None
    assert chosen(world, long._replace(band=Band(batch))) is None
    world.workers[0].reserve(
        KEY._replace(attempt=2), num_tokens=100, band=Band(ServiceClass.CRITICAL)
    )
    assert chosen(world, need) is None  # which is ahead of it whatever its length
    world.workers[0].computed(KEY._replace(attempt=2))
    world.workers[0].reserve(KEY._replace(attempt=3), num_tokens=81)
    assert chosen(world, need) is not None
    assert chosen(world, long) is None


def test_nobody_overtakes_what_is_done_soon() -> None:
    world = world_of(FakePrefill(prompt_tokens_per_s=40.0, token_credit=10_000), FakeDecode())
    world.workers[0].reserve(KEY, num_tokens=80)
    need = TEN._replace(backlog_s=0.25, overtaken_s=2.0)
    assert chosen(world, need) is None
    assert chosen(world, need._replace(overtaken_s=1.9)) is not None


@pytest.mark.parametrize(
    "fakes",
    [
        (FakePrefill(token_credit=0), FakeDecode()),
        (FakePrefill(), FakeDecode(row_credit=0)),
        (FakePrefill(), FakeDecode(is_draining=True)),
        (FakePrefill(is_draining=True), FakeDecode()),
        (FakePrefill(fingerprint="a"), FakeDecode(fingerprint="b")),
        (FakePrefill(), FakeDecode(num_blocks=2)),
        (FakePrefill(),),
    ],
)
def test_who_has_no_room_gets_nothing(fakes: tuple[FakeDecode | FakePrefill, ...]) -> None:
    assert chosen(world_of(*fakes)) is None


def test_a_pair_has_one_model_even_if_another_worker_has_more_room() -> None:
    world = world_of(
        FakePrefill(fingerprint="small"),
        FakeDecode("d0", fingerprint="small", num_blocks=10),
        FakeDecode("d1", fingerprint="large", num_blocks=1000),
    )
    assert chosen(world) == ("d0", "prefill-0")
    assert chosen(world, Need(10, 10, "large")) is None


def refusal_of(max_tokens: int, prompt: str, limits: AdmissionLimits) -> RequestError:
    with pytest.raises(RequestError) as refusal:
        refuse_unfit(make_request(max_tokens=max_tokens, prompt=prompt), limits)
    return refusal.value


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "limits", "param", "words"),
    [
        ("", 1, AdmissionLimits(100), "prompt", "empty"),
        (
            "x" * 90,
            11,
            AdmissionLimits(100),
            "max_tokens",
            "make 101; the context of this model is 100",
        ),
        ("x" * 100, 1, AdmissionLimits(100), "prompt", "100 prompt tokens"),
        ("x" * 10, 32, AdmissionLimits(100, 40), "max_tokens", "KV for 41 tokens; .* holds 40"),
        ("x" * 10, 1, AdmissionLimits(100, 40, 8), "prompt", "largest prefill pool holds 8"),
    ],
)
def test_what_never_fits_is_refused_with_the_numbers(
    prompt: str, max_tokens: int, limits: AdmissionLimits, param: str, words: str
) -> None:
    error = refusal_of(max_tokens, prompt, limits)
    assert (error.status, error.param) == (400, param)
    with pytest.raises(RequestError, match=words):
        raise error


def test_what_just_fits_is_taken() -> None:
    refuse_unfit(make_request(prompt="x" * 10, max_tokens=31), AdmissionLimits(41, 40, 10))


def test_a_full_queue_has_no_room_but_for_higher_classes_and_tenants_below_their_part() -> None:
    most, queue = 8, FairQueue[int](QueueConfig())
    loud, quiet = Scheduling("loud"), Scheduling("quiet")
    assert not num_crowding(queue, loud, 9, most), "an empty queue accepts"
    for number in range(8):
        assert not num_crowding(queue, loud, 1, most)
        queue.add(number, place(loud))
    assert num_crowding(queue, loud, 1, most) == 8
    # Nor is it full because of lower classes, nor for a tenant below its share.
    assert not num_crowding(queue, Scheduling("loud", service_class=ServiceClass.CRITICAL), 1, most)
    for number in range(8, 12):
        assert not num_crowding(queue, quiet, 1, most)
        queue.add(number, place(quiet))
    assert num_crowding(queue, quiet, 1, most) == 12
    assert (
        num_crowding(queue, Scheduling("quiet", service_class=ServiceClass.SHEDDABLE), 1, most)
        == 12
    )


def test_limits_follow_what_workers_said_last() -> None:
    world = world_of(FakePrefill(num_blocks=4), FakeDecode(num_blocks=8))
    assert world.requests.max_model_len == 4096
    with pytest.raises(RequestError, match="largest prefill pool holds 16"):
        world.submit(make_request(prompt="x" * 17, max_tokens=1))
    with pytest.raises(RequestError, match="largest decode pool holds 32"):
        world.submit(make_request(prompt="x" * 16, max_tokens=18))
    with pytest.raises(RequestError, match="the context of this model is 4096"):
        world.submit(make_request(max_tokens=5000))
    world.check_accounting()
    assert world.requests.table.accounting.rejected == {"context_length_exceeded": 3}


def test_a_long_line_is_refused_by_the_conductor() -> None:
    world = World(max_queued_requests=3)
    world.announce(world.decode, row_credit=1)
    for number in range(1, 5):
        world.submit(make_request(number, prompt="x" * 100))
    with pytest.raises(RequestError, match="3 requests wait") as refusal:
        world.submit(make_request(9))
    assert (refusal.value.status, refusal.value.code) == (503, "overloaded")
    assert refusal.value.retry_after_s == FULL_RETRY_S
    world.end()


def test_a_slow_line_is_refused_by_the_conductor() -> None:
    world = World()
    world.announce(world.decode, row_credit=1)
    for number in range(1, 12):
        world.submit(make_request(number, prompt="x" * 100))
    world.deliver()
    for _ in range(10):
        world.sweep(1.0)
    with pytest.raises(RequestError, match=r"come too late, after a wait of \d\d\.\d s"):
        world.submit(make_request(99))
    world.submit(make_request(100, priority=-1))
    world.end()


def test_waiting_for_workers_to_start_says_nothing_of_their_pace() -> None:
    world = World(connect=False)
    for number in range(1, 12):
        world.submit(make_request(number, prompt="x" * 100))
        world.sweep(2.0)
    world.submit(make_request(99))
    world.greet_all()
    world.end()


def test_decode_is_told_a_tenants_weight_and_of_its_own_priorities_nothing() -> None:
    world = World()
    scheduling = Scheduling("t", weight=4.0, service_class=ServiceClass.SHEDDABLE)
    world.submit(make_request(1, priority=-100, scheduling=scheduling))
    world.submit(make_request(2, priority=-100))
    world.deliver()
    told = {f.request_id: f for f in world.decode.received if isinstance(f, Reserve)}
    tenants, nobodys = (told[number.to_bytes(16, "big")] for number in (1, 2))
    assert (tenants.weight, tenants.priority) == (4.0, scheduling.priority(0))
    assert (nobodys.weight, nobodys.priority) == (1.0, -100)
    world.end()

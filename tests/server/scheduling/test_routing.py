"""Tests of which worker computes a prompt: the cost model and its bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.scheduling.routing import (
    DecodeRates,
    Need,
    PrefillRates,
    Route,
    Why,
    choose_route,
    is_ready,
    most_local_tokens,
)
from server.scheduling.workers import BrokenPaths
from transport.frames import Load
from triolet.config import LocalPrefill, RecoveryConfig, RoutingConfig
from triolet.ids import AttemptKey

from .world import World

if TYPE_CHECKING:
    from .fakes import FakeDecode, FakePrefill

CONFIG = RoutingConfig()
IDLE = DecodeRates(1000.0, step_s=0.0, streams=0, waiting_tokens=0, chunk_tokens=64)
BUSY = DecodeRates(1000.0, step_s=0.03, streams=8, waiting_tokens=0, chunk_tokens=64)
FREE = PrefillRates(1000.0, 0.05, 0, 0, 0, handover_s=0.005)
LOADED = FREE._replace(tokens_behind=5000, waiting_prompts=1)
FOUR = Need(4, 4)
SLOW = IDLE._replace(tokens_per_s=500.0)
EQUAL = FREE._replace(tokens_before=100, waiting_prompts=1)


@pytest.mark.parametrize(
    ("decode", "prefill", "most"),
    [
        pytest.param(
            IDLE, FREE, CONFIG.max_local_tokens, id="an idle worker takes up to its limit"
        ),
        pytest.param(BUSY, FREE, 0, id="streams do not wait if prefill is free"),
        pytest.param(IDLE._replace(tokens_per_s=0.0), FREE, 0, id="no rate of decode"),
        pytest.param(IDLE, FREE._replace(tokens_per_s=0.0), 0, id="no rate of prefill"),
        pytest.param(SLOW, FREE, 5, id="a slow worker takes hardly anything"),
        pytest.param(SLOW, LOADED, 55, id="overtaking costs one step, not the wait"),
        pytest.param(SLOW, EQUAL, 105, id="a prompt that is not overtaken costs its whole time"),
    ],
)
def test_how_much_decode_takes(decode: DecodeRates, prefill: PrefillRates, most: int) -> None:
    assert most_local_tokens(decode, prefill, CONFIG) == most


def test_where_prefill_has_much_to_do_a_few_tokens_are_sooner_done_beside_few_streams() -> None:
    few = most_local_tokens(BUSY._replace(streams=1, step_s=0.02), LOADED, CONFIG)
    assert 0 < few <= 10, "half of a step of 20 ms at 1,000 tokens/s"


def share_out(
    count: int, decode: DecodeRates, prefill: PrefillRates, prompt_tokens: int
) -> tuple[int, int]:
    """Return how many of some equal, simultaneous prompts go to decode and to prefill."""
    num_local = num_remote = 0
    for _ in range(count):
        most = most_local_tokens(
            decode._replace(waiting_tokens=num_local * prompt_tokens),
            prefill._replace(tokens_before=num_remote * prompt_tokens, waiting_prompts=num_remote),
            CONFIG,
        )
        if prompt_tokens <= most:
            num_local += 1
        else:
            num_remote += 1
    return num_local, num_remote


@pytest.mark.parametrize(("count", "least"), [(8, 3), (32, 12)])
def test_equal_prompts_that_come_together_are_shared_out(count: int, least: int) -> None:
    num_local, num_remote = share_out(count, IDLE, FREE, 128)
    assert least <= num_local <= num_remote + 1
    with_steps = IDLE._replace(step_s=0.015, chunk_tokens=50)
    fewer, _ = share_out(count, with_steps, FREE, 128)
    assert count // 8 < fewer < num_local, "what it decodes by then will slow it down"


def test_a_burst_beside_few_streams_is_shared_out_too_and_a_lone_prompt_is_not() -> None:
    one = BUSY._replace(streams=1, step_s=0.015)
    assert share_out(1, one, FREE, 128) == (0, 1)
    assert share_out(8, one, FREE, 128)[0] >= 2
    assert share_out(8, BUSY, FREE, 128) == (0, 8), "as many readers as wait: their gaps stay flat"


rates = st.floats(0.0, 1e6)
seconds = st.floats(0.0, 10.0)
tokens = st.integers(0, 100_000)
decodes = st.builds(DecodeRates, rates, seconds, st.integers(0, 256), tokens, st.integers(0, 512))
prefills = st.builds(PrefillRates, rates, seconds, tokens, tokens, st.integers(0, 50), seconds)


@given(decodes, prefills)
def test_the_bounds_hold_whatever_is_announced(decode: DecodeRates, prefill: PrefillRates) -> None:
    most = most_local_tokens(decode, prefill, CONFIG)
    assert 0 <= most <= CONFIG.max_local_tokens
    if decode.streams >= max(prefill.waiting_prompts, 1):
        growth_s = most / max(decode.tokens_per_s, 1e-9)
        assert most == 0 or growth_s <= CONFIG.max_gap_growth * decode.step_s + 1e-9
    more = most_local_tokens(decode, prefill._replace(handover_s=prefill.handover_s + 1), CONFIG)
    assert more >= most, "a slower prefill side never gets more"
    fewer = most_local_tokens(decode._replace(waiting_tokens=100_001), prefill, CONFIG)
    assert fewer <= most


def test_negative_bounds_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match=r">= 0.0 - at `\$.max_gap_growth`"):
        msgspec.convert({"max_gap_growth": -1}, RoutingConfig)


def route(world: World, config: RoutingConfig = CONFIG, need: Need = FOUR) -> Route | None:
    paths = BrokenPaths(RecoveryConfig())
    return choose_route(world.workers, need, paths, config, 0.0, world.now)


def give_rates(world: World, fake: FakeDecode | FakePrefill, **load: float) -> None:
    worker = world.worker(fake)
    assert worker.beat is not None
    said = Load(free_blocks=1000, **load)  # type: ignore[arg-type]
    world.hear(
        worker,
        fake.heartbeat().__class__(
            epoch=fake.epoch,
            progress=0,
            has_work=False,
            is_draining=False,
            load=said,
            token_credit=worker.beat.token_credit,
            row_credit=worker.beat.row_credit,
        ),
    )


def test_rates_decide_where_both_are_there() -> None:
    world = World()
    chosen = route(world)
    assert chosen is not None
    assert (chosen.local_tokens, chosen.pair.is_local) == (0, False)
    give_rates(world, world.prefill, prompt_tokens_per_s=1000.0, step_s=0.05)
    give_rates(world, world.decode, prompt_tokens_per_s=1000.0, chunk_tokens=64)
    chosen = route(world)
    assert chosen is not None
    assert chosen.local_tokens == CONFIG.max_local_tokens
    assert not chosen.pair.is_local, "only decode knows how much of the prompt it holds"
    assert chosen.why == (Why.SHORT, Why.LONG)
    never = route(world, RoutingConfig(LocalPrefill.OFF))
    assert never is not None
    assert never.local_tokens == 0


def test_what_is_short_does_not_wait_for_a_prefill_worker_without_credit() -> None:
    world = World()
    give_rates(world, world.prefill, prompt_tokens_per_s=1000.0, step_s=0.05)
    give_rates(world, world.decode, prompt_tokens_per_s=1000.0, chunk_tokens=64)
    world.worker(world.prefill).reserve(AttemptKey(b"x" * 16, 0), num_tokens=10_000)
    chosen = route(world)
    assert chosen is not None
    assert (chosen.pair.is_local, chosen.why) == (True, (Why.SHORT, Why.SHORT))
    assert route(world, need=Need(257, 257)) is None


def test_decode_computes_for_a_prefill_worker_that_does_not_come_back() -> None:
    world = World()
    world.lose(world.worker(world.prefill))
    assert route(world) is None, "it may be back in a moment"
    assert not is_ready(world.workers, CONFIG, world.now)
    world.now += CONFIG.prefill_grace_s
    chosen = route(world, need=Need(5000 // 2, 5000 // 2))
    assert chosen is not None
    assert (chosen.pair.is_local, chosen.local_tokens) == (True, 2500)
    assert chosen.why[0] is Why.NO_PREFILL
    assert is_ready(world.workers, CONFIG, world.now)
    assert route(world, RoutingConfig(LocalPrefill.OFF)) is None
    assert not is_ready(world.workers, RoutingConfig(LocalPrefill.OFF), world.now)


def test_a_prefill_worker_with_another_model_or_on_its_way_out_is_not_there() -> None:
    world = World()
    world.announce(world.prefill, is_draining=True)
    leaving = route(world)
    assert leaving is not None
    assert leaving.pair.is_local
    other = World(connect=False)
    other.prefill.fingerprint = "other/f32"
    for worker in other.workers:
        other.greet(worker)
    chosen = route(other)
    assert chosen is not None
    assert chosen.pair.is_local


def test_a_request_goes_to_workers_that_have_its_adapter() -> None:
    world = World(num_prefills=2, num_decodes=2)
    need = FOUR._replace(adapter=b"a" * 32)
    assert route(world, need=need) is None
    having = [world.worker(world.prefills[1]), world.worker(world.decodes[1])]
    for worker in having:
        worker.adapters = frozenset({b"a" * 32, b"b" * 32})
    chosen = route(world, need=need)
    assert chosen is not None
    assert [chosen.pair.prefill, chosen.pair.decode] == having
    assert route(world) is not None


def test_a_prompt_that_may_kill_is_not_given_to_decode() -> None:
    world = World()
    world.lose(world.worker(world.prefill))
    world.now += CONFIG.prefill_grace_s
    suspect = FOUR._replace(is_suspect=True)
    assert route(world) is not None
    assert route(world, need=suspect) is None, "prefill has only prompts to lose"
    world.now += CONFIG.suspect_grace_s
    assert route(world, need=suspect) is not None, (
        "but a worker that does not return is not awaited"
    )
    world.greet(world.worker(world.prefill))
    chosen = route(world, need=suspect)
    assert chosen is not None
    assert (chosen.pair.is_local, chosen.why[1]) == (False, Why.SUSPECT)
    always = RoutingConfig(LocalPrefill.ALWAYS)
    assert route(world, always, FOUR._replace(is_suspect=True)) is not None
    alone = World(num_prefills=0)
    assert route(alone, need=FOUR._replace(is_suspect=True)) is not None

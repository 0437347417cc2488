"""Tests that a prompt goes where its prefix is cached, unless another worker would be faster."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from server.scheduling.routing import (
    TOKENS_PER_STREAM,
    Need,
    choose_pair,
    counted_tokens,
)
from server.scheduling.workers import BrokenPaths, PrefixChain, PrefixIndex, Worker
from triolet.config import RecoveryConfig
from triolet.ids import AttemptKey, Role

from .fakes import BLOCK_SIZE, LINK, FakeDecode, FakePrefill
from .world import World

MANY = 10_000


def new_index() -> PrefixIndex:
    return Worker(Role.DECODE, "mem://d", LINK, RecoveryConfig(), 0.0).prefixes


def chain_of(num_tokens: int, first: int = 0, salt: bytes = b"") -> PrefixChain:
    return PrefixChain(range(first, first + num_tokens), salt)


def test_names_tell_prefixes_apart_by_every_token_and_the_salt() -> None:
    names = chain_of(40).names(8)
    assert len(names) == 5
    assert chain_of(47).names(8) == names
    assert chain_of(16).names(8) == names[-2:]
    assert not set(chain_of(40, first=1).names(8)) & set(names)
    assert not set(chain_of(40, salt=b"other").names(8)) & set(names)
    assert len(chain_of(40).names(16)) == 2


def test_an_index_knows_beginnings_and_forgets_ends_first() -> None:
    index = new_index()
    names = chain_of(40).names(8)
    assert index.num_held(names) == 0
    index.note(names, 100)
    assert index.num_held(names) == 5
    assert index.num_held((1, 2, *names)) == 5
    index.note(chain_of(24, first=7).names(8), 6)
    assert index.num_held(names) == 3
    assert len(index) == 6
    index.clear()
    assert index.num_held(names) == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60)), max_size=30))
def test_what_is_held_is_always_a_beginning(prompts: list[tuple[int, int]]) -> None:
    index = new_index()
    for first, num_tokens in prompts:
        names = chain_of(num_tokens, first=100 * first).names(4)
        index.note(names, 9)
        held = index.num_held(names)
        assert held == min(len(names), 9)
        assert all(name in index._recent for name in names[len(names) - held :])


def world_of(num_prefills: int, num_decodes: int) -> World:
    decodes = [FakeDecode(f"d{n}", num_blocks=MANY, row_credit=64) for n in range(num_decodes)]
    prefills = [FakePrefill(f"p{n}", token_credit=MANY) for n in range(num_prefills)]
    world = World(num_prefills, num_decodes, connect=False)
    for worker, fake in zip(world.workers, [*prefills, *decodes], strict=True):
        world.of[worker] = fake
        world.greet(worker)
    return world


def chosen(world: World, chain: PrefixChain, num_tokens: int) -> tuple[str, str]:
    need = Need(num_tokens, num_tokens, chain=chain)
    pair = choose_pair(world.workers, need, BrokenPaths(RecoveryConfig()), world.now)
    assert pair is not None
    return world.of[pair.prefill].name, world.of[pair.decode].name


def test_a_prompt_goes_where_it_is_known() -> None:
    world = world_of(2, 2)
    chain = chain_of(200)
    assert chosen(world, chain, 200) == ("p0", "d0")
    _, p1, d0, d1 = world.workers
    p1.prefixes.keep(chain, p1.capacity)
    d1.prefixes.keep(chain, d1.capacity)
    assert chosen(world, chain, 200) == ("p1", "d1")
    assert chosen(world, chain_of(200, first=1), 200) == ("p0", "d0")
    d1.prefixes.clear()
    d0.prefixes.keep(chain_of(BLOCK_SIZE), d0.capacity)
    d1.reserve(AttemptKey(b"x" * 16, 0), num_blocks=0)
    assert chosen(world, chain_of(BLOCK_SIZE), 20)[1] == "d0", "one block does not matter"


def test_prefill_is_left_when_others_would_be_done_sooner() -> None:
    world = world_of(2, 1)
    chain = chain_of(200)
    p0, p1, _ = world.workers
    p1.prefixes.keep(chain, p1.capacity)
    p1.reserve(AttemptKey(b"x" * 16, 0), num_tokens=190)
    assert chosen(world, chain, 200)[0] == "p1"
    p1.reserve(AttemptKey(b"y" * 16, 0), num_tokens=20)
    assert chosen(world, chain, 200)[0] == "p0"
    assert p0.prefixes.held_tokens(chain, p0.capacity) == 0


def test_one_prefix_does_not_pile_everything_on_one_decode_worker() -> None:
    world = world_of(1, 3)
    chain = chain_of(TOKENS_PER_STREAM * 2)
    decodes = world.workers[1:]
    decodes[2].prefixes.keep(chain, decodes[2].capacity)
    for number in range(30):
        need = Need(600, 600, chain=chain)
        pair = choose_pair(world.workers, need, BrokenPaths(RecoveryConfig()), world.now)
        assert pair is not None
        pair.decode.reserve(AttemptKey(number.to_bytes(16, "big"), 0), num_blocks=1)
    streams = Counter({world.of[worker].name: len(worker.shares) for worker in decodes})
    assert streams.most_common(1)[0][0] == "d2"
    assert max(streams.values()) - min(streams.values()) <= 2


def test_another_life_knows_nothing() -> None:
    world = world_of(1, 1)
    chain = chain_of(200)
    decode = world.workers[1]
    decode.prefixes.keep(chain, decode.capacity)
    assert decode.prefixes.held_tokens(chain, decode.capacity) > 0
    fake = world.of[decode]
    fake.epoch += 1
    world.greet(decode)
    assert decode.prefixes.held_tokens(chain, decode.capacity) == 0


def test_a_wrong_guess_overruns_no_credit_by_more_than_twice() -> None:
    world = world_of(1, 1)
    [prefill, decode] = world.workers
    chain = chain_of(400)
    prefill.prefixes.keep(chain, prefill.capacity)
    need = Need(400, 400, chain=chain)
    num_sent = 0
    while choose_pair(world.workers, need, BrokenPaths(RecoveryConfig()), world.now) is not None:
        num_tokens = counted_tokens(prefill, need)
        prefill.reserve(AttemptKey(num_sent.to_bytes(16, "big"), 0), num_tokens=num_tokens)
        num_sent += 1
    assert decode.shares == {}
    assert MANY < 400 * num_sent <= 2 * MANY

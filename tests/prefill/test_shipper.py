"""Tests of the shipper, which sends KV chunks to decode: all arrive within the window, despite
lost, repeated and damaged frames."""

from __future__ import annotations

import random

import pytest

from decode.assembly import Assembly, ChunkVerdict
from prefill.shipper import KvSend, Shipper
from prefill.transfer import CACHED_BYTES
from transport.digest import payload_digest
from transport.frames import (
    KvChunk,
    KvCredit,
    KvManifest,
    KvResend,
    KvTarget,
    Peer,
    TokenRow,
)
from triolet.config import LinkConfig
from triolet.ids import AttemptKey, Role

BYTES_PER_BLOCK = 8
LINK = LinkConfig(kv_chunk_bytes=16, kv_window_bytes=32, kv_ring_bytes=64)
"""Two blocks per chunk, two chunks under way, four in the ring."""
WINDOW = LINK.kv_window_bytes
TARGET = KvTarget(Peer(Role.DECODE, "decode-0", 5), "ipc:///kv")
OTHER = KvTarget(Peer(Role.DECODE, "decode-1", 6), "ipc:///kv1")


def key(number: int = 1) -> AttemptKey:
    return AttemptKey(number.to_bytes(16, "big"), 0)


def first_token(owner: AttemptKey) -> TokenRow:
    return TokenRow(*owner, position=0, token_id=9)


def kv(owner: AttemptKey, blocks: range) -> bytes:
    return b"".join(bytes([owner.request_id[-1], block]) * 4 for block in blocks)


def export(owner: AttemptKey, blocks: range, into: memoryview) -> None:
    into[:] = kv(owner, blocks)


def shipper(link: LinkConfig = LINK) -> Shipper:
    return Shipper(link, memoryview(bytearray(link.kv_ring_bytes)), BYTES_PER_BLOCK, export)


def pump(ship: Shipper, now: float) -> list[KvSend]:
    return list(ship.pump(now))


def begin(
    ship: Shipper,
    number: int = 1,
    *,
    num_blocks: int = 5,
    held_blocks: int = 0,
    target: KvTarget = TARGET,
    now: float = 0.0,
) -> AttemptKey:
    ship.begin(
        key(number),
        target,
        num_blocks=num_blocks,
        num_tokens=num_blocks * 4,
        held_blocks=held_blocks,
        now=now,
    )
    return key(number)


def indices(sends: list[KvSend]) -> list[int]:
    return [send.frame.index for send in sends if isinstance(send.frame, KvChunk)]


def credit(owner: AttemptKey, index: int, num_bytes: int = 16) -> KvCredit:
    return KvCredit(*owner, index=index, num_bytes=num_bytes)


def test_full_chunks_leave_while_later_blocks_are_computed() -> None:
    ship = shipper()
    owner = begin(ship)
    ship.open_peer(TARGET, WINDOW, 0.0)
    ship.computed(owner, 1, None)
    assert pump(ship, 0.0) == []
    ship.computed(owner, 3, None)
    assert indices(pump(ship, 0.0)) == [0]
    assert ship.exported() == []
    ship.computed(owner, 5, first_token(owner))
    sends = pump(ship, 0.0)
    assert indices(sends) == [1]
    assert ship.exported() == [owner]
    ship.check_invariants()


def test_blocks_are_given_back_once() -> None:
    ship = shipper()
    owners = [begin(ship, number, num_blocks=2) for number in (1, 2)]
    ship.open_peer(TARGET, WINDOW, 0.0)
    ship.computed(owners[0], 2, first_token(owners[0]))
    pump(ship, 0.0)
    assert ship.exported() == owners[:1]
    ship.computed(owners[1], 2, first_token(owners[1]))
    pump(ship, 0.0)
    assert ship.exported() == owners[1:]
    assert ship.exported() == []


def test_a_long_chunk_is_copied_in_parts_and_travels_whole() -> None:
    bytes_per_block = CACHED_BYTES // 2
    chunk_bytes = 5 * bytes_per_block
    link = LinkConfig(
        kv_chunk_bytes=chunk_bytes, kv_window_bytes=chunk_bytes, kv_ring_bytes=chunk_bytes
    )
    copied: list[range] = []

    def fill(owner: AttemptKey, blocks: range, into: memoryview) -> None:
        copied.append(blocks)
        for index, block in enumerate(blocks):
            begin = index * bytes_per_block
            into[begin : begin + bytes_per_block] = bytes([block]) * bytes_per_block

    ship = Shipper(link, memoryview(bytearray(chunk_bytes)), bytes_per_block, fill)
    owner = begin(ship)
    ship.open_peer(TARGET, chunk_bytes, 0.0)
    ship.computed(owner, 5, first_token(owner))
    send = pump(ship, 0.0)[0]
    assert isinstance(send.frame, KvChunk)
    assert copied == [range(2), range(2, 4), range(4, 5)]
    payload = b"".join(bytes([block]) * bytes_per_block for block in range(5))
    assert send.payload == payload
    assert send.frame.digest == payload_digest(payload)


def test_nothing_leaves_before_the_receiver_has_said_welcome() -> None:
    ship = shipper()
    owner = begin(ship)
    ship.computed(owner, 5, first_token(owner))
    assert pump(ship, 0.0) == []
    ship.open_peer(TARGET, WINDOW, 0.1)
    assert indices(pump(ship, 0.1)) == [0, 1]


def test_the_window_bounds_what_is_under_way_and_credit_opens_it() -> None:
    ship = shipper()
    owner = begin(ship)
    ship.open_peer(TARGET, WINDOW, 0.0)
    ship.computed(owner, 5, first_token(owner))
    assert indices(pump(ship, 0.0)) == [0, 1]
    assert pump(ship, 0.0) == []
    ship.on_credit(TARGET, credit(owner, 1), 0.0)
    ship.on_credit(TARGET, credit(owner, 1), 0.0)
    sends = pump(ship, 0.0)
    assert indices(sends) == [2]
    assert isinstance(sends[-1].frame, KvManifest)
    assert sends[-1].frame.num_chunks == 3
    ship.check_invariants()


def test_a_block_larger_than_window_and_ring_goes_alone() -> None:
    ship = shipper(LinkConfig(kv_chunk_bytes=4, kv_window_bytes=4, kv_ring_bytes=4))
    owner = begin(ship, num_blocks=2)
    ship.open_peer(TARGET, 4, 0.0)
    ship.computed(owner, 2, first_token(owner))
    assert indices(pump(ship, 0.0)) == [0]
    assert ship.is_full
    ship.on_credit(TARGET, credit(owner, 0, 8), 0.0)
    assert indices(pump(ship, 0.0)) == [1]


def test_a_full_ring_says_so_and_keeps_blocks_in_the_pool() -> None:
    ship = shipper()
    owner = begin(ship, num_blocks=12)
    assert not ship.is_full
    ship.computed(owner, 12, first_token(owner))
    pump(ship, 0.0)
    assert ship.ring_bytes == LINK.kv_ring_bytes
    assert ship.is_full
    assert ship.exported() == []


def test_held_blocks_do_not_travel() -> None:
    ship = shipper()
    owner = begin(ship, num_blocks=5, held_blocks=3)
    ship.open_peer(TARGET, WINDOW, 0.0)
    ship.computed(owner, 5, first_token(owner))
    [chunk, manifest] = pump(ship, 0.0)
    assert isinstance(chunk.frame, KvChunk)
    assert (chunk.frame.first_block, chunk.frame.num_blocks) == (3, 2)
    assert isinstance(manifest.frame, KvManifest)
    assert manifest.frame.num_chunks == 1


def test_a_damaged_chunk_goes_again_with_the_same_bytes() -> None:
    ship = shipper()
    owner = begin(ship)
    ship.open_peer(TARGET, WINDOW, 0.0)
    ship.computed(owner, 5, first_token(owner))
    before = {s.frame.index: s for s in pump(ship, 0.0) if isinstance(s.frame, KvChunk)}
    ship.on_resend(TARGET, KvResend(*owner, indices=(1, 77)), 0.0)
    assert pump(ship, 0.0) == [before[1]]
    ship.check_invariants()


def test_what_is_unanswered_goes_again_and_silence_ends_it() -> None:
    ship = shipper()
    owner = begin(ship)
    ship.open_peer(TARGET, WINDOW, 0.0)
    ship.computed(owner, 5, first_token(owner))
    pump(ship, 0.0)
    assert pump(ship, LINK.kv_retry_s) == []
    assert indices(pump(ship, LINK.kv_retry_s + 0.1)) == [0, 1]
    assert ship.stalled(LINK.kv_stall_s) == []
    assert ship.stalled(LINK.kv_stall_s + 0.1) == [TARGET]
    assert ship.close_lane(TARGET) == (owner,)
    assert ship.ring_bytes == 0
    assert ship.close_lane(TARGET) == ()


def test_an_unanswered_manifest_goes_again() -> None:
    ship = shipper()
    owner = begin(ship, num_blocks=1)
    ship.open_peer(TARGET, WINDOW, 0.0)
    ship.computed(owner, 1, first_token(owner))
    pump(ship, 0.0)
    ship.on_credit(TARGET, credit(owner, 0, 8), 0.5)
    [again] = pump(ship, LINK.kv_retry_s + 0.1)
    assert isinstance(again.frame, KvManifest)
    assert ship.stalled(0.5 + LINK.kv_stall_s + 0.1) == [TARGET]


def test_a_receiver_that_is_never_reached_is_given_up() -> None:
    ship = shipper()
    begin(ship, now=3.0)
    assert ship.stalled(3.0 + LINK.kv_stall_s) == []
    assert ship.stalled(3.1 + LINK.kv_stall_s) == [TARGET]


def test_long_computing_is_no_silence_of_the_receiver() -> None:
    ship = shipper()
    owner = begin(ship)
    ship.open_peer(TARGET, WINDOW, 0.0)
    assert ship.stalled(60.0) == []
    ship.computed(owner, 2, None)
    pump(ship, 60.0)
    assert ship.stalled(60.1) == []


def test_a_forgotten_transfer_holds_window_until_its_answers_come() -> None:
    ship = shipper()
    owner = begin(ship, 1)
    ship.open_peer(TARGET, WINDOW, 0.0)
    ship.computed(owner, 5, first_token(owner))
    pump(ship, 0.0)
    ship.forget(owner)
    ship.forget(owner)
    assert ship.ring_bytes == WINDOW
    other = begin(ship, 2)
    ship.computed(other, 5, first_token(other))
    assert pump(ship, 0.0) == []
    ship.on_credit(TARGET, credit(owner, 0), 0.0)
    assert indices(pump(ship, 0.0)) == [0]
    assert ship.on_done(TARGET, owner, 0.0) is None
    assert indices(pump(ship, 0.0)) == [1]
    ship.check_invariants()


def test_window_of_a_forgotten_transfer_is_written_off_in_the_end() -> None:
    ship = shipper()
    owner = begin(ship)
    ship.open_peer(TARGET, WINDOW, 0.0)
    ship.computed(owner, 5, first_token(owner))
    pump(ship, 0.0)
    ship.forget(owner)
    ship.stalled(LINK.kv_stall_s + 0.1)
    assert ship.ring_bytes == 0
    assert ship.is_idle(TARGET)
    ship.check_invariants()


def test_done_tells_whether_everything_had_been_sent() -> None:
    ship = shipper()
    early, late = begin(ship, 1), begin(ship, 2, num_blocks=1)
    ship.open_peer(TARGET, WINDOW, 0.0)
    ship.computed(late, 1, first_token(late))
    pump(ship, 0.0)
    assert ship.on_done(TARGET, early, 0.0) is False
    assert ship.on_done(TARGET, late, 0.0) is True
    assert ship.on_done(TARGET, late, 0.0) is None
    assert ship.ring_bytes == 0


def test_answers_of_unknown_targets_change_nothing() -> None:
    ship = shipper()
    owner = begin(ship)
    ship.on_credit(OTHER, credit(owner, 0), 0.0)
    ship.on_resend(OTHER, KvResend(*owner, indices=(0,)), 0.0)
    ship.open_peer(OTHER, WINDOW, 0.0)
    assert ship.on_done(OTHER, owner, 0.0) is None
    assert ship.targets == (TARGET,)


def test_targets_do_not_share_windows() -> None:
    ship = shipper()
    slow, fast = begin(ship, 1), begin(ship, 2, target=OTHER, num_blocks=2)
    ship.open_peer(TARGET, WINDOW, 0.0)
    ship.open_peer(OTHER, WINDOW, 0.0)
    ship.computed(slow, 5, first_token(slow))
    pump(ship, 0.0)
    ship.computed(fast, 2, first_token(fast))
    assert [send.target for send in pump(ship, 0.0)] == [OTHER, OTHER]


@pytest.mark.parametrize("seed", range(40))
def test_everything_arrives_under_loss_repeats_reorder_and_damage(seed: int) -> None:
    chance, ship, now = random.Random(seed), shipper(), 0.0
    num_blocks = chance.randint(1, 11)
    owner = begin(ship, num_blocks=num_blocks)
    ship.open_peer(TARGET, WINDOW, now)
    ship.computed(owner, num_blocks, first_token(owner))
    taking = Assembly(
        first_block=0,
        num_blocks=num_blocks,
        num_tokens=num_blocks * 4,
        bytes_per_block=BYTES_PER_BLOCK,
    )
    pool: dict[int, bytes] = {}
    while not taking.is_complete:
        now += LINK.kv_retry_s * 1.1
        wire = pump(ship, now)
        wire += chance.choices(wire, k=len(wire) // 2)
        chance.shuffle(wire)
        for send in wire:
            frame, payload = send.frame, send.payload
            ship.check_invariants()
            if chance.random() < 0.2:
                continue
            if isinstance(frame, KvManifest):
                taking.accept_manifest(frame)
                continue
            assert payload is not None
            arrived = bytes(payload) if chance.random() < 0.8 else bytes(len(payload))
            verdict = taking.judge(frame, arrived)
            if verdict is ChunkVerdict.CORRUPT:
                ship.on_resend(TARGET, KvResend(*owner, indices=(frame.index,)), now)
                continue
            if verdict is ChunkVerdict.TAKEN:
                for offset in range(frame.num_blocks):
                    start = offset * BYTES_PER_BLOCK
                    pool[frame.first_block + offset] = arrived[start : start + BYTES_PER_BLOCK]
            if chance.random() < 0.8:
                ship.on_credit(TARGET, credit(owner, frame.index), now)
    assert pool == {block: kv(owner, range(block, block + 1)) for block in range(num_blocks)}
    assert ship.on_done(TARGET, owner, now) is True
    assert ship.ring_bytes == 0
    ship.check_invariants()

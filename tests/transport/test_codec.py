"""Tests of the frame codec: frames are decoded as they were encoded, and invalid ones are refused
at little cost."""

from __future__ import annotations

import math
import struct
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.codec import decode, decode_message, encode, encode_message
from transport.frames import (
    AnyFrame,
    Capacity,
    Drain,
    Embed,
    KvChunk,
    KvManifest,
    Peer,
    Prefill,
    Refuse,
    RefuseReason,
    Reserve,
    ServerHeartbeat,
    TokenRow,
    Welcome,
)
from triolet.errors import LocalProtocolError, RemoteProtocolError
from triolet.ids import Role
from triolet.sampling import SamplingParams
from triolet.units import MIB

from .strategies import FRAME_TYPES, any_frame, frames, tag_of

MAX_BYTES = 16 * MIB
KEY = (b"r" * 16, 0)
CHUNK = KvChunk(*KEY, 1, 0, 0, 1, b"d" * 16)


@pytest.mark.parametrize("frame_type", FRAME_TYPES)
def test_every_frame_comes_back_as_it_was(frame_type: type[AnyFrame]) -> None:
    @settings(max_examples=30)
    @given(frame=frames(frame_type))
    def round_trip(frame: AnyFrame) -> None:
        assert decode(encode(frame), MAX_BYTES) == frame
        assert decode(memoryview(encode(frame)), MAX_BYTES) == frame

    round_trip()


def test_blocks_hold_tokens() -> None:
    capacity = Capacity(8, 0, 1024, 4, 64)
    welcome = Welcome(Peer(Role.DECODE, "decode-0", 1), 1, "model", capacity)
    with pytest.raises(RemoteProtocolError, match=r">= 1"):
        decode(encode(welcome), MAX_BYTES)


@pytest.mark.parametrize(
    ("frame_type", "names"),
    [
        (Reserve, ("kv_key", "adapter")),
        (Prefill, ("kv_key", "adapter")),
        (KvChunk, ("mac",)),
        (KvManifest, ("mac",)),
        (Embed, ("adapter",)),
    ],
)
def test_last_fields_are_left_out_where_they_are_empty(
    frame_type: type[AnyFrame], names: tuple[str, ...]
) -> None:
    assert frame_type.__struct_fields__[-len(names) :] == names

    @given(frames(frame_type))
    def check(frame: AnyFrame) -> None:
        for count in range(1, len(names) + 1):
            full = msgspec.structs.replace(frame, **dict.fromkeys(names, b"f" * 16))
            bare = msgspec.structs.replace(full, **dict.fromkeys(names[-count:], b""))
            fields = msgspec.msgpack.decode(encode(bare))
            left = len(frame_type.__struct_fields__) - count
            assert len(fields) == 1 + left  # plus the tag
            assert decode(encode(bare), MIB) == bare

    check()


def test_tags_are_unique_and_begin_the_frame() -> None:
    tags = [tag_of(frame_type) for frame_type in FRAME_TYPES]
    assert len(set(tags)) == len(tags)
    assert msgspec.msgpack.decode(encode(Drain(1.0))) == [tag_of(Drain), 1.0]


@given(data=st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(data, MAX_BYTES)


@given(frame=any_frame(), data=st.data())
def test_a_frame_cut_short_is_refused(frame: AnyFrame, data: st.DataObject) -> None:
    encoded = encode(frame)
    end = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(RemoteProtocolError):
        decode(encoded[:end], MAX_BYTES)


@given(frame=any_frame(), tail=st.binary(min_size=1, max_size=8))
def test_a_frame_with_a_tail_is_refused(frame: AnyFrame, tail: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(encode(frame) + tail, MAX_BYTES)


@given(frame=any_frame(), data=st.data())
def test_a_flipped_byte_gives_another_frame_or_is_refused(
    frame: AnyFrame, data: st.DataObject
) -> None:
    broken = bytearray(encode(frame))
    index = data.draw(st.integers(0, len(broken) - 1))
    broken[index] ^= data.draw(st.integers(1, 255))
    try:
        other = decode(bytes(broken), MAX_BYTES)
    except RemoteProtocolError:
        return
    assert isinstance(other, FRAME_TYPES)
    assert decode(encode(other), MAX_BYTES) == other


JSON_LIKE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=20,
)


@given(tag=st.integers(-1, 30), fields=st.lists(JSON_LIKE, max_size=12))
def test_msgpack_of_anything_is_a_valid_frame_or_refused(tag: int, fields: list[object]) -> None:
    data = msgspec.msgpack.encode([tag, *fields])
    try:
        frame = decode(data, MAX_BYTES)
    except RemoteProtocolError:
        return
    assert isinstance(frame, FRAME_TYPES)
    assert decode(encode(frame), MAX_BYTES) == frame


def lists_of_empty_lists(num_bytes: int) -> bytes:
    inner = b"\xdc\xff\xff" + b"\x90" * 65_535
    count = num_bytes // len(inner)
    return b"\xdc" + struct.pack(">H", count) + inner * count


REFUSED = {
    "nothing": b"",
    "nil": b"\xc0",
    "20 MB of nils": b"\xdd" + struct.pack(">I", 20_000_000) + b"\xc0" * 20_000_000,
    "14 MB of nils": b"\xdd" + struct.pack(">I", 14_000_000) + b"\xc0" * 14_000_000,
    "nested empty arrays": lists_of_empty_lists(14 * MIB),
    "nested empty arrays in a frame": b"\x92\x14" + lists_of_empty_lists(14 * MIB),
    "depth": b"\x91" * 5_000_000,
    "depth in a frame": b"\x92\x14" + b"\x91" * 5_000_000,
    "a length that lies": b"\xdd\xff\xff\xff\xff",
    "a length that lies in a frame": b"\x93\x05\x01\xdd\xff\xff\xff\xff",
    "bytes that are not there": b"\x93\x13\xc6\xff\xff\xff\xff",
    "a map": b"\x81\x01\x01",
    "an extension type": b"\xd4\x01\x00",
    "too many rows": encode(ServerHeartbeat(1)).replace(
        b"\x90", b"\xdd" + struct.pack(">I", 65_537) + b"\x92\xc4\x10" + b"r" * 16 + b"\x00"
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bomb_is_refused_within_little_memory(name: str) -> None:
    data = REFUSED[name]
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            decode(data, MAX_BYTES)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 * MIB


def test_too_long_a_frame_is_refused_before_it_is_parsed() -> None:
    encoded = encode(Drain(1.0))
    assert decode(encoded, len(encoded)) == Drain(1.0)
    with pytest.raises(RemoteProtocolError, match="at most"):
        decode(encoded, len(encoded) - 1)


def wire(*fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


SAMPLING = {"max_tokens": 1, "seed": 1}
RESERVE = (6, b"r" * 16, 0, b"", b"", SAMPLING, 0, 1, 1.0)


def reserve_with(**sampling: object) -> bytes:
    return wire(*RESERVE[:5], SAMPLING | sampling, *RESERVE[6:])


WRONG = {
    "NaN as duration": wire(20, math.nan),
    "infinity as duration": wire(20, math.inf),
    "negative duration": wire(20, -1.0),
    "bool as integer": wire(6, b"r" * 16, True, *RESERVE[3:]),
    "bool as float": wire(20, True),
    "integer as bool": wire(4, 1, 1, 1, True, [0] * 13),
    "float as integer": wire(6, b"r" * 16, 1.0, *RESERVE[3:]),
    "text as bytes": wire(6, "r" * 16, 0, *RESERVE[3:]),
    "negative count": wire(6, b"r" * 16, -1, *RESERVE[3:]),
    "short request id": wire(6, b"r" * 15, 0, *RESERVE[3:]),
    "unknown tag": wire(99, 1.0),
    "tag as text": wire("20", 1.0),
    "tag as class name": wire("Drain", 1.0),
    "missing field": wire(20),
    "surplus field": wire(20, 1.0, 1.0),
    "unknown reason": wire(8, b"r" * 16, 0, "because", 0.0),
    "name with a slash": wire(1, ["server", "../x", 1], 1, 1, ""),
    "unknown role": wire(1, ["admin", "x", 1], 1, 1, ""),
    "NaN temperature": reserve_with(temperature=math.nan),
    "infinite bias": reserve_with(logit_bias=[[1, math.inf]]),
    "301 biases": reserve_with(logit_bias=[[1, 0.0]] * 301),
    "seed of 65 bits": reserve_with(seed=2**64 - 1),
    "no token at all": reserve_with(max_tokens=0),
    "21 alternatives": wire(16, 1, [[b"r" * 16, 0, 0, 0, 0.0, [[0, 0.0]] * 21]]),
    "invalid UTF-8": b"\x92\x03\xa1\xff",
}


def test_the_frame_that_the_wrong_ones_are_made_from_is_right() -> None:
    frame = decode(reserve_with(temperature=0.5), MAX_BYTES)
    assert getattr(frame, "sampling") == SamplingParams(max_tokens=1, seed=1, temperature=0.5)  # noqa: B009


@pytest.mark.parametrize("name", WRONG)
def test_a_field_outside_the_schema_is_refused(name: str) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(WRONG[name], MAX_BYTES)


def test_what_does_not_fit_into_msgpack_is_a_bug_of_ours() -> None:
    with pytest.raises(LocalProtocolError, match="DRAIN"):
        encode(Drain(object()))  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError, match="REFUSE"):
        encode(Refuse(b"r" * 16, 2**64, RefuseReason.NO_ROWS))


def test_rows_know_their_attempt() -> None:
    assert TokenRow(*KEY, 5, 7).key == KEY
    assert CHUNK.key == KEY


def test_a_payload_travels_beside_a_chunk_and_nowhere_else() -> None:
    parts = encode_message(CHUNK, b"kv")
    assert decode_message(parts, MAX_BYTES) == (CHUNK, memoryview(b"kv"))
    assert decode_message(encode_message(Drain(1.0), None), MAX_BYTES) == (Drain(1.0), None)
    with pytest.raises(LocalProtocolError):
        encode_message(CHUNK, None)
    with pytest.raises(LocalProtocolError):
        encode_message(Drain(1.0), b"kv")


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [encode(CHUNK)],
        [encode(Drain(1.0)), b"kv"],
        [encode(CHUNK), b"kv", b"more"],
        [encode(CHUNK), b"x" * 101],
    ],
    ids=["nothing", "chunk without", "payload without chunk", "two payloads", "too long"],
)
def test_a_message_of_other_parts_is_refused(parts: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_message(parts, 100)

"""Tests of packed token ids, of digests, and of the gate that checks received frames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from transport.codec import MAX_REMEMBERED_SENDERS, FrameGate, encode, encode_message
from transport.digest import RunningDigest, payload_digest
from transport.frames import Drain, Goodbye
from transport.gate import BoundGate
from transport.link import MAX_BAD_FRAMES, LinkMessage, PeerGone
from transport.tokens import pack_tokens, unpack_tokens
from triolet.errors import LocalProtocolError, RemoteProtocolError
from triolet.ids import PeerId, Role

ME = PeerId(Role.SERVER, "server", 7)
GOOD = [encode(Drain(1.0))]
BAD = [b"\xc0"]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_token_ids_come_back_as_they_were(token_ids: list[int]) -> None:
    assert unpack_tokens(pack_tokens(token_ids)) == tuple(token_ids)


def test_packed_ids_are_little_endian_on_every_machine() -> None:
    assert pack_tokens([1, 0x01020304]) == bytes([1, 0, 0, 0, 4, 3, 2, 1])


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_ids_that_do_not_fit_are_our_bug(token_id: int) -> None:
    with pytest.raises(LocalProtocolError):
        pack_tokens([token_id])


def test_half_an_id_is_the_peers_fault() -> None:
    with pytest.raises(RemoteProtocolError):
        unpack_tokens(b"12345")


@given(st.binary(min_size=1, max_size=100), st.data())
def test_a_changed_byte_changes_the_digest(payload: bytes, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(payload) - 1))
    broken = bytearray(payload)
    broken[index] ^= data.draw(st.integers(1, 255))
    assert payload_digest(memoryview(broken)) != payload_digest(payload)
    assert len(payload_digest(payload)) == 16


@given(st.lists(st.binary(max_size=100)))
def test_pieces_have_the_digest_of_the_whole(pieces: list[bytes]) -> None:
    digest = RunningDigest()
    for piece in pieces:
        digest.update(memoryview(piece))
    assert digest.digest() == payload_digest(b"".join(pieces))


def test_the_gate_lets_frames_in_and_counts_them() -> None:
    gate = FrameGate(100)
    assert gate.admit(b"a", GOOD) == LinkMessage(b"a", Drain(1.0), None)
    assert gate.admit(b"a", BAD) is None
    assert (gate.received_frames, gate.bad_frames) == (1, 1)


def test_a_bad_frame_is_logged_with_its_sender_until_that_is_shut_out() -> None:
    gate = FrameGate(100)
    with capture_logs() as logs:
        for _ in range(MAX_BAD_FRAMES + 5):
            gate.admit(b"a", BAD)
    assert len(logs) == MAX_BAD_FRAMES
    assert logs[0]["sender"] == "61"
    assert "not a frame" in logs[0]["error"]


def test_a_sender_of_bad_frames_is_shut_out_and_nobody_else() -> None:
    gate = FrameGate(100)
    for count in range(MAX_BAD_FRAMES):
        assert not gate.is_shut_out(b"a"), f"after {count}"
        gate.admit(b"a", BAD)
    assert gate.is_shut_out(b"a")
    assert gate.admit(b"a", GOOD) is None
    assert gate.admit(b"b", GOOD) is not None
    assert gate.bad_frames == MAX_BAD_FRAMES + 1


def test_a_new_life_of_a_sender_starts_clean() -> None:
    gate = FrameGate(100)
    for _ in range(MAX_BAD_FRAMES):
        gate.admit(b"a", BAD)
    gate.forgive(b"a")
    assert gate.admit(b"a", GOOD) is not None


def test_the_gate_remembers_a_bounded_number_of_senders() -> None:
    gate = FrameGate(100)
    for _ in range(MAX_BAD_FRAMES):
        gate.admit(b"first", BAD)
    for number in range(MAX_REMEMBERED_SENDERS - 1):
        gate.admit(b"%d" % number, BAD)
    assert gate.is_shut_out(b"first")
    gate.admit(b"one more", BAD)
    assert not gate.is_shut_out(b"first")


def test_messages_call_peers_and_frames_by_the_words_of_the_protocol() -> None:
    gate = BoundGate(100, lambda connection, frame: None)
    with pytest.raises(PeerGone, match=rf"^{ME} is not connected$"):
        gate.connection_of(ME.identity())
    with pytest.raises(LocalProtocolError, match=r"^GOODBYE: only a KV_CHUNK has a payload$"):
        encode_message(Goodbye("x"), b"x")

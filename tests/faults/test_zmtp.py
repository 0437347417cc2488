"""Tests of splitting ZeroMQ traffic in the fault matrix's proxy: messages are found however the
kernel cuts the bytes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.faults.zmtp import GREETING_BYTES, Kind, NotZmtpError, Splitter, pack_message

GREETING = b"\xff" + bytes(GREETING_BYTES - 1)
READY = b"\x05READY" + b"".join(
    struct.pack("!B", len(name)) + name + struct.pack("!I", len(value)) + value
    for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", b"server:web-0:00ff"))
)
MESSAGES = st.lists(
    st.lists(st.binary(max_size=600), min_size=1, max_size=3), min_size=1, max_size=5
)


def command(body: bytes) -> bytes:
    return struct.pack("!BB", 4, len(body)) + body


@given(MESSAGES, st.data())
def test_messages_come_out_as_they_went_in(
    messages: list[list[bytes]], data: st.DataObject
) -> None:
    wire = GREETING + command(READY) + b"".join(pack_message(parts) for parts in messages)
    cuts = data.draw(st.lists(st.integers(0, len(wire)), max_size=8).map(sorted))
    splitter, pieces = Splitter(), []
    for begin, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        pieces += splitter.feed(wire[begin:end])
    assert b"".join(piece.raw for piece in pieces) == wire
    commands = [piece for piece in pieces if piece.kind is Kind.COMMAND]
    assert [piece.parts for piece in commands] == [(READY,)]
    carried = [list(piece.parts) for piece in pieces if piece.kind is Kind.MESSAGE]
    assert carried == messages


def test_a_greeting_passes_as_it_comes() -> None:
    # Each side waits for the other's first bytes before it sends the rest of its own.
    splitter = Splitter()
    assert [piece.raw for piece in splitter.feed(GREETING[:10])] == [GREETING[:10]]
    assert [piece.raw for piece in splitter.feed(GREETING[10:])] == [GREETING[10:]]


def test_what_is_no_zmtp_is_refused() -> None:
    with pytest.raises(NotZmtpError, match="flags"):
        Splitter().feed(GREETING + b"\x80\x00")
    with pytest.raises(NotZmtpError, match="bytes"):
        Splitter().feed(GREETING + b"\x02" + struct.pack("!Q", 1 << 60))

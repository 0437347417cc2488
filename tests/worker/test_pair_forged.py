"""Tests of forged KV frames: a third process sends them to decode over an unencrypted link, and
their MACs are rejected."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest

from transport.digest import is_authentic, kv_key, payload_digest, sealed
from transport.frames import EndReason, KvChunk, KvManifest, SharedRange
from transport.handshake import make_hello
from triolet.config import WireConfig
from triolet.ids import AttemptKey, PeerId, Role
from worker.counters import Drop

from .pair import KV_SECRET, LINK, Pair
from .phases import PROMPT, until
from .scripts import completion

if TYPE_CHECKING:
    from collections.abc import Callable

    from .pair import Parcel

PLAIN = replace(LINK, wire=WireConfig(plaintext=True))
FORGER = PeerId(Role.PREFILL, "forger", 77)


def next_of(pair: Pair, kind: type) -> Parcel:
    """Run events until a frame of this type is next on the wire."""
    until(pair, lambda: pair.wire and isinstance(pair.wire[0].frame, kind))
    return pair.wire[0]


def forge(pair: Pair, frame: KvChunk | KvManifest, payload: bytes | None = None) -> None:
    """Send frames over a separate connection."""
    hello = make_hello(FORGER, pair.p_identity.fingerprint)
    pair.decode.on_kv(FORGER.identity(), hello, None, pair.now)
    pair.decode.outbox.take_for_senders()
    pair.decode.on_kv(FORGER.identity(), frame, payload, pair.now)


def other_bytes(chunk: KvChunk, payload: bytes) -> tuple[KvChunk, bytes]:
    lie = bytes(byte ^ 0xFF for byte in payload)
    return msgspec.structs.replace(chunk, digest=payload_digest(lie)), lie


def other_place(chunk: KvChunk, payload: bytes) -> tuple[KvChunk, bytes]:
    return msgspec.structs.replace(chunk, first_block=chunk.first_block + 1), payload


def other_index(chunk: KvChunk, payload: bytes) -> tuple[KvChunk, bytes]:
    return msgspec.structs.replace(chunk, index=chunk.index + 1), payload


def no_mac(chunk: KvChunk, payload: bytes) -> tuple[KvChunk, bytes]:
    return msgspec.structs.replace(chunk, mac=b""), payload


def own_key(chunk: KvChunk, payload: bytes) -> tuple[KvChunk, bytes]:
    chunk, payload = other_bytes(chunk, payload)
    return sealed(chunk, bytes(32), payload), payload


@pytest.mark.parametrize("lie", [other_bytes, other_place, other_index, no_mac, own_key])
def test_a_forged_chunk_writes_nothing_and_gets_no_answer(
    lie: Callable[[KvChunk, bytes], tuple[KvChunk, bytes]],
) -> None:
    pair = Pair(link=PLAIN)
    key = pair.ask(PROMPT)
    parcel = next_of(pair, KvChunk)
    assert isinstance(parcel.frame, KvChunk)
    assert parcel.payload is not None
    blocks = pair.decode.attempt_table.attempts[key].block_table
    before = [bytes(piece) for piece in exported(pair, blocks)]
    forge(pair, *lie(parcel.frame, bytes(parcel.payload)))
    assert pair.decode.outbox.take_for_senders() == []
    assert pair.decode.counters.dropped == {Drop.FORGED: 1}
    assert [bytes(piece) for piece in exported(pair, blocks)] == before
    pair.run()
    assert list(pair.heard[key].tokens.values()) == list(completion(PROMPT, 3, 6))
    pair.end(key)
    pair.run()
    pair.check_empty()


def exported(pair: Pair, blocks: list[int]) -> list[bytearray]:
    engine = pair.nodes[Role.DECODE].engine
    into = bytearray(len(blocks) * engine.bytes_per_block)
    engine.export_blocks(blocks, memoryview(into))
    return [into]


def test_a_forged_manifest_completes_nothing() -> None:
    pair = Pair(link=PLAIN)
    key = pair.ask(PROMPT)
    parcel = next_of(pair, KvManifest)
    assert isinstance(parcel.frame, KvManifest)
    lie = msgspec.structs.replace(parcel.frame.first, token_id=parcel.frame.first.token_id ^ 1)
    forge(pair, msgspec.structs.replace(parcel.frame, first=lie))
    assert pair.decode.counters.dropped == {Drop.FORGED: 1}
    pair.run()
    assert list(pair.heard[key].tokens.values()) == list(completion(PROMPT, 3, 6))


def test_a_chunk_of_one_attempt_is_none_of_the_next() -> None:
    pair = Pair(link=PLAIN)
    first = pair.ask(PROMPT)
    parcel = next_of(pair, KvChunk)
    assert isinstance(parcel.frame, KvChunk)
    assert parcel.payload is not None
    again = AttemptKey(first.request_id, 1)
    pair.ask(PROMPT, key=again)
    replayed = msgspec.structs.replace(parcel.frame, attempt=1)
    forge(pair, replayed, bytes(parcel.payload))
    assert pair.decode.counters.dropped[Drop.FORGED] == 1
    pair.run()
    assert list(pair.heard[again].tokens.values()) == list(completion(PROMPT, 3, 6))


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
def test_a_server_that_sends_no_key_is_told_so(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(link=PLAIN)
    keys = iter([b""] if role is Role.DECODE else [bytes(32), b""])
    monkeypatch.setattr(f"{Pair.__module__}.kv_key", lambda *_: next(keys))
    ended = pair.heard[pair.ask(PROMPT)].ended[role]
    assert ended.reason is EndReason.ERROR
    assert "upgrade the server" in ended.message


def test_where_the_link_has_keys_itself_no_frame_has_a_mac() -> None:
    pair = Pair()
    pair.ask(PROMPT)
    assert next_of(pair, KvChunk).frame.mac == b""  # type: ignore[union-attr]
    assert next_of(pair, KvManifest).frame.mac == b""  # type: ignore[union-attr]


def test_a_mac_is_of_every_field_but_the_way_that_the_bytes_came() -> None:
    attempt = AttemptKey(b"r" * 16, 0)
    key = kv_key(KV_SECRET, attempt)
    chunk = sealed(KvChunk(*attempt, 5, 1, 2, 3, b"d" * 16), key, b"payload")
    assert is_authentic(chunk, key, memoryview(b"payload"))
    assert is_authentic(msgspec.structs.replace(chunk, shared=SharedRange(0, 7)), key, b"payload")
    for field in ("attempt", "target_epoch", "index", "first_block", "num_blocks"):
        changed = msgspec.structs.replace(chunk, **{field: getattr(chunk, field) + 1})
        assert not is_authentic(changed, key, b"payload"), field
    assert not is_authentic(chunk, key, b"payloae")
    assert not is_authentic(chunk, kv_key(KV_SECRET, AttemptKey(b"r" * 16, 1)), b"payload")
    assert not is_authentic(chunk, b"", b"payload")

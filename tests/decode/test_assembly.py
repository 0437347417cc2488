"""Tests of KV assembly on the decode worker: chunks may arrive in any order and more than once, and
damaged or contradictory ones are rejected."""

from __future__ import annotations

import random

import pytest

from decode.assembly import Assembly, ChunkVerdict
from transport.digest import payload_digest
from transport.frames import KvChunk, KvManifest, TokenRow
from triolet.errors import RemoteProtocolError

ID = bytes(16)
BYTES_PER_BLOCK = 8
NUM_TOKENS = 19


def assembly(num_blocks: int = 5, first_block: int = 0) -> Assembly:
    return Assembly(
        first_block=first_block,
        num_blocks=num_blocks,
        num_tokens=NUM_TOKENS,
        bytes_per_block=BYTES_PER_BLOCK,
    )


def chunk(index: int, first_block: int, num_blocks: int = 1) -> tuple[KvChunk, bytes]:
    payload = bytes([index]) * (num_blocks * BYTES_PER_BLOCK)
    frame = KvChunk(
        ID,
        0,
        target_epoch=1,
        index=index,
        first_block=first_block,
        num_blocks=num_blocks,
        digest=payload_digest(payload),
    )
    return frame, payload


def manifest(
    num_chunks: int, num_tokens: int = NUM_TOKENS, first: TokenRow | None = None
) -> KvManifest:
    first = first or TokenRow(ID, 0, position=0, token_id=7)
    return KvManifest(
        ID, 0, target_epoch=1, num_chunks=num_chunks, num_tokens=num_tokens, first=first
    )


@pytest.mark.parametrize("seed", range(20))
def test_chunks_in_any_order_with_repeats_complete_it(seed: int) -> None:
    chance = random.Random(seed)
    taking = assembly()
    parts: list[object] = [chunk(0, 0, 2), chunk(1, 2, 2), chunk(2, 4), manifest(3)]
    parts += chance.choices(parts, k=3)
    chance.shuffle(parts)
    verdicts = []
    for part in parts:
        if isinstance(part, KvManifest):
            taking.accept_manifest(part)
        else:
            verdicts.append(taking.judge(*part))  # type: ignore[misc]
    assert verdicts.count(ChunkVerdict.TAKEN) == 3
    assert taking.is_complete


@pytest.mark.parametrize(
    ("num_blocks", "first_block"), [(1, 0), pytest.param(5, 4, id="blocks-that-are-held")]
)
def test_it_is_not_complete_without_the_manifest(num_blocks: int, first_block: int) -> None:
    taking = assembly(num_blocks, first_block)
    taking.judge(*chunk(0, first_block))
    assert not taking.is_complete
    taking.accept_manifest(manifest(1))
    assert taking.is_complete


def test_a_damaged_chunk_is_counted_and_can_still_come() -> None:
    taking = assembly(num_blocks=1)
    frame, payload = chunk(0, 0)
    for times in (1, 2):
        assert taking.judge(frame, payload[:-1] + b"x") is ChunkVerdict.CORRUPT
        assert taking.num_failures(0) == times
    assert taking.judge(frame, payload) is ChunkVerdict.TAKEN
    assert taking.num_failures(1) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(chunk(0, 5), id="behind-the-prompt"),
        pytest.param(chunk(0, 3, 3), id="reaching-behind"),
        pytest.param(chunk(0, 0, 0), id="of-no-blocks"),
        pytest.param((chunk(0, 0, 2)[0], b"x" * 8), id="shorter-than-it-says"),
        pytest.param(chunk(9, 1, 2), id="overlapping"),
        pytest.param(chunk(7, 1), id="same-index-elsewhere"),
    ],
)
def test_a_chunk_that_cannot_be_is_the_peers_error(wrong: tuple[KvChunk, bytes]) -> None:
    taking = assembly()
    taking.judge(*chunk(7, 2))
    with pytest.raises(RemoteProtocolError):
        taking.judge(*wrong)


def test_a_chunk_in_a_held_block_is_the_peers_error() -> None:
    with pytest.raises(RemoteProtocolError):
        assembly(first_block=2).judge(*chunk(0, 1))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(manifest(5, num_tokens=3), id="another-prompt"),
        pytest.param(manifest(3), id="fewer-chunks-than-came"),
        pytest.param(manifest(5, first=TokenRow(ID, 0, 1, 7)), id="first-token-at-position-1"),
        pytest.param(manifest(5, first=TokenRow(ID, 1, 0, 7)), id="first-token-of-another-attempt"),
    ],
)
def test_a_manifest_that_cannot_be_is_the_peers_error(wrong: KvManifest) -> None:
    taking = assembly()
    taking.judge(*chunk(4, 0))
    with pytest.raises(RemoteProtocolError):
        taking.accept_manifest(wrong)


def test_two_manifests_must_agree() -> None:
    taking = assembly()
    taking.accept_manifest(manifest(5))
    taking.accept_manifest(manifest(5))
    with pytest.raises(RemoteProtocolError):
        taking.accept_manifest(manifest(4))


@pytest.mark.parametrize(
    ("num_blocks", "num_chunks", "index"),
    [
        pytest.param(2, 1, 0, id="all-chunks-with-blocks-missing"),
        pytest.param(5, 2, 2, id="behind-the-manifest"),
    ],
)
def test_a_chunk_that_does_not_fit_its_manifest_is_the_peers_error(
    num_blocks: int, num_chunks: int, index: int
) -> None:
    taking = assembly(num_blocks)
    taking.accept_manifest(manifest(num_chunks))
    with pytest.raises(RemoteProtocolError):
        taking.judge(*chunk(index, 0))

"""Tests of rings in shared memory: processes of the same host can read them, and they disappear
with their owner."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from transport.frames import SharedRange, SharedRing
from transport.shared_ring import HEADER_BYTES, NotSharedError, OwnRing, PeerRings

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd needs Linux")

SENDER = b"prefill:p:1"
MAX_RANGE_BYTES = 64
OWNER = """
import sys
from transport.shared_ring import OwnRing
ring = OwnRing(64)
ring.memory[:5] = b"there"
print(ring.offer.pid, ring.offer.fd, ring.offer.token.hex(), flush=True)
sys.stdin.read()
"""


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:triolet-kv")


def held() -> int:
    """Return how many open files of this process are rings; others may be closed at any time."""
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            targets.append(os.readlink(entry))
    return sum("memfd:triolet-kv" in target for target in targets)


def named() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if "triolet" in name]


@pytest.fixture
def own() -> Iterator[OwnRing]:
    with closing(OwnRing(64)) as ring:
        yield ring


@pytest.fixture
def rings() -> Iterator[PeerRings]:
    with closing(PeerRings(MAX_RANGE_BYTES)) as mapped:
        yield mapped


def offer_of(ring: OwnRing) -> SharedRing:
    assert ring.offer is not None
    return ring.offer


def test_what_is_written_is_read_and_nothing_beyond(own: OwnRing, rings: PeerRings) -> None:
    own.memory[8:13] = b"hello"
    rings.attach(SENDER, offer_of(own))
    assert rings.read(SENDER, SharedRange(8, 5)) == b"hello"
    assert rings.read(SENDER, SharedRange(60, 5)) is None
    assert rings.read(SENDER, SharedRange(2**62, 2**62)) is None
    assert rings.read(b"somebody else", SharedRange(0, 1)) is None
    assert rings.read(SENDER, SharedRange(0, 64)) == bytes(own.memory)


def test_what_was_read_does_not_change_any_more(own: OwnRing, rings: PeerRings) -> None:
    own.memory[:3] = b"old"
    rings.attach(SENDER, offer_of(own))
    read = rings.read(SENDER, SharedRange(0, 3))
    own.memory[:3] = b"new"
    assert read == b"old"


@pytest.mark.parametrize(
    "wrong",
    [
        {"token": bytes(16)},
        {"num_bytes": 63},
        {"num_bytes": 2**62},
        {"fd": 999},
        {"pid": 2**31 - 2},
        {"pid": 2**70},
    ],
)
def test_an_offer_that_means_something_else_is_declined(
    own: OwnRing, rings: PeerRings, wrong: dict[str, object]
) -> None:
    before = held()
    with pytest.raises(NotSharedError):
        rings.attach(SENDER, msgspec.structs.replace(offer_of(own), **wrong))
    assert len(rings) == 0
    assert held() <= before


def test_a_file_that_its_owner_could_cut_off_is_never_mapped(
    tmp_path: Path, rings: PeerRings
) -> None:
    path, token = tmp_path / "file", bytes(range(16))
    path.write_bytes(token + bytes(HEADER_BYTES + 64 - 16))
    with path.open("rb") as file, pytest.raises(NotSharedError):
        rings.attach(SENDER, SharedRing(os.getpid(), file.fileno(), 64, token))
    loose = os.memfd_create("triolet-kv", os.MFD_ALLOW_SEALING)
    os.write(loose, token + bytes(HEADER_BYTES + 64 - 16))
    with pytest.raises(NotSharedError, match="not sealed"):
        rings.attach(SENDER, SharedRing(os.getpid(), loose, 64, token))
    os.close(loose)
    assert len(rings) == 0


def test_what_is_no_ring_is_not_even_opened(rings: PeerRings) -> None:
    """Opening a FIFO for reading would unblock a writer at its other end."""
    reader, writer = os.pipe()
    os.close(reader)
    link = f"/proc/self/fd/{writer}"
    with pytest.raises(NotSharedError, match="another host or container"):
        rings.attach(SENDER, SharedRing(os.getpid(), writer, 64, bytes(16)))
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"nobody reads")
    assert os.readlink(link).startswith("pipe:")
    os.close(writer)


def test_nobody_but_its_maker_can_write_to_a_ring(own: OwnRing) -> None:
    offer = offer_of(own)
    fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, HEADER_BYTES + 64)
    with pytest.raises(PermissionError):
        os.write(fd, b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    os.close(fd)
    own.memory[0] = 7


def test_more_than_a_frame_may_hold_is_never_copied(own: OwnRing) -> None:
    with closing(PeerRings(8)) as rings:
        rings.attach(SENDER, offer_of(own))
        assert rings.read(SENDER, SharedRange(0, 8)) == bytes(8)
        assert rings.read(SENDER, SharedRange(0, 9)) is None


def test_who_is_not_known_any_more_is_let_go(own: OwnRing, rings: PeerRings) -> None:
    before, files = mappings(), held()
    rings.attach(SENDER, offer_of(own))
    rings.attach(SENDER, offer_of(own))
    assert mappings() <= before + 1
    rings.keep_only({SENDER})
    assert len(rings) == 1
    rings.keep_only(set())
    assert mappings() <= before
    assert held() <= files


@pytest.mark.slow
def test_the_ring_of_a_process_that_was_killed_is_gone(rings: PeerRings) -> None:
    before = mappings()
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        pid, fd, token = process.stdout.readline().split()
        rings.attach(SENDER, SharedRing(int(pid), int(fd), 64, bytes.fromhex(token)))
        assert rings.read(SENDER, SharedRange(0, 5)) == b"there"
        rings.keep_only({SENDER})
        assert len(rings) == 1
        process.kill()
        process.wait()
    rings.keep_only({SENDER})
    assert (len(rings), named()) == (0, [])
    assert mappings() <= before  # less if older ones were garbage-collected meanwhile

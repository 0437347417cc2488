"""Host memory of one process that others on the same host may read: no name, no file, no leftovers.

Knows the kernel's anonymous files; knows no frames beyond the offer and the range. The memory is a
sealed memfd: it cannot shrink under a reader's feet, nothing in a file system stands for it, and it
is gone with the last process that maps it, however that ends. Whether two processes see the same
host is not concluded from addresses: the reader opens what the offer names and looks whether the
token of the offer is in it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import select
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from .frames import SharedRange, SharedRing

if TYPE_CHECKING:
    from collections.abc import Collection

HEADER_BYTES: Final = mmap.PAGESIZE
"""The token's page; the ring begins behind it, on a page of its own."""
TOKEN_BYTES: Final = 16


class PrivateRing:
    """Memory that nobody else reads. See OwnRing."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = memoryview(bytearray(num_bytes))
        self.offer: SharedRing | None = None

    def close(self) -> None:
        """Do nothing: there is nothing to be found."""


class OwnRing:
    """Memory that this process writes.

    Args:
      num_bytes: of the ring.

    Attributes:
      memory: the ring.
      offer: what tells others how to find it.

    Raises:
      OSError: this system has no such memory.
    """

    def __init__(self, num_bytes: int) -> None:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self._fd = os.memfd_create("triolet-kv", flags)
        try:
            os.ftruncate(self._fd, HEADER_BYTES + num_bytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            mapping = mmap.mmap(self._fd, HEADER_BYTES + num_bytes)
        except OSError:
            os.close(self._fd)
            raise
        token = secrets.token_bytes(TOKEN_BYTES)
        mapping[:TOKEN_BYTES] = token
        self.memory = memoryview(mapping)[HEADER_BYTES:]
        self.offer: SharedRing | None = SharedRing(os.getpid(), self._fd, num_bytes, token)

    def close(self) -> None:
        """Let nobody find it any more; who has it mapped keeps it until it lets go."""
        os.close(self._fd)


class _Mapped(NamedTuple):
    """Another process's ring.

    Attributes:
      mapping: read-only.
      size_bytes: of the ring in it.
      owner_fd: readable when its owner is dead.
    """

    mapping: mmap.mmap
    size_bytes: int
    owner_fd: int


class PeerRings:
    """The rings of others that are mapped here, by who offered them."""

    def __init__(self) -> None:
        self._mapped: dict[bytes, _Mapped] = {}
        self._copy = bytearray()

    def __len__(self) -> int:
        return len(self._mapped)

    def attach(self, sender: bytes, offer: SharedRing) -> bool:
        """Map a ring; return whether it is there, and is the one that is meant."""
        self.detach(sender)
        mapped = _map(offer)
        if mapped is None:
            return False
        self._mapped[sender] = mapped
        return True

    def detach(self, sender: bytes) -> None:
        """Let go of a sender's ring. Idempotent."""
        mapped = self._mapped.pop(sender, None)
        if mapped is not None:
            mapped.mapping.close()
            os.close(mapped.owner_fd)

    def keep_only(self, senders: Collection[bytes]) -> None:
        """Let go of the rings of everybody else, and of the dead."""
        if not self._mapped:
            return
        owners = select.poll()
        for mapped in self._mapped.values():
            owners.register(mapped.owner_fd, select.POLLIN)
        dead = {fd for fd, _ in owners.poll(0)}
        for sender, mapped in tuple(self._mapped.items()):
            if sender not in senders or mapped.owner_fd in dead:
                self.detach(sender)

    def read(self, sender: bytes, where: SharedRange) -> memoryview | None:
        """Copy bytes out of a sender's ring.

        A copy, because the owner may write there again at any time: what is judged and what is used
        have to be the same bytes.

        Returns:
          The bytes, valid until the next call; None if there is no such ring or range.
        """
        mapped = self._mapped.get(sender)
        if mapped is None or where.offset + where.num_bytes > mapped.size_bytes:
            return None
        if len(self._copy) < where.num_bytes:
            self._copy = bytearray(where.num_bytes)
        begin = HEADER_BYTES + where.offset
        copy = memoryview(self._copy)[: where.num_bytes]
        with memoryview(mapped.mapping) as ring:
            copy[:] = ring[begin : begin + where.num_bytes]
        return copy

    def close(self) -> None:
        """Let go of everything."""
        for sender in tuple(self._mapped):
            self.detach(sender)


def _map(offer: SharedRing) -> _Mapped | None:
    """Map what an offer names, if it is sealed memory of that size with that token."""
    fds = []
    try:
        # Opened for itself, so that no more than reading is possible here.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        fds.append(os.open(f"/proc/{offer.pid}/fd/{offer.fd}", flags))
        size_bytes = HEADER_BYTES + offer.num_bytes
        # Only memfds have seals; without this one its owner could cut it off under our reads.
        is_sealed = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not is_sealed or os.fstat(fds[0]).st_size != size_bytes:
            return None
        owner_fd = os.pidfd_open(offer.pid)
        fds.append(owner_fd)
        mapping = mmap.mmap(fds[0], size_bytes, prot=mmap.PROT_READ)
        if mapping[:TOKEN_BYTES] != offer.token:
            mapping.close()
            return None
        fds.remove(owner_fd)
        return _Mapped(mapping, offer.num_bytes, owner_fd)
    except (OSError, OverflowError, ValueError):
        return None  # another host, another namespace, or another user's: bytes travel instead
    finally:
        for fd in fds:
            with suppress(OSError):
                os.close(fd)

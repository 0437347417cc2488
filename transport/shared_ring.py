"""Ring buffers of KV chunks that other processes of the same user on this host can read.

The memory is a sealed memfd: it cannot shrink while it is read, only its owner can write to it, it
has no name in a file system, and it is freed with the last process that maps it. Addresses do not
show whether two processes share a host. The reader therefore opens the memory that the offer names,
which the kernel allows only to the same user, and checks that it contains the offer's token.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import select
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

from triolet.errors import TrioletError

from .frames import SharedRange, SharedRing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

HEADER_BYTES: Final = mmap.PAGESIZE
"""Page for the token; the ring begins on the page after it."""
TOKEN_BYTES: Final = 16
_NAME: Final = "triolet-kv"
_SHOWN_NAME: Final = f"/memfd:{_NAME}"
"""The kernel's name for such a file."""
_F_SEAL_FUTURE_WRITE: Final = 0x10
"""Since Linux 5.1; Python has no name for it yet."""


class NotSharedError(TrioletError):
    """An offer cannot be used here; the message says why."""


class RingMemory(Protocol):
    """Memory in which chunks wait.

    Attributes:
      memory: the ring.
      offer: tells others how to find it; None if it is private.
    """

    memory: memoryview
    offer: SharedRing | None

    def close(self) -> None:
        """Stop offering the ring; processes that have mapped it keep it until they close it."""


class FoundRing(Protocol):
    """Another process's ring, mapped here."""

    @property
    def memory(self) -> memoryview:
        """The ring, for reading; the caller releases it."""
        ...

    @property
    def is_orphaned(self) -> bool:
        """Return whether its owner is dead."""
        ...

    def close(self) -> None:
        """Unmap it."""


class PrivateRing:
    """Memory that no other process reads. See OwnRing."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = memoryview(bytearray(num_bytes))
        self.offer: SharedRing | None = None

    def close(self) -> None:
        """Do nothing: the ring is not offered."""


class OwnRing:
    """Ring memory that this process writes.

    Args:
      num_bytes: size of the ring.

    Attributes:
      memory: the ring.
      offer: tells others how to find it.

    Raises:
      OSError: this system has no such memory.
    """

    def __init__(self, num_bytes: int) -> None:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self._fd = os.memfd_create(_NAME, flags)
        try:
            os.fchmod(self._fd, 0o600)
            os.ftruncate(self._fd, HEADER_BYTES + num_bytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            mapping = mmap.mmap(self._fd, HEADER_BYTES + num_bytes)
            with suppress(OSError):  # older kernels: readers are trusted not to write
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        except OSError:
            os.close(self._fd)
            raise
        token = secrets.token_bytes(TOKEN_BYTES)
        mapping[:TOKEN_BYTES] = token
        self.memory = memoryview(mapping)[HEADER_BYTES:]
        self.offer: SharedRing | None = SharedRing(os.getpid(), self._fd, num_bytes, token)

    def close(self) -> None:
        """Stop offering the ring; processes that have mapped it keep it until they close it."""
        os.close(self._fd)


class PeerRings:
    """Rings of other processes that are mapped here, by sender.

    Args:
      max_range_bytes: most bytes read at once.
      find: maps an offered ring; raises NotSharedError.
    """

    def __init__(
        self, max_range_bytes: int, find: Callable[[SharedRing], FoundRing] | None = None
    ) -> None:
        self._found: dict[bytes, FoundRing] = {}
        self._max_range_bytes = max_range_bytes
        self._find = find or find_ring
        self._copy = bytearray()

    def __len__(self) -> int:
        return len(self._found)

    def attach(self, sender: bytes, offer: SharedRing) -> None:
        """Map a ring; it replaces the sender's earlier one.

        Raises:
          NotSharedError: the ring is not there, or is not the offered one.
        """
        self.detach(sender)
        self._found[sender] = self._find(offer)

    def detach(self, sender: bytes) -> None:
        """Unmap a sender's ring. Idempotent."""
        found = self._found.pop(sender, None)
        if found is not None:
            found.close()

    def keep_only(self, senders: Collection[bytes]) -> None:
        """Unmap the rings of all other senders and of dead owners."""
        for sender, found in tuple(self._found.items()):
            if sender not in senders or found.is_orphaned:
                self.detach(sender)

    def read(self, sender: bytes, where: SharedRange) -> memoryview | None:
        """Copy bytes out of a sender's ring.

        The owner may overwrite them at any time, and the checked bytes must be the bytes that are
        used.

        Returns:
          The bytes, valid until the next call; None if there is no such ring or range.
        """
        found = self._found.get(sender)
        if found is None or where.num_bytes > self._max_range_bytes:
            return None
        with found.memory as ring:
            if where.offset + where.num_bytes > len(ring):
                return None
            if len(self._copy) < where.num_bytes:
                self._copy = bytearray(where.num_bytes)
            copy = memoryview(self._copy)[: where.num_bytes]
            copy[:] = ring[where.offset : where.offset + where.num_bytes]
        return copy

    def close(self) -> None:
        """Unmap all rings."""
        for sender in tuple(self._found):
            self.detach(sender)


class _MappedRing:
    """A mapped memfd of another process. See FoundRing.

    Args:
      mapping: read-only, including the token's page.
      owner_fd: becomes readable when its owner is dead.
    """

    def __init__(self, mapping: mmap.mmap, owner_fd: int) -> None:
        self._mapping = mapping
        self._owner_fd = owner_fd
        self._owner = select.poll()
        self._owner.register(owner_fd, select.POLLIN)

    @property
    def memory(self) -> memoryview:
        """The ring, for reading; the caller releases it."""
        return memoryview(self._mapping)[HEADER_BYTES:]

    @property
    def is_orphaned(self) -> bool:
        """Return whether its owner is dead."""
        return bool(self._owner.poll(0))

    def close(self) -> None:
        """Unmap it."""
        self._mapping.close()
        os.close(self._owner_fd)


def find_ring(offer: SharedRing) -> FoundRing:
    """Map the offered ring, if it is sealed memory of that size with that token.

    Raises:
      NotSharedError: it is not.
    """
    link = f"/proc/{offer.pid}/fd/{offer.fd}"
    fds = []
    try:
        # Check first: an offer may name anything, and opening some files has side effects.
        if not os.readlink(link).startswith(_SHOWN_NAME):
            raise NotSharedError(f"{link} is not shared memory here: another host or container")
        # Open the file separately, for reading only.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        fds.append(os.open(link, flags))
        size_bytes = HEADER_BYTES + offer.num_bytes
        # Without this seal the owner could truncate it while we read.
        is_sealed = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not is_sealed or os.fstat(fds[0]).st_size != size_bytes:
            raise NotSharedError(f"{link} is not sealed or has another size: wrong memory")
        owner_fd = os.pidfd_open(offer.pid)
        fds.append(owner_fd)
        mapping = mmap.mmap(fds[0], size_bytes, prot=mmap.PROT_READ)
        if mapping[:TOKEN_BYTES] != offer.token:
            mapping.close()
            raise NotSharedError(f"{link} holds another token: another host or container")
        fds.remove(owner_fd)
        return _MappedRing(mapping, owner_fd)
    except (OSError, OverflowError, ValueError, AttributeError) as error:
        raise NotSharedError(
            f"{link} cannot be read here ({error}): another host, container or user"
        ) from error
    finally:
        for fd in fds:
            with suppress(OSError):
                os.close(fd)

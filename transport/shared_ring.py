"""Host memory of one process that others on the same host may read: no name, no file, no leftovers.

Knows the kernel's anonymous files; knows no frames beyond the offer and the range. The memory is a
sealed memfd: it cannot shrink under a reader's feet, nobody but its maker can write to it, nothing
in a file system stands for it, and it is gone with the last process that maps it, however that
ends. Whether two processes see the same host is not concluded from addresses: the reader opens what
the offer names, which the kernel allows to the same user only, and looks whether the token of the
offer is in it.
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
"""The token's page; the ring begins behind it, on a page of its own."""
TOKEN_BYTES: Final = 16
_NAME: Final = "triolet-kv"
_SHOWN_NAME: Final = f"/memfd:{_NAME}"
"""What the kernel calls such a file."""
_F_SEAL_FUTURE_WRITE: Final = 0x10
"""Of Linux 5.1; Python has no name for it yet."""


class NotSharedError(TrioletError):
    """An offer leads nowhere here; says why, for people."""


class RingMemory(Protocol):
    """Memory in which chunks wait.

    Attributes:
      memory: the ring.
      offer: what tells others how to find it; None if nobody is to.
    """

    memory: memoryview
    offer: SharedRing | None

    def close(self) -> None:
        """Let nobody find it any more; who has it keeps it until it lets go."""


class FoundRing(Protocol):
    """Another process's ring."""

    @property
    def memory(self) -> memoryview:
        """The ring, for reading; to be released by the caller."""
        ...

    @property
    def is_orphaned(self) -> bool:
        """Whether its owner is dead."""
        ...

    def close(self) -> None:
        """Let go of it."""


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
        self._fd = os.memfd_create(_NAME, flags)
        try:
            os.fchmod(self._fd, 0o600)
            os.ftruncate(self._fd, HEADER_BYTES + num_bytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            mapping = mmap.mmap(self._fd, HEADER_BYTES + num_bytes)
            with suppress(OSError):  # an older kernel, where readers are trusted not to write
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
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


class PeerRings:
    """The rings of others that are mapped here, by who offered them.

    Args:
      max_range_bytes: the most that is read at once.
      find: maps what an offer names; raises NotSharedError.
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
        """Map a ring, in the place of what the sender offered before.

        Raises:
          NotSharedError: it is not there, or is not the one that is meant.
        """
        self.detach(sender)
        self._found[sender] = self._find(offer)

    def detach(self, sender: bytes) -> None:
        """Let go of a sender's ring. Idempotent."""
        found = self._found.pop(sender, None)
        if found is not None:
            found.close()

    def keep_only(self, senders: Collection[bytes]) -> None:
        """Let go of the rings of everybody else, and of the dead."""
        for sender, found in tuple(self._found.items()):
            if sender not in senders or found.is_orphaned:
                self.detach(sender)

    def read(self, sender: bytes, where: SharedRange) -> memoryview | None:
        """Copy bytes out of a sender's ring.

        A copy, because the owner may write there again at any time: what is judged and what is used
        have to be the same bytes.

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
        """Let go of everything."""
        for sender in tuple(self._found):
            self.detach(sender)


class _MappedRing:
    """A ring that the kernel has mapped here. See FoundRing.

    Args:
      mapping: read-only, with the token's page.
      owner_fd: readable when its owner is dead.
    """

    def __init__(self, mapping: mmap.mmap, owner_fd: int) -> None:
        self._mapping = mapping
        self._owner_fd = owner_fd
        self._owner = select.poll()
        self._owner.register(owner_fd, select.POLLIN)

    @property
    def memory(self) -> memoryview:
        """The ring, for reading; to be released by the caller."""
        return memoryview(self._mapping)[HEADER_BYTES:]

    @property
    def is_orphaned(self) -> bool:
        """Whether its owner is dead."""
        return bool(self._owner.poll(0))

    def close(self) -> None:
        """Let go of it."""
        self._mapping.close()
        os.close(self._owner_fd)


def find_ring(offer: SharedRing) -> FoundRing:
    """Map what an offer names, if it is sealed memory of that size with that token.

    Raises:
      NotSharedError: it is not.
    """
    link = f"/proc/{offer.pid}/fd/{offer.fd}"
    fds = []
    try:
        # Looked at first: an offer may name anything, and to open some things changes them.
        if not os.readlink(link).startswith(_SHOWN_NAME):
            raise NotSharedError(f"{link} is no such memory here: another host or container")
        # Opened for itself, so that no more than reading is possible here.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        fds.append(os.open(link, flags))
        size_bytes = HEADER_BYTES + offer.num_bytes
        # Without this seal its owner could cut it off under our reads.
        is_sealed = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not is_sealed or os.fstat(fds[0]).st_size != size_bytes:
            raise NotSharedError(f"{link} is not sealed or has another size: not what is meant")
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

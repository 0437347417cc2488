"""Blobs from peers: each is asked of one after the other, then of the registry; one that failed is
asked for nothing more."""

from __future__ import annotations

from threading import Lock
from typing import IO, TYPE_CHECKING

from .blobs import download
from .client import RegistryFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triolet.store.manifest import Descriptor

    from .blobs import Progress
    from .client import Registry


class BlobSources:
    """Where the blobs of a version may come from, for several threads at once.

    Args:
      registry: that has the manifest; asked last.
      peers: asked first, in order.

    Attributes:
      notes: why peers were given up, a sentence each.
    """

    def __init__(self, registry: Registry, peers: Sequence[Registry] = ()) -> None:
        self._registry = registry
        self._peers = tuple(peers)
        self._failed: set[Registry] = set()
        self._lock = Lock()
        self._is_over = False
        self.notes: list[str] = []

    def give_up(self) -> None:
        """End the transfers of all threads: one of them has failed everywhere."""
        self._is_over = True
        for one in (*self._peers, self._registry):
            one.give_up()

    def fetch(self, file: IO[bytes], blob: Descriptor, progress: Progress) -> int:
        """Bring a blob into a file, from where an earlier source broke off; return the bytes that
        came over the network.

        Raises:
          RegistryFailed: no source has it.
          OSError: it cannot be written.
        """
        for peer in self._peers:
            if peer in self._failed:
                continue
            try:
                file.seek(0)
                return download(peer, file, blob, progress)
            except RegistryFailed as error:
                if self._is_over:
                    raise
                self._note(peer, error)
        file.seek(0)
        return download(self._registry, file, blob, progress)

    def _note(self, peer: Registry, error: RegistryFailed) -> None:
        with self._lock:
            if peer not in self._failed:
                self._failed.add(peer)
                self.notes.append(f"{error}; that peer is asked for nothing more")

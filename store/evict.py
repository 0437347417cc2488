"""Evict versions from a store with a size limit: those that a registry still has, least recently
used first."""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from triolet.errors import StoreError

from .aliases import NamedError
from .collect import collect
from .layout import explained
from .partial import Partials
from .reference import Pointer, PointerKind
from .sources import MAX_EVICTED, Sources

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from .aliases import Aliases
    from .layout import ModelStore, StoreEntry, Writer
    from .sources import Source


class Stays(StrEnum):
    """Why a version is not evicted. Also the words in messages."""

    NAMED = "named by an alias or by another tag than it was pulled with"
    SERVED = "served"
    ONLY_HERE = "in no known registry"
    NOT_THERE = "not complete in its registry, or the registry cannot be reached"


class Evicted(NamedTuple):
    """Result of making room.

    Attributes:
      versions: evicted versions.
      freed_bytes: freed by them and by unnamed blobs.
      left_bytes: size of the store now.
      stays: number of versions that stay, by reason.
    """

    versions: list[Source]
    freed_bytes: int
    left_bytes: int
    stays: Mapping[Stays, int]

    @property
    def reasons(self) -> str:
        """The reasons for which versions stay, in one line."""
        return _reasons(self.stays)


class _Version(NamedTuple):
    """A version with all of its names.

    Attributes:
      at_ns: last use under any name.
      digest: digest of the version.
      known: its names with a source.
    """

    at_ns: int
    digest: str
    known: list[tuple[StoreEntry, Source]]


class _Plan:
    """Chooses versions to evict, before any is removed."""

    def __init__(self, store: ModelStore, aliases: Aliases, wanted: Collection[str]) -> None:
        self.victims: list[tuple[StoreEntry, Source]] = []
        self.stays: Counter[Stays] = Counter()
        self._store = store
        self._wanted = set(wanted)
        self._pointers = aliases.all()
        self._entries = store.entries()
        self._blobs = {
            one.digest: {one.digest, *(blob.digest for blob in store.manifest(one.digest).blobs)}
            for one in self._entries
        }

    def add(self, most_bytes: int, is_there: Callable[[Source], bool]) -> int:
        """Choose versions until at most `most_bytes` are left; return how many bytes that frees.

        Args:
          most_bytes: limit of the store.
          is_there: as in `make_room`.
        """
        left = before = size_of(self._store)
        for version in self._by_last_use():
            if left <= most_bytes:
                break
            if version.digest in self._wanted:
                continue
            why = self._why_it_stays(version, is_there)
            if why is not None:
                self.stays[why] += 1
                continue
            self.victims += version.known
            left -= self._freed_by(version.digest)
        return before - left

    def _by_last_use(self) -> list[_Version]:
        found = {(one.name, one.digest): (one, at_ns) for one, at_ns in Sources(self._store).all()}
        versions = []
        for digest in self._blobs:
            same = [one for one in self._entries if one.digest == digest]
            known = [(one, *found[one[:2]]) for one in same if one[:2] in found]
            at_ns = max((at_ns for _, _, at_ns in known), default=0)
            versions.append(_Version(at_ns, digest, [(one, source) for one, source, _ in known]))
        return sorted(versions, key=lambda one: one[:2])

    def _freed_by(self, digest: str) -> int:
        """Return the bytes of the blobs that only this version names, and drop it from the
        counts."""
        gone = self._blobs.pop(digest) - self._wanted
        gone -= set().union(*self._blobs.values())
        paths = map(self._store.blob_path, gone)
        return sum(path.lstat().st_size for path in paths if path.exists())

    def _why_it_stays(self, version: _Version, is_there: Callable[[Source], bool]) -> Stays | None:
        if len(version.known) < sum(one.digest == version.digest for one in self._entries):
            return Stays.ONLY_HERE
        own = {own_tag(source) for _, source in version.known}
        if any(to == version.digest and p not in own for p, to in self._pointers.items()):
            return Stays.NAMED
        with _not_served(self._store, version.digest) as is_free:
            if not is_free:
                return Stays.SERVED
        # Without the lock: a start that serves the version must not wait for a registry.
        if not any(is_there(source) for _, source in version.known):
            return Stays.NOT_THERE
        return None


@contextmanager
def _not_served(store: ModelStore, digest: str) -> Iterator[bool]:
    """Keep a version from being served during this block; yield whether it is not served
    already."""
    descriptor = os.open(store.blob_path(digest), os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def own_tag(source: Source) -> Pointer | None:
    """Return the tag that a version was pulled or pushed with; it is evicted and pulled with it."""
    return Pointer(source.name, PointerKind.TAG, source.tag) if source.tag else None


def size_of(store: ModelStore) -> int:
    """Return the bytes of all blobs and unfinished downloads."""
    folders = (store.blobs, Partials(store).folder)
    with explained(store.root):
        return sum(
            path.lstat().st_size
            for folder in folders
            if folder.is_dir()
            for path in folder.iterdir()
        )


def make_room(
    writer: Writer,
    aliases: Aliases,
    most_bytes: int,
    is_there: Callable[[Source], bool],
    *,
    wanted: Collection[str] | None = None,
) -> Evicted:
    """Remove unnamed blobs, then versions, until the store is small enough.

    Args:
      writer: writer of the store.
      aliases: aliases of the store.
      most_bytes: limit of the store.
      is_there: returns whether a registry has a version now.
      wanted: digests of blobs and versions to keep, if a new version needs the room: nothing is
        evicted if that would not be enough. None evicts what it can, even if it is not enough.

    Raises:
      StoreError: there is not enough room for the new version, a manifest cannot be read, or the
        store cannot be written.
    """
    store = writer.store
    before = size_of(store)
    if before <= most_bytes:
        return Evicted([], 0, before, {})
    collect(writer, wanted or ())
    with explained(store.root):
        plan = _Plan(store, aliases, wanted or ())
        would_free = plan.add(most_bytes, is_there)
        excess = size_of(store) - would_free - most_bytes
        if wanted is not None and excess > 0:
            raise StoreError(
                f"{store.root} would take {excess} bytes more than its limit, and no more can be "
                "evicted: "
                f"{_reasons(plan.stays)}; nothing was evicted: raise the limit, or remove "
                "versions with `triolet model rm` and `triolet model gc`"
            )
        gone = [source for entry, source in plan.victims if _remove(writer, aliases, entry, source)]
    collect(writer, wanted or ())
    sources = Sources(store)
    for old in sources.evicted()[:-MAX_EVICTED]:
        sources.drop(old.name, old.digest)
    left = size_of(store)
    return Evicted(gone, before - left, left, plan.stays)


def _remove(writer: Writer, aliases: Aliases, entry: StoreEntry, source: Source) -> bool:
    """Remove a version and its own tag from the index, unless it has got another name in the
    meantime or is being served."""
    gone = (entry.name, entry.digest)
    with _not_served(writer.store, entry.digest) as is_free:
        if not is_free:
            return False
        try:
            with aliases.unnamed(*gone, but_for=own_tag(source)):
                kept = [one for one in writer.store.entries() if (one.name, one.digest) != gone]
                writer.set_entries(kept)
        except NamedError:
            return False
    return True


def _reasons(stays: Mapping[Stays, int]) -> str:
    return ", ".join(f"{count} {why}" for why, count in stays.items() if count) or "none is left"

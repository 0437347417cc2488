"""Records for each version where a registry has it and when it was last used, in one small file for
each version."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from .layout import explained
from .manifest import Digest  # noqa: TC001 (msgspec reads the annotations)
from .reference import Pointer, PointerKind

if TYPE_CHECKING:
    from pathlib import Path

    from .layout import ModelStore
    from .reference import Reference

FOLDER: Final = "sources"
MAX_SOURCE_BYTES: Final = 4096
"""Size of a file: two names, a digest, and a location."""
MAX_EVICTED: Final = 1000
"""Evicted versions with a remembered location: people may still ask for them."""


class Source(msgspec.Struct, frozen=True):
    """A version's place in a registry.

    Attributes:
      name: name of the model here.
      digest: digest of the version.
      location: location in the registry, by digest.
      tag: its tag here when it was pulled or pushed; empty for none.
      is_insecure: the registry was used without TLS.
    """

    name: str
    digest: Digest
    location: str
    tag: str = ""
    is_insecure: bool = False

    @property
    def command(self) -> str:
        """The command that pulls the version again."""
        tag = f" --tag {self.tag}" if self.tag else ""
        insecure = " --insecure" if self.is_insecure else ""
        return f"triolet model pull {self.location} --name {self.name}{tag}{insecure}"


class Used(NamedTuple):
    """A source and its last use.

    Attributes:
      source: the source.
      at_ns: when the version was last pulled, pushed or served, in nanoseconds since 1970.
    """

    source: Source
    at_ns: int


class Sources:
    """The sources of a store. They need no lock: each file is replaced as a whole.

    Args:
      store: with the versions.
    """

    def __init__(self, store: ModelStore) -> None:
        self._store = store
        self.folder = store.root / FOLDER

    def note(self, source: Source) -> None:
        """Record where a version is, and that it is used now. An earlier tag stays.

        Raises:
          StoreError: it cannot be written.
        """
        path = self._path(source.name, source.digest)
        before = _read(path)
        if before is not None and not source.tag:
            source = msgspec.structs.replace(source, tag=before.tag)
        temporary = path.with_suffix(f".{os.getpid()}")
        with explained(self._store.root):
            self.folder.mkdir(exist_ok=True)
            # Not synced: a file torn by a power cut counts as missing, and its version is not
            # evicted.
            temporary.write_bytes(msgspec.json.encode(source))
            temporary.rename(path)

    def touch(self, name: str, digest: str) -> None:
        """Record that a version is used now, if it has a source."""
        # Another user's file keeps its time; the version then counts as used when it was pulled.
        with suppress(FileNotFoundError, PermissionError):
            os.utime(self._path(name, digest))

    def drop(self, name: str, digest: str) -> None:
        """Remove the source of a version.

        Raises:
          StoreError: it cannot be removed.
        """
        with explained(self._store.root):
            self._path(name, digest).unlink(missing_ok=True)

    def all(self) -> list[Used]:
        """Return all sources, least recently used first."""
        found = []
        with explained(self._store.root):
            paths = list(self.folder.glob("*.json")) if self.folder.is_dir() else []
            for path in paths:
                source = _read(path)
                if source is not None and path == self._path(source.name, source.digest):
                    found.append(Used(source, path.stat().st_mtime_ns))
        return sorted(found, key=lambda one: (one.at_ns, one.source.digest, one.source.name))

    def evicted(self) -> list[Source]:
        """Return the sources of versions that are no longer in the store."""
        here = {(entry.name, entry.digest) for entry in self._store.entries()}
        return [one for one, _ in self.all() if (one.name, one.digest) not in here]

    def evicted_as(self, reference: Reference) -> Source | None:
        """Return the evicted version that a reference may name; if several, the last one used."""
        for one in reversed(self.evicted()):
            if one.name != reference.name or reference.digest not in (None, one.digest):
                continue
            if reference.pointer in (None, Pointer(one.name, PointerKind.TAG, one.tag)):
                return one
        return None

    def _path(self, name: str, digest: str) -> Path:
        return self.folder / f"{self._store.blob_path(digest).name}-{name}.json"


def _read(path: Path) -> Source | None:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MAX_SOURCE_BYTES), type=Source)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None  # missing or torn: the version is not evicted

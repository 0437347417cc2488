"""Tags and aliases of model versions, with their history, in SQLite."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from triolet.errors import StoreError
from triolet.sqlite import transaction

from .layout import explained
from .reference import Pointer, PointerKind, Reference, alias_of
from .sources import Sources

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from .layout import ModelStore
    from .signatures import Signed

FILE: Final = "aliases.sqlite"
STABLE: Final = "stable"
PREVIOUS: Final = "previous"
"""The version that `stable` had before its last move. It cannot be set directly."""
BUSY_TIMEOUT_S: Final = 10.0
"""Seconds to wait for another process's transaction, which takes milliseconds."""
MAX_MOVES: Final = 1000
"""Moves to remember per tag or alias: years of releases."""
ABSENT: Final = ""
"""Expected digest of a tag or alias that does not exist yet."""
_FORM: Final = 2
"""Form 1 had no requirements."""
_WHOLE_MODEL: Final = ("", "")
"""Kind and label of a requirement for all tags and aliases of a model."""
_SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS pointers (
        name TEXT NOT NULL, kind TEXT NOT NULL, label TEXT NOT NULL, digest TEXT NOT NULL,
        PRIMARY KEY (name, kind, label)) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS moves (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL, kind TEXT NOT NULL, label TEXT NOT NULL,
        old TEXT NOT NULL, new TEXT NOT NULL, at REAL NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS moves_of ON moves (name, kind, label, id)",
    """CREATE TABLE IF NOT EXISTS requirements (
        name TEXT NOT NULL, kind TEXT NOT NULL, label TEXT NOT NULL, key TEXT NOT NULL,
        PRIMARY KEY (name, kind, label, key)) WITHOUT ROWID""",
)


class AliasMove(NamedTuple):
    """A change of a tag or alias.

    Attributes:
      old: digest before; empty if it is new.
      new: digest after; empty if it was removed.
      at: seconds since 1970.
    """

    old: str
    new: str
    at: float


class NamedError(StoreError):
    """A version cannot be removed because a tag or alias names it."""


class Aliases:
    """The tags and aliases of a store. Each call is one transaction.

    Args:
      store: its index lists the existing versions.
    """

    def __init__(self, store: ModelStore) -> None:
        self._store = store
        self._path = store.root / FILE

    def all(self) -> dict[Pointer, str]:
        """Return every tag and alias with the digest of its version, sorted.

        Raises:
          StoreError: they or the index cannot be read.
        """
        with self._reading() as connection:
            if connection is None:
                return {}
            found = _pointers(connection)
        # After them: a version is in the index before anything names it.
        dangling = self._dangling(found)
        return {pointer: to for pointer, to in found.items() if pointer not in dangling}

    def _dangling(self, found: Mapping[Pointer, str]) -> set[Pointer]:
        """Return pointers to missing versions: a process was killed after it removed a version from
        the index and before it removed its names."""
        there = {(entry.name, entry.digest) for entry in self._store.entries()}
        return {pointer for pointer, to in found.items() if (pointer.name, to) not in there}

    def moves(self, pointer: Pointer) -> list[AliasMove]:
        """Return the moves of a tag or alias, newest first."""
        with self._reading() as connection:
            if connection is None:
                return []
            rows = connection.execute(
                "SELECT old, new, at FROM moves WHERE name = ? AND kind = ? AND label = ? "
                "ORDER BY id DESC",
                pointer,
            ).fetchall()
        return [AliasMove(*row) for row in rows]

    def move(self, pointer: Pointer, digest: str, expect: str | None = None) -> str:
        """Point a tag or alias to a version and return its previous digest, or ABSENT.

        Args:
          pointer: the tag or alias; moving `stable` sets `previous` to its old version.
          digest: a version of the same model.
          expect: digest that it must have now, ABSENT for none; None skips the check.

        Raises:
          StoreError: it points elsewhere, or the model has no such version in the store.
        """
        if pointer.kind is PointerKind.ALIAS and pointer.label == PREVIOUS:
            raise StoreError(
                f"{pointer} follows {pointer.name}@{STABLE} and cannot be set; move {STABLE} "
                "instead"
            )
        with self._changing() as connection:
            # Inside the transaction, because versions are removed in one too (collect.py).
            if (pointer.name, digest) not in {(e.name, e.digest) for e in self._store.entries()}:
                raise StoreError(
                    f"{pointer.name} has no version {digest}; `triolet model list` shows what "
                    "there is"
                )
            old = _target(connection, pointer)
            if old and self._dangling({pointer: old}):
                _set(connection, pointer, old, ABSENT)
                old = ABSENT
            if expect is not None and old != expect:
                _refuse_move(pointer, old, expect)
            self._require_signed(connection, pointer.name, [pointer], digest, ())
            if old != digest:
                _set(connection, pointer, old, digest)
                if pointer == alias_of(pointer.name, STABLE) and old:
                    previous = alias_of(pointer.name, PREVIOUS)
                    _set(connection, previous, _target(connection, previous), old)
        return old

    def tag_new(self, tag: Pointer, digest: str, how: str) -> None:
        """Tag a version that was just added to the store.

        Args:
          tag: the new tag.
          digest: digest of the version.
          how: how it was added, for the error: `imported`.

        Raises:
          StoreError: the tag belongs to another version.
        """
        old = self.all().get(tag, ABSENT)
        if old not in (ABSENT, digest):
            version = f"{tag.name}@{digest}"
            raise StoreError(
                f"{version} is {how}, but {tag} is {old} and stays; give another --tag, or move "
                f"it: `triolet model tag {version} {tag} --expect {old}`"
            )
        self.move(tag, digest, expect=old)

    def remove(self, pointer: Pointer) -> str:
        """Remove a tag or alias and return its digest.

        Raises:
          StoreError: it does not exist.
        """
        with self._changing() as connection:
            old = _target(connection, pointer)
            if not old:
                raise StoreError(f"there is no {pointer}; see `triolet model list`")
            _set(connection, pointer, old, ABSENT)
        return old

    def resolve(self, reference: Reference) -> str:
        """Return the digest of the version that a reference names.

        Raises:
          StoreError: it does not exist, or the name alone is ambiguous.
        """
        digests = [e.digest for e in self._store.entries() if e.name == reference.name]
        pointers = {p: to for p, to in self.all().items() if p.name == reference.name}
        if reference.pointer is not None:
            found = pointers.get(reference.pointer)
        elif reference.digest is not None:
            found = reference.digest if reference.digest in digests else None
        else:
            found = pointers.get(alias_of(reference.name, STABLE))
            if found is None and len(digests) == 1:
                found = digests[0]
            if found is None and digests:
                known = ", ".join(map(str, pointers)) or f"{reference.name}@{digests[0]}"
                raise StoreError(
                    f"{reference} has {len(digests)} versions and no alias {STABLE}: name one, "
                    f"such as {known}, or `triolet model alias {reference.name}@{STABLE} REF`"
                )
        if found is None and (evicted := Sources(self._store).evicted_as(reference)) is not None:
            raise StoreError(
                f"{reference} was evicted from the store {self._store.root} to keep to its limit; "
                f"`{evicted.command}` brings it back"
            )
        if found is None:
            names = ", ".join(sorted({e.name for e in self._store.entries()})) or "no model"
            raise StoreError(
                f"the store {self._store.root} has no {reference}; it has {names}: `triolet model "
                "list` shows all, `triolet model import` adds one"
            )
        return found

    def required_keys(self, scope: Reference) -> tuple[str, ...]:
        """Return the signing keys for a tag or alias, or for all of a model's tags and aliases.
        One of them must have signed the version. Empty if no signature is required."""
        with self._reading() as connection:
            return () if connection is None else _required(connection, *_scope(scope))

    def requires_signatures(self, name: str) -> bool:
        """Return whether a model, or one of its tags or aliases, requires signatures."""
        with self._reading() as connection:
            return connection is not None and bool(
                connection.execute("SELECT 1 FROM requirements WHERE name = ?", (name,)).fetchone()
            )

    def require_keys(self, scope: Reference, keys: Collection[str]) -> None:
        """Require signatures. Refused if a present version lacks one.

        Args:
          scope: a tag, an alias, or a model's name for all its tags and aliases.
          keys: one of them must have signed; empty ends the requirement.

        Raises:
          StoreError: a version that has one of the names now is not signed with any of the keys.
        """
        where = _scope(scope)
        with self._changing() as connection:
            connection.execute(
                "DELETE FROM requirements WHERE name = ? AND kind = ? AND label = ?", where
            )
            connection.executemany(
                "INSERT INTO requirements VALUES (?, ?, ?, ?)",
                [(*where, one) for one in sorted(set(keys))],
            )
            found = _pointers(connection)
            dangling = self._dangling(found)
            for pointer, digest in found.items():
                is_meant = pointer.name == scope.name and scope.pointer in (None, pointer)
                if is_meant and pointer not in dangling:
                    self._require_signed(connection, pointer.name, [pointer], digest, ())

    def require_signed(
        self, reference: Reference, digest: str, signers: Collection[str] = ()
    ) -> None:
        """Check that a version has the signature that a tag, an alias or a model requires.

        Args:
          reference: the name under which the version is to be known or served.
          digest: digest of the version.
          signers: keys that have signed it, in addition to those known to the store.

        Raises:
          StoreError: a signature is required, and none of the keys has signed.
        """
        pointers = [reference.pointer] if reference.pointer is not None else []
        stable = alias_of(reference.name, STABLE)
        if reference == Reference(reference.name) and self.all().get(stable) == digest:
            pointers = [stable]
        with self._reading() as connection:
            if connection is not None:
                self._require_signed(connection, reference.name, pointers, digest, signers)

    def _require_signed(
        self,
        connection: sqlite3.Connection,
        name: str,
        pointers: Collection[Pointer],
        digest: str,
        signers: Collection[str],
    ) -> None:
        scopes = [(str(pointer), tuple(pointer)) for pointer in pointers]
        for words, scope in [*scopes, (name, (name, *_WHOLE_MODEL))]:
            keys = _required(connection, *scope)
            if not keys or not set(keys).isdisjoint(signers):
                continue
            # Imported late: its libraries take longer to import than everything else.
            from .signatures import signatures_of

            found = signatures_of(self._store, digest)
            if set(keys).isdisjoint(found.keys):
                _refuse_unsigned(words, f"{name}@{digest}", keys, {*found.keys, *signers}, found)

    @contextmanager
    def unnamed(self, name: str, digest: str, but_for: Pointer | None = None) -> Iterator[None]:
        """Keep all tags and aliases unchanged while a version is removed from the index.

        Args:
          name: name of the model.
          digest: digest of the version.
          but_for: a pointer that may name it and is removed with it.

        Raises:
          NamedError: another pointer names the version.
        """
        with self._changing() as connection:
            rows = connection.execute(
                "SELECT name, kind, label FROM pointers WHERE name = ? AND digest = ? "
                "ORDER BY kind, label",
                (name, digest),
            ).fetchall()
            named = [Pointer(one, PointerKind(kind), label) for one, kind, label in rows]
            if but_for in named:
                named.remove(but_for)
                _set(connection, but_for, digest, ABSENT)
            if named:
                raise NamedError(
                    f"{name}@{digest} is {', '.join(map(str, named))}; it stays: remove "
                    f"{'that' if len(named) == 1 else 'those'} first, with `triolet model rm "
                    f"{named[0]}`"
                )
            yield

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        with (
            self._mapped(),
            closing(
                sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            ) as connection,
        ):
            connection.execute("PRAGMA synchronous = FULL")
            (form,) = connection.execute("PRAGMA user_version").fetchone()
            if form > _FORM:
                raise StoreError(
                    f"{self._path} has form {form}, this Triolet supports {_FORM}; use the one "
                    "that "
                    "wrote it"
                )
            with transaction(connection):
                if form < _FORM:
                    for statement in _SCHEMA:
                        connection.execute(statement)
                    connection.execute(f"PRAGMA user_version = {_FORM}")
                yield connection

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """Open for reading, even where this user may not write; None if there are no tags yet."""
        # The next process that may write rolls back an interrupted transaction.
        may_write = os.access(self._path, os.W_OK) and os.access(self._path.parent, os.W_OK)
        mode = "rw" if may_write else "ro"
        if not self._path.exists():
            yield None
            return
        with (
            self._mapped(),
            closing(
                sqlite3.connect(
                    f"{self._path.as_uri()}?mode={mode}",
                    uri=True,
                    timeout=BUSY_TIMEOUT_S,
                    isolation_level=None,
                )
            ) as connection,
        ):
            (form,) = connection.execute("PRAGMA user_version").fetchone()
            yield connection if form else None

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            with explained(self._path):
                yield
        except sqlite3.Error as error:
            raise StoreError(
                f"{self._path}: {error}; nothing was changed: check that the disk has room and "
                "that "
                "this user may write there, then try again"
            ) from error


def _refuse_move(pointer: Pointer, old: str, expect: str) -> NoReturn:
    if not old:
        raise StoreError(f"{pointer} does not exist, expected {expect}; leave out --expect")
    raise StoreError(
        f"{pointer} is {old}, expected {expect or 'no such tag or alias'}; it was not moved: check "
        f"it with `triolet model show {pointer}`, then decide again"
    )


def _refuse_unsigned(
    scope: str, version: str, keys: Collection[str], signers: Collection[str], found: Signed
) -> NoReturn:
    signed = f"is signed by {', '.join(sorted(signers))}" if signers else "is not signed"
    faults = f" ({'; '.join(found.faults)})" if found.faults else ""
    raise StoreError(
        f"{scope} requires a signature by {' or '.join(keys)}, and {version} {signed}"
        f"{faults}; nothing was changed: have it signed with such a key (`triolet model "
        f"sign {version} --key FILE`), or change the requirement by `triolet model require {scope}`"
    )


def _scope(reference: Reference) -> tuple[str, str, str]:
    """Return the database key of a requirement.

    Raises:
      StoreError: the reference names a version, which never changes.
    """
    if reference.digest is not None:
        raise StoreError(f"{reference} is a version; name a tag, an alias, or the model alone")
    if reference.pointer is None:
        return (reference.name, *_WHOLE_MODEL)
    if reference.pointer == alias_of(reference.name, PREVIOUS):
        raise StoreError(f"{reference} follows {reference.name}@{STABLE}; name {STABLE} instead")
    return reference.pointer


def _required(connection: sqlite3.Connection, name: str, kind: str, label: str) -> tuple[str, ...]:
    (form,) = connection.execute("PRAGMA user_version").fetchone()
    if form < _FORM:
        return ()
    rows = connection.execute(
        "SELECT key FROM requirements WHERE name = ? AND kind = ? AND label = ? ORDER BY key",
        (name, kind, label),
    ).fetchall()
    return tuple(key for (key,) in rows)


def _pointers(connection: sqlite3.Connection) -> dict[Pointer, str]:
    rows = connection.execute(
        "SELECT name, kind, label, digest FROM pointers ORDER BY name, kind, label"
    ).fetchall()
    return {Pointer(name, PointerKind(kind), label): to for name, kind, label, to in rows}


def _target(connection: sqlite3.Connection, pointer: Pointer) -> str:
    row = connection.execute(
        "SELECT digest FROM pointers WHERE name = ? AND kind = ? AND label = ?", pointer
    ).fetchone()
    return ABSENT if row is None else str(row[0])


def _set(connection: sqlite3.Connection, pointer: Pointer, old: str, new: str) -> None:
    if new:
        connection.execute("INSERT OR REPLACE INTO pointers VALUES (?, ?, ?, ?)", (*pointer, new))
    else:
        connection.execute(
            "DELETE FROM pointers WHERE name = ? AND kind = ? AND label = ?", pointer
        )
    connection.execute(
        "INSERT INTO moves (name, kind, label, old, new, at) VALUES (?, ?, ?, ?, ?, ?)",
        (*pointer, old, new, time.time()),
    )
    connection.execute(
        "DELETE FROM moves WHERE name = ? AND kind = ? AND label = ? AND id NOT IN (SELECT id FROM "
        "moves WHERE name = ? AND kind = ? AND label = ? ORDER BY id DESC LIMIT ?)",
        (*pointer, *pointer, MAX_MOVES),
    )

"""Tags and aliases: which version each means now and meant before, in SQLite."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from ..errors import StoreError
from ..sqlite import transaction
from .layout import explained
from .reference import Pointer, PointerKind, alias_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .layout import ModelStore
    from .reference import Reference

FILE: Final = "aliases.sqlite"
STABLE: Final = "stable"
PREVIOUS: Final = "previous"
"""What `stable` meant before its last move; no command moves it by itself."""
BUSY_TIMEOUT_S: Final = 10.0
"""For another process's transaction, which takes milliseconds."""
MAX_MOVES: Final = 1000
"""Of a tag or alias that are remembered: years of releases."""
ABSENT: Final = ""
"""As an expectation: there is no such tag or alias yet."""
_FORM: Final = 1
_SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS pointers (
        name TEXT NOT NULL, kind TEXT NOT NULL, label TEXT NOT NULL, digest TEXT NOT NULL,
        PRIMARY KEY (name, kind, label)) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS moves (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL, kind TEXT NOT NULL, label TEXT NOT NULL,
        old TEXT NOT NULL, new TEXT NOT NULL, at REAL NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS moves_of ON moves (name, kind, label, id)",
)


class Move(NamedTuple):
    """A change of a tag or alias.

    Attributes:
      old: digest before; empty if it is new.
      new: digest after; empty if it was removed.
      at: seconds since 1970.
    """

    old: str
    new: str
    at: float


class Aliases:
    """The tags and aliases of a store. Each call is a transaction of its own.

    Args:
      store: whose index says which versions there are.
    """

    def __init__(self, store: ModelStore) -> None:
        self._store = store
        self._path = store.root / FILE

    def all(self) -> dict[Pointer, str]:
        """Return every tag and alias with the digest of its version, sorted."""
        with self._reading() as connection:
            if connection is None:
                return {}
            rows = connection.execute(
                "SELECT name, kind, label, digest FROM pointers ORDER BY name, kind, label"
            ).fetchall()
        return {Pointer(name, PointerKind(kind), label): to for name, kind, label, to in rows}

    def moves(self, pointer: Pointer) -> list[Move]:
        """Return the moves of a tag or alias, the newest first."""
        with self._reading() as connection:
            if connection is None:
                return []
            rows = connection.execute(
                "SELECT old, new, at FROM moves WHERE name = ? AND kind = ? AND label = ? "
                "ORDER BY id DESC",
                pointer,
            ).fetchall()
        return [Move(*row) for row in rows]

    def move(self, pointer: Pointer, digest: str, expect: str | None = None) -> str:
        """Point a tag or alias to a version and return the digest that it had, or ABSENT.

        Args:
          pointer: which; with `stable`, `previous` moves to where it was.
          digest: a version of the same model.
          expect: what it must point to now, ABSENT for nothing; None for anything.

        Raises:
          StoreError: it points elsewhere, or the store has no such version of the model.
        """
        if pointer.kind is PointerKind.ALIAS and pointer.label == PREVIOUS:
            raise StoreError(
                f"{pointer} follows {pointer.name}@{STABLE} and is not set; move {STABLE} instead"
            )
        with self._changing() as connection:
            # In the transaction: a version is removed from the index in one too (collect.py).
            if (pointer.name, digest) not in {(e.name, e.digest) for e in self._store.entries()}:
                raise StoreError(
                    f"{pointer.name} has no version {digest}; `triolet model list` shows what "
                    "there is"
                )
            old = _target(connection, pointer)
            if expect is not None and old != expect:
                _refuse_move(pointer, old, expect)
            if old != digest:
                _set(connection, pointer, old, digest)
                if pointer == alias_of(pointer.name, STABLE) and old:
                    previous = alias_of(pointer.name, PREVIOUS)
                    _set(connection, previous, _target(connection, previous), old)
        return old

    def tag_new(self, tag: Pointer, digest: str, how: str) -> None:
        """Tag a version that has just come into the store.

        Args:
          tag: for it.
          digest: of the version.
          how: it came, for the error: `imported`.

        Raises:
          StoreError: the tag is another version.
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
        """Remove a tag or alias and return the digest that it had.

        Raises:
          StoreError: there is none.
        """
        with self._changing() as connection:
            old = _target(connection, pointer)
            if not old:
                raise StoreError(f"there is no {pointer}; `triolet model list` shows what there is")
            _set(connection, pointer, old, ABSENT)
        return old

    def resolve(self, reference: Reference) -> str:
        """Return the digest of the version that a reference means.

        Raises:
          StoreError: there is none, or the name alone does not say which.
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
                    f"{reference} has {len(digests)} versions and no alias {STABLE}: say which, "
                    f"such as {known}, or `triolet model alias {reference.name}@{STABLE} REF`"
                )
        if found is None:
            names = ", ".join(sorted({e.name for e in self._store.entries()})) or "no model"
            raise StoreError(
                f"the store {self._store.root} has no {reference}; it has {names}: `triolet model "
                "list` shows all, `triolet model import` adds one"
            )
        return found

    @contextmanager
    def unnamed(self, name: str, digest: str) -> Iterator[None]:
        """Keep all tags and aliases as they are while a version is removed from the index.

        Raises:
          StoreError: one names the version.
        """
        with self._changing() as connection:
            rows = connection.execute(
                "SELECT name, kind, label FROM pointers WHERE name = ? AND digest = ? "
                "ORDER BY kind, label",
                (name, digest),
            ).fetchall()
            if rows:
                named = [Pointer(one, PointerKind(kind), label) for one, kind, label in rows]
                raise StoreError(
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
            if form not in (0, _FORM):
                raise StoreError(
                    f"{self._path} is of form {form}, this Triolet knows {_FORM}; use the one that "
                    "wrote it"
                )
            with transaction(connection):
                if not form:
                    for statement in _SCHEMA:
                        connection.execute(statement)
                    connection.execute(f"PRAGMA user_version = {_FORM}")
                yield connection

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """Read also where this user may not write; None where there are no tags yet."""
        # A transaction that was cut off is undone by the next process that may write.
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
                f"{self._path}: {error}; nothing was changed: see that the disk has room and that "
                "this user may write there, then try again"
            ) from error


def _refuse_move(pointer: Pointer, old: str, expect: str) -> NoReturn:
    if not old:
        raise StoreError(f"{pointer} is not there, expected {expect}; leave --expect away")
    raise StoreError(
        f"{pointer} is {old}, expected {expect or 'no such tag or alias'}; it was not moved: look "
        f"at it with `triolet model show {pointer}`, and decide again"
    )


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

"""Changes of the operator's file of tenants; text written by hand stays as it is.

A change is made to the whole text, checked as a server checks it, and replaces the file
atomically: readers see the old file or the new one. Keys are given as digests only.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import tomlkit
from tomlkit.exceptions import TOMLKitError

from triolet.errors import ConfigError
from triolet.tenants.api_keys import digest_of
from triolet.tenants.form import DEFAULT_PLAN, DIGEST_PREFIX, is_name, read_tenants
from triolet.tenants.plans import TenantRole

from ..audit.events import digest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tomlkit import TOMLDocument

    from ..audit.events import Action

MODE: Final = 0o600
LOCK_TIMEOUT_S: Final = 10.0
"""Longest wait for another command that changes files of the folder; it takes milliseconds."""
LOCK_POLL_S: Final = 0.02
HEADER: Final = """\
# Tenants of a Triolet server: `triolet tenant` adds them; plans and prices are written by hand.
# Servers notice a change by themselves. docs/TENANTS.md says what may stand here.

# Keeps apart what tenants have cached. Whoever changes it empties their caches.
cache_secret = "{secret}"

[plans.default]
# weight = 1
# classes = ["default", "sheddable", "batch"]
# requests_per_minute = 600
# tokens_per_minute = 200_000
"""


class Change(NamedTuple):
    """What a command does, for the audit log.

    Attributes:
      action: what is done.
      tenant: to which tenant.
      folder: of the log; None for this user's.
    """

    action: Action
    tenant: str
    folder: Path | None


@contextmanager
def edited(path: Path, change: Change, *, may_make: bool = False) -> Iterator[TOMLDocument]:
    """Give out the file's document; record its change and write it back if nothing went wrong.

    Args:
      path: of the file.
      change: what is done, with digests of the file before and afterwards.
      may_make: whether one that does not exist is begun.

    Raises:
      ConfigError: it cannot be read or written, or would be refused by a server.
      AuditLogError: the change could not be recorded, and was not made.
    """
    path = path.resolve()  # a link stays one
    try:
        with _only_one(path.parent):
            before = digest(path.read_bytes()) if path.exists() else None
            text = _text(path, may_make=may_make)
            document = tomlkit.parse(text)
            yield document
            content = tomlkit.dumps(document).encode()
            read_tenants(content, str(path))
            from ..audit.recording import recorded  # with its library of signatures

            with recorded(
                change.action,
                change.tenant,
                folder=change.folder,
                before=before,
                after=digest(content),
            ):
                _replace(path, content)
    except OSError as error:
        raise ConfigError(f"the file of tenants cannot be changed: {error}") from error
    except TOMLKitError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None


def add_tenant(document: TOMLDocument, name: str, key: str, plan: str, role: TenantRole) -> None:
    """Add a tenant with its first key.

    Raises:
      ConfigError: there is one of the name, or it is no name.
    """
    if not is_name(name):
        raise ConfigError(
            f"{name!r} is no name of a tenant: up to 64 letters, digits, dots, - and _"
        )
    tenants = document.setdefault("tenants", tomlkit.table(is_super_table=True))
    if name in tenants:
        raise ConfigError(f"there is a tenant {name}; `triolet tenant rotate` gives it another key")
    table = tomlkit.table()
    if plan != DEFAULT_PLAN:
        table["plan"] = plan
    if role is not TenantRole.USER:
        table["role"] = role.value
    table["keys"] = _array([_digest(key)])
    tenants[name] = table


def rotate_keys(document: TOMLDocument, name: str, key: str, grace_s: float, now: datetime) -> None:
    """Give a tenant another key.

    Args:
      document: of the file.
      name: of the tenant.
      key: the new one.
      grace_s: how long those that it has stay good, if they would; 0 for no more.
      now: with its time zone.

    Raises:
      ConfigError: there is no such tenant.
    """
    table = _tenant(document, name)
    end = (now + timedelta(seconds=grace_s)).astimezone(UTC).replace(microsecond=0)
    kept: list[object] = []
    for entry in table.get("keys", []) if grace_s else []:
        digest, until = (entry, end) if isinstance(entry, str) else _dated(entry, name)
        if until > now:
            inline = tomlkit.inline_table()
            inline["digest"], inline["until"] = str(digest), min(until, end)
            kept.append(inline)
    table["keys"] = _array([*kept, _digest(key)])


def set_disabled(document: TOMLDocument, name: str, *, is_disabled: bool) -> None:
    """Shut a tenant out, or let it in again.

    Raises:
      ConfigError: there is no such tenant.
    """
    table = _tenant(document, name)
    if is_disabled:
        table["disabled"] = True
    else:
        table.pop("disabled", None)


def _tenant(document: TOMLDocument, name: str) -> Any:  # noqa: ANN401 (tomlkit's tables)
    table = document.get("tenants", {}).get(name)
    if not isinstance(table, dict):
        raise ConfigError(f"there is no tenant {name!r}; `triolet tenant list` shows them")
    return table


def _dated(entry: Any, name: str) -> tuple[object, datetime]:  # noqa: ANN401 (tomlkit's tables)
    until = entry.get("until") if isinstance(entry, dict) else None
    if not isinstance(until, datetime) or until.tzinfo is None:
        raise ConfigError(
            f'a key of the tenant {name!r} is neither "sha256:..." nor '
            "{ digest, until }; correct it in the file of tenants"
        )
    return entry["digest"], until


def _digest(key: str) -> str:
    return DIGEST_PREFIX + digest_of(key)


def _array(items: list[object]) -> Any:  # noqa: ANN401 (tomlkit's arrays)
    array = tomlkit.array()
    array.extend(items)
    return array.multiline(len(items) > 1)


def _lock(descriptor: int, directory: Path) -> None:
    give_up = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up:
                raise ConfigError(
                    f"another command has been changing files in {directory} for "
                    f"{LOCK_TIMEOUT_S:g} s; wait for it, or end it, and try again"
                ) from None
            time.sleep(LOCK_POLL_S)
        else:
            return


@contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """Let no other command change a file here meanwhile: its change would be lost.

    Raises:
      ConfigError: another command does not end.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, directory)
        yield
    finally:
        os.close(descriptor)


def _text(path: Path, *, may_make: bool) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    except FileNotFoundError:
        if may_make:
            return HEADER.format(secret=secrets.token_hex(32))
        raise ConfigError(f"{path} does not exist; `triolet tenant add NAME` makes it") from None


def _replace(path: Path, content: bytes) -> None:
    """Let a file have other content, at once and for good."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # of mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            if os.geteuid() == 0 and path.exists():
                # A server that runs as somebody else must go on reading it.
                status = path.stat()
                os.fchown(file.fileno(), status.st_uid, status.st_gid)
            os.fchmod(file.fileno(), MODE)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise

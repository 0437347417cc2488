"""Edits the tenants file and keeps comments and formatting written by hand.

Each change is validated as a server validates the file, recorded in the audit log, and written
atomically: readers see the old file or the new one. Only digests of keys are stored.
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
"""Longest wait for another command that edits files in the directory; each takes milliseconds."""
LOCK_POLL_S: Final = 0.02
HEADER: Final = """\
# Tenants of a Triolet server: `triolet tenant` adds them; plans and prices are written by hand.
# Servers reload it when it changes. docs/TENANTS.md describes the format.

# Keeps the cached prompts of tenants apart. Changing it empties their caches.
cache_secret = "{secret}"

[plans.default]
# weight = 1
# classes = ["default", "sheddable", "batch"]
# requests_per_minute = 600
# tokens_per_minute = 200_000
"""


class Change(NamedTuple):
    """A change to record in the audit log.

    Attributes:
      action: kind of change.
      tenant: name of the changed tenant.
      folder: directory of the log; None for this user's.
    """

    action: Action
    tenant: str
    folder: Path | None


@contextmanager
def edited(path: Path, change: Change, *, may_make: bool = False) -> Iterator[TOMLDocument]:
    """Yield the file's document for editing. On success, record the change and write the file.

    Args:
      path: path of the file.
      change: entry for the audit log; digests of the file before and after are added.
      may_make: create the file if it does not exist.

    Raises:
      ConfigError: the file cannot be read or written, or a server would refuse it.
      AuditLogError: the change could not be recorded and was not made.
    """
    path = path.resolve()  # so that replacing the file keeps a symbolic link
    try:
        with _only_one(path.parent):
            before = digest(path.read_bytes()) if path.exists() else None
            text = _text(path, may_make=may_make)
            document = tomlkit.parse(text)
            yield document
            content = tomlkit.dumps(document).encode()
            read_tenants(content, str(path))
            from ..audit.recording import recorded  # slow: loads a signature library

            with recorded(
                change.action,
                change.tenant,
                folder=change.folder,
                before=before,
                after=digest(content),
            ):
                _replace(path, content)
    except OSError as error:
        raise ConfigError(f"the tenants file cannot be changed: {error}") from error
    except TOMLKitError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def add_tenant(document: TOMLDocument, name: str, key: str, plan: str, role: TenantRole) -> None:
    """Add a tenant with its first key.

    Raises:
      ConfigError: the name is taken or invalid.
    """
    if not is_name(name):
        raise ConfigError(
            f"{name!r} is not a tenant name; allowed: up to 64 letters, digits, dots, - and _"
        )
    tenants = document.setdefault("tenants", tomlkit.table(is_super_table=True))
    if name in tenants:
        raise ConfigError(
            f"tenant {name} already exists; `triolet tenant rotate` gives it a new key"
        )
    table = tomlkit.table()
    if plan != DEFAULT_PLAN:
        table["plan"] = plan
    if role is not TenantRole.USER:
        table["role"] = role.value
    table["keys"] = _array([_digest(key)])
    tenants[name] = table


def rotate_keys(document: TOMLDocument, name: str, key: str, grace_s: float, now: datetime) -> None:
    """Give a tenant a new key and let its old keys expire.

    Args:
      document: the tenants file.
      name: name of the tenant.
      key: the new key.
      grace_s: seconds until the old keys expire, unless they expire earlier; 0 removes them.
      now: current time with a time zone.

    Raises:
      ConfigError: the tenant does not exist.
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
    """Disable or enable a tenant.

    Raises:
      ConfigError: the tenant does not exist.
    """
    table = _tenant(document, name)
    if is_disabled:
        table["disabled"] = True
    else:
        table.pop("disabled", None)


def _tenant(document: TOMLDocument, name: str) -> Any:  # noqa: ANN401 (tomlkit's tables)
    table = document.get("tenants", {}).get(name)
    if not isinstance(table, dict):
        raise ConfigError(f"no tenant is called {name!r}; `triolet tenant list` shows all tenants")
    return table


def _dated(entry: Any, name: str) -> tuple[object, datetime]:  # noqa: ANN401 (tomlkit's tables)
    until = entry.get("until") if isinstance(entry, dict) else None
    if not isinstance(until, datetime) or until.tzinfo is None:
        raise ConfigError(
            f'a key of the tenant {name!r} is neither "sha256:..." nor '
            "{ digest, until }; correct it in the tenants file"
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
                    f"another command has locked {directory} for {LOCK_TIMEOUT_S:g} s; wait for "
                    "it to end, or end it, and try again"
                ) from None
            time.sleep(LOCK_POLL_S)
        else:
            return


@contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """Lock the directory, so that concurrent commands do not overwrite each other's changes.

    Raises:
      ConfigError: another command holds the lock too long.
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
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except FileNotFoundError:
        if may_make:
            return HEADER.format(secret=secrets.token_hex(32))
        raise ConfigError(f"{path} does not exist; `triolet tenant add NAME` creates it") from None


def _replace(path: Path, content: bytes) -> None:
    """Replace the content of a file atomically and durably."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # of mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            if os.geteuid() == 0 and path.exists():
                # Keep the owner: a server that runs as another user must be able to read it.
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

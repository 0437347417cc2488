"""Records actions in the audit log: `record` for one event, `recorded` as a context around an
action."""

from __future__ import annotations

import os
import secrets
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from triolet.errors import AuditLogError, ConfigError, TrioletError
from triolet.home import state_home

from .events import Action, AuditEvent, AuditOutcome, os_user
from .log import AuditLog

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

log = structlog.get_logger(__name__)

REQUEST_ID_BYTES: Final = 8


_KINDS: Final = (
    (ConfigError, "invalid input"),
    (TrioletError, "failed before the end"),
    (OSError, "refused by the operating system"),
    (Exception, "unexpected error"),
)


def why_failed(error: BaseException) -> str:
    """Return the kind of a failure. Error texts are not recorded: they could contain user input."""
    return next((words for kind, words in _KINDS if isinstance(error, kind)), "interrupted")


def default_folder() -> Path:
    """Return the directory of this user's log.

    Raises:
      AuditLogError: this user has no home directory.
    """
    try:
        return state_home() / "triolet" / "audit"
    except ConfigError as error:
        raise AuditLogError(f"{error}, or give the audit log's directory with --audit") from error


def record(
    action: Action,
    subject: str,
    *,
    folder: Path | None = None,
    actor: str | None = None,
    outcome: AuditOutcome = AuditOutcome.DONE,
    before: str | None = None,
    after: str | None = None,
    counts: Mapping[str, int] | None = None,
    reason: str | None = None,
    request_id: str | None = None,
) -> int:
    """Append an event to a log and return its index once it is on disk and signed.

    Args:
      action: kind of action.
      subject: what it was done to. Bytes that are not UTF-8 are escaped.
      folder: directory of the log; None for this user's.
      actor: who did it; None for this user.
      outcome: begun, done or failed.
      before: digest of the state before (`events.digest`).
      after: digest of the state afterwards.
      counts: figures.
      reason: why it failed.
      request_id: id shared by all entries of an action.

    Raises:
      AuditLogError: it was not recorded.
      ConfigError: other users can read the directory, and this user cannot change that.
    """
    with AuditLog(default_folder() if folder is None else folder) as opened:
        return opened.append(
            AuditEvent(
                action=action,
                subject=os.fsencode(subject).decode("utf-8", "backslashreplace"),
                actor=os_user() if actor is None else actor,
                outcome=outcome,
                before=before,
                after=after,
                counts=None if counts is None else dict(counts),
                reason=reason,
                request_id=request_id,
            )
        )


@dataclass(slots=True)
class Recorded:
    """A running action.

    Attributes:
      request_id: id of its entries.
      before: digest of the state before, once known.
      after: digest of the state afterwards, once known.
      counts: figures.
    """

    request_id: str
    before: str | None = None
    after: str | None = None
    counts: Mapping[str, int] | None = None


@contextmanager
def recorded(
    action: Action,
    subject: str,
    *,
    folder: Path | None = None,
    before: str | None = None,
    after: str | None = None,
) -> Iterator[Recorded]:
    """Record the start of an action before it, and its end after it.

    Args:
      action: kind of action.
      subject: what it is done to.
      folder: directory of the log; None for this user's.
      before: digest of the state before.
      after: digest of the state afterwards.

    Yields:
      The action, whose digests and figures may be set before it ends.

    Raises:
      AuditLogError: the start was not recorded and the action not started, or its end was not
        recorded.
      ConfigError: other users can read the directory, and this user cannot change that.
    """
    running = Recorded(secrets.token_hex(REQUEST_ID_BYTES), before)
    request_id = running.request_id

    def note(outcome: AuditOutcome, after: str | None = None, reason: str | None = None) -> None:
        record(
            action,
            subject,
            folder=folder,
            outcome=outcome,
            before=running.before,
            after=after,
            counts=running.counts,
            reason=reason,
            request_id=request_id,
        )

    note(AuditOutcome.BEGUN)
    try:
        yield running
    except BaseException as error:
        try:
            note(AuditOutcome.FAILED, reason=why_failed(error))
        except AuditLogError as unrecorded:
            # Raise the action's own error, which is more useful. Its start is recorded.
            log.error("audit_end_not_recorded", request_id=request_id, error=str(unrecorded))
        raise
    try:
        note(AuditOutcome.DONE, running.after or after)
    except AuditLogError as error:
        raise AuditLogError(
            f"{action.value} {subject} was done, but the audit log has only its start (request "
            f"{request_id}), not its end: {error}"
        ) from error

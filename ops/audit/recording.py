"""How a command records what it does: one call, or a context around the action."""

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
    (ConfigError, "it cannot work as it was given"),
    (TrioletError, "it was begun and could not be finished"),
    (OSError, "the operating system refused it"),
    (Exception, "an unexpected error"),
)


def why_failed(error: BaseException) -> str:
    """Return why an action failed: what kind of failure it was, and nothing that could hold a part
    of what was given."""
    return next((words for kind, words in _KINDS if isinstance(error, kind)), "it was interrupted")


def default_folder() -> Path:
    """Return where this user's log is.

    Raises:
      AuditLogError: this user has no home directory.
    """
    try:
        return state_home() / "triolet" / "audit"
    except ConfigError as error:
        raise AuditLogError(f"{error}, or name the folder of the audit log with --audit") from error


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
    """Append one event to a log and return its index; it is on disk and signed then.

    Args:
      action: what was done.
      subject: to what. Bytes of a path that are no text are written as escapes.
      folder: of the log; None for this user's.
      actor: None for this user.
      outcome: how far it came.
      before: digest of the state before (`events.digest`).
      after: digest of the state afterwards.
      counts: figures of it.
      reason: why it failed.
      request_id: ties entries of one action together.

    Raises:
      AuditLogError: it was not recorded.
      ConfigError: others may read the folder, and this user may not change that.
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
    """An action under way.

    Attributes:
      request_id: of its entries.
      before: digest of the state before, once it is known.
      after: digest of the state afterwards, once it is known.
      counts: figures of it.
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
    """Record an action's begin before it, so that none goes unrecorded, and its end after it.

    Args:
      action: what is done inside the context.
      subject: to what.
      folder: of the log; None for this user's.
      before: digest of the state before.
      after: digest of the state that the action leads to.

    Yields:
      The action, which may say its digests and figures before it ends.

    Raises:
      AuditLogError: the begin was not recorded, and the action not begun; or its end was not.
      ConfigError: others may read the folder, and this user may not change that.
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
            # The action's own failure says more. Its begin is recorded.
            log.error("audit_end_not_recorded", request_id=request_id, error=str(unrecorded))
        raise
    try:
        note(AuditOutcome.DONE, running.after or after)
    except AuditLogError as error:
        raise AuditLogError(
            f"{action.value} {subject} was done, and entry {request_id} of the audit log says that "
            f"it began, but not that it ended: {error}"
        ) from error

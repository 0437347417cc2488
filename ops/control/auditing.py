"""Audit log entries for operations that were requested on the admin routes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from triolet.errors import AuditLogError, ConfigError

from ..audit.events import Action, AuditOutcome
from ..audit.recording import record
from .operations import WantedState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .operations import Operation

AUDITED: Final = {
    WantedState.LOAD: Action.MODEL_LOAD,
    WantedState.SLEEP: Action.MODEL_SLEEP,
    WantedState.UNLOAD: Action.MODEL_UNLOAD,
    WantedState.ADD: Action.MODEL_ADD,
    WantedState.DROP: Action.MODEL_DROP,
    WantedState.SWITCH: Action.MODEL_SWITCH,
    WantedState.LOAD_ADAPTER: Action.ADAPTER_LOAD,
    WantedState.UNLOAD_ADAPTER: Action.ADAPTER_UNLOAD,
}


def is_ordered(operation: Operation) -> bool:
    """Return whether an operation was requested on the admin routes."""
    return operation.actor.startswith("user:") or is_of_port(operation)


def is_of_port(operation: Operation) -> bool:
    """Return whether it was requested on the TCP port, which all local users can reach."""
    return operation.actor.startswith("port:")


async def audit(
    action: Action,
    subject: str,
    actor: str,
    operation_id: str,
    outcome: AuditOutcome,
    reason: str = "",
    after: str = "",
    counts: Mapping[str, int] | None = None,
) -> None:
    """Record an operation that was requested on the admin routes, or a change of a rollout.

    Args:
      action: kind of action.
      subject: the model or adapter.
      actor: who requested it.
      operation_id: id shared by all entries of the operation.
      outcome: begun, done or failed.
      reason: why it failed, or why a rollout has changed.
      after: digest of an added version or loaded adapter; empty for other operations.
      counts: figures.

    Raises:
      AuditLogError: it was not recorded.
    """
    try:
        await trio.to_thread.run_sync(
            partial(
                record,
                action,
                subject,
                actor=actor,
                outcome=outcome,
                after=after or None,
                counts=counts,
                reason=reason or None,
                request_id=operation_id,
            )
        )
    except ConfigError as error:
        raise AuditLogError(str(error)) from error

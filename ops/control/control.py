"""The I/O around the Controller: connects it to the supervisor, the servers and the journal.

Decisions are written to the journal before they are carried out, and all requests to the supervisor
are idempotent. A new process can therefore continue after a crash at any point.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
import trio

from transport.control_protocol import Activity, Observed, Wake
from triolet.config import SEPARATOR
from triolet.errors import AuditLogError

from ..audit.events import AuditOutcome
from ..exit_codes import CommandFailed
from ..supervisor.supervisor_socket import (
    StartModelRequest,
    StopModelRequest,
    ask,
    ask_models,
)
from .auditing import AUDITED, audit, is_ordered
from .changes import NO_SUPERVISOR, Changes
from .memory import forget_pages, has_files, held_bytes
from .model_states import RUNNING
from .models import owner_of
from .operations import Conflict, Operation, OperationStatus, WantedState
from .rollout_stores import RedisRollouts
from .rollouts import Rollouts
from .server_channel import ServerChannel
from .worker_seconds import Version

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from transport.control_protocol import ModelNews, Said
    from triolet.config import ControlConfig

    from ..supervisor.supervisor_socket import ModelsAnswer
    from .controller import Controller, ControlStep
    from .journal import Journal
    from .models import Model

log = structlog.get_logger(__name__)

ID_BYTES: Final = 6
SUPERVISOR: Final = "supervisor"
JOURNAL: Final = "journal"
ACCOUNT_S: Final = 10.0
"""Interval of writing worker-seconds to the journal. A crash loses none of them: the supervisor
reports them to the next process."""


def wall() -> float:
    """Return the seconds since the epoch."""
    return time.time()


class Control:
    """The control of one fleet.

    Args:
      config: config of the fleet.
      journal: open journal.
      controller: makes the decisions.
      supervisor: socket of the supervisor, which starts and stops workers.
      nursery: runs the steps of operations.
      fence: fence of a control without a supervisor; 0 with one.

    Attributes:
      config: config of control.
      controller: the decisions.
      account: worker-seconds.
      channel: connections of servers.
      run_id: id of the supervisor's run; empty before its first answer.
      changes: operations that change the fleet's models.
      rollouts: rollouts of versions.
    """

    def __init__(
        self,
        config: ControlConfig,
        journal: Journal,
        controller: Controller,
        supervisor: Path,
        nursery: trio.Nursery,
        fence: int = 0,
    ) -> None:
        self.config = config
        self.controller = controller
        self.account = journal.account()
        self.channel = ServerChannel(
            config,
            self._hear,
            lambda zone: self.rollouts.with_rollouts(self.changes.switches.told(self.news), zone),
            lambda: self.rollouts.are_looked_at(),
        )
        self._journal = journal
        self._supervisor = supervisor
        self._nursery = nursery
        self._written: tuple[object, ...] = ()
        self._accounted_at = 0.0
        self._troubles: dict[str, str] = {}
        self.run_id = "" if not fence else "alone"
        self.changes = Changes(
            config, controller, supervisor, self._settle, self._forget, wall, nursery, fence
        )
        is_redis = bool(fence and config.redis.url)
        self.rollouts = Rollouts(
            config,
            controller,
            self.changes,
            supervisor,
            RedisRollouts(config.redis) if is_redis else journal.rollouts(),
            self.channel.publish,
            wall,
            lambda: self.run_id,
            nursery,
        )

    def news(self) -> tuple[ModelNews, ...]:
        """Return the model states to publish to servers."""
        seconds = self.account.by_model()
        return tuple(
            msgspec.structs.replace(one, worker_seconds=seconds.get(one.name, {}))
            for one in self.controller.outlook.news(trio.current_time())
        )

    def order(self, name: str, wanted: WantedState, actor: str, operation_id: str) -> Operation:
        """Start an operation that loads, sleeps or unloads a model.

        Raises:
          UnknownModel: no model has this name.
          NoRoom: it can never be loaded.
          Conflict: the model is being added or dropped.
        """
        if self.changes.switches.fence:
            raise Conflict(NO_SUPERVISOR)
        self.changes.require_free(name)
        now = trio.current_time()
        operation = self.controller.order(name, wanted, actor, now, wall(), operation_id)
        self._settle()
        return operation

    def change(self, name: str, wanted: WantedState, actor: str, settings: str = "") -> Operation:
        """Return a new operation that adds, drops or switches a model, or changes its adapters.

        Args:
          name: name of the model.
          wanted: kind of operation.
          actor: who requested it.
          settings: settings of the operation, as JSON.

        Raises:
          Conflict: it cannot start now.
          UnknownModel: no model has this name.
        """
        operation = Operation(
            new_id(), name, wanted, actor, wall(), settings=settings, run=self.run_id
        )
        self.changes.require(operation)
        return operation

    def begin(self, operation: Operation) -> None:
        """Write an operation from `change` to the journal and start it.

        Raises:
          Conflict: it cannot start now, or the journal cannot be written.
          UnknownModel: its model was dropped in the meantime.
        """
        self.changes.require(operation)
        if not operation.run:
            raise Conflict("the supervisor of this fleet does not answer; try again in a minute")
        self.controller.changed[operation.id] = operation
        self._write()
        if operation.id in self.controller.changed:
            del self.controller.changed[operation.id]
            raise Conflict(
                f"the journal cannot be written: {self._troubles[JOURNAL]}; free disk space, and "
                "try again"
            )
        self.changes.begin(operation)

    def _forget(self, name: str) -> None:
        self.account.note_dropped(lambda one: one != name)
        try:
            self._journal.forget(name)
        except sqlite3.Error as error:
            self._note_trouble(JOURNAL, str(error))

    def operation(self, operation_id: str) -> Operation | None:
        """Return an operation, or None if it does not exist or ended long ago."""
        return self.controller.changed.get(operation_id) or self._journal.operation(operation_id)

    async def look(self) -> None:
        """Fetch the workers from the supervisor, and check the files of models without workers."""
        if self.changes.switches.fence:
            return
        asked_at = trio.current_time()
        try:
            listed = await ask_models(self._supervisor)
        except CommandFailed as error:
            self._note_trouble(SUPERVISOR, str(error))
            return
        self._note_trouble(SUPERVISOR, "")
        self.run_id = listed.run
        self.changes.note_listed(listed, asked_at)
        self.controller.note_workers(listed.models, asked_at, trio.current_time(), wall())
        for name, model in list(self.controller.models.items()):
            if not model.pids:
                are_there = await trio.to_thread.run_sync(has_files, model.config)
                self.controller.note_files(name, are_there=are_there, now=trio.current_time())
        self._meter(listed)
        self._settle()
        await self._measure(lambda model: not model.is_measured)

    async def measure(self) -> None:
        """Measure the memory of every model with ready workers."""
        await self._measure(lambda model: True)

    async def _measure(self, is_wanted: Callable[[Model], bool]) -> None:
        for name, model in list(self.controller.models.items()):
            pids = model.pids
            if model.state not in RUNNING or not pids or not is_wanted(model):
                continue
            size_bytes = await trio.to_thread.run_sync(held_bytes, pids)
            if model.pids == pids:
                self.controller.note_size(name, size_bytes)

    async def run(self) -> None:
        """Poll, measure and decide until cancelled."""
        self._nursery.start_soon(_repeat, self.look, self.config.poll_s)
        self._nursery.start_soon(_repeat, self.measure, self.config.measure_s)
        while True:
            self._settle()
            await trio.sleep(self.config.tick_s)

    def _hear(self, said: Said) -> None:
        now = trio.current_time()
        match said:
            case Activity():
                if self.changes.switches.fence:
                    self.changes.switches.hear(said)
                self.controller.note_activity(said, now)
                self.rollouts.hear(said)
            case Observed():
                self.rollouts.hear(said)
                return
            case Wake(name):
                model = owner_of(self.controller.models, name)
                # Requests may wake a version that is being replaced, but not a new one.
                live = self.changes.under_way.get(model)
                if live is None or (live.switch is not None and live.model != model):
                    self.controller.wake(model, now, wall())
        self._settle()

    def _settle(self) -> None:
        """Decide, write the journal, notify servers, and start the steps."""
        steps = self.controller.tick(trio.current_time(), wall())
        self._write()
        for step in steps:
            self._nursery.start_soon(self._do, step)

    def _write(self) -> None:
        """Notify servers and write changes to the journal."""
        control = self.controller
        # Rollouts are in a store of their own.
        changed = [one for one in control.changed.values() if one.wanted is not WantedState.ROLLOUT]
        models = tuple((m.config.name, m.state, m.size_bytes) for m in control.models.values())
        if not changed and models == self._written:
            return
        self.channel.publish()
        try:
            self._journal.write(changed, control.models.values(), control.load_times.seconds)
        except sqlite3.Error as error:
            # Continue without the journal: requests wait, and only the next process reads it.
            self._note_trouble(JOURNAL, str(error))
            return
        self._note_trouble(JOURNAL, "")
        self._written = models
        control.changed.clear()
        for operation in changed:
            if operation.is_over:
                log.info("operation_over", **operation.shown)
                if is_ordered(operation):
                    self._nursery.start_soon(self._audit_end, operation)

    async def _do(self, step: ControlStep) -> None:
        """Have the supervisor carry out a step."""
        operation, failure = step.operation, None
        model = self.controller.models.get(operation.model)
        if model is None:
            return  # the model was dropped, which ended the operation
        request = StartModelRequest if step.is_start else StopModelRequest
        try:
            with trio.fail_after(self.config.operation_timeout_s):
                tell = partial(self.controller.note_progress, operation)
                await ask(self._supervisor, request(operation.model), tell)
        except trio.TooSlowError:
            failure = f"the supervisor was not done after {self.config.operation_timeout_s:g} s"
        except CommandFailed as error:
            failure = str(error)
        if failure is None and operation.wanted is WantedState.UNLOAD:
            await trio.to_thread.run_sync(forget_pages, model.config)
        self.controller.step_done(operation, failure, trio.current_time(), wall())
        self._settle()
        if step.is_start:
            await self.look()

    async def _audit_end(self, operation: Operation) -> None:
        is_done = operation.status is OperationStatus.DONE
        digest = self._digest(operation) if is_done else ""
        try:
            await audit(
                AUDITED[operation.wanted],
                operation.subject,
                operation.actor,
                operation.id,
                AuditOutcome.DONE if is_done else AuditOutcome.FAILED,
                after=digest,
            )
        except AuditLogError as error:
            log.error("audit_end_not_recorded", request_id=operation.id, error=str(error))

    def _digest(self, operation: Operation) -> str:
        """Return the digest of the model or adapter that an operation added, or an empty string."""
        model = self.controller.models.get(operation.model)
        if model is None:
            return ""
        if operation.wanted is WantedState.LOAD_ADAPTER:
            adapter = operation.subject.rpartition(SEPARATOR)[2]
            return model.config.adapters.get(adapter, "")
        is_new = operation.wanted in (WantedState.ADD, WantedState.SWITCH)
        return model.config.digest if is_new else ""

    def _meter(self, listed: ModelsAnswer) -> None:
        """Update the worker-seconds."""
        models = self.controller.models
        told = {
            Version(one.name, models[one.name].config.digest): one.worker_seconds
            for one in listed.models
            if one.name in models
        }
        self.account.note_dropped({one.name for one in listed.models}.__contains__)
        self.account.note(listed.run, told)
        now = trio.current_time()
        if now - self._accounted_at >= ACCOUNT_S:
            self._accounted_at = now
            self.write_account()

    def write_account(self) -> None:
        """Write worker-seconds to the journal."""
        try:
            self._journal.write_account(self.account)
        except sqlite3.Error as error:
            self._note_trouble(JOURNAL, str(error))

    def _note_trouble(self, what: str, reason: str) -> None:
        """Log a problem when it begins or changes. An empty reason means that it is over."""
        if reason and reason != self._troubles.get(what):
            log.warning("control_in_trouble", part=what, reason=reason)
        self._troubles[what] = reason


async def _repeat(work: Callable[[], Awaitable[None]], every_s: float) -> None:
    while True:
        await work()
        await trio.sleep(every_s)


def new_id() -> str:
    """Return a new operation id."""
    return secrets.token_hex(ID_BYTES)

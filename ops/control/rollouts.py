"""Carries out rollouts: adds the candidate, judges what servers report, renews routes, and removes
one of the versions at the end.

A rollout is in a store (`rollout_stores`) before it begins, and after each change. Control renews
the route of its step only after a successful write or renewal there, so servers fall back to the
stable version if control or its store is away for `VALID_S`. The next control goes on.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
import trio

from transport.control_protocol import Activity, Observed
from transport.rollout_protocol import RolloutPhase, WorkDone
from triolet.config.routes import Route
from triolet.errors import AuditLogError
from triolet.units import SECONDS

from ..audit.events import Action, AuditOutcome
from ..exit_codes import CommandFailed
from ..rollouts.rollout import VALID_S, RolloutOrder
from ..supervisor.supervisor_socket import AddVersionRequest, RouteRequest, ask_models
from .auditing import audit, is_of_port
from .live_rollout import LiveRollout
from .memory import expected_bytes
from .operations import (
    Conflict,
    NoRoom,
    Operation,
    OperationFailed,
    OperationStatus,
    SwitchOrder,
    UnknownRollout,
    WantedState,
)
from .rollout_stores import KeptRollout, RolloutStolen, RolloutStoreAway

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from transport.control_protocol import Models
    from transport.rollout_protocol import RolloutNote
    from triolet.config import ControlConfig

    from ..rollouts.plan import RolloutPlan
    from ..rollouts.rollout import Rollout
    from .changes import Changes
    from .controller import Controller
    from .models import Model
    from .rollout_stores import RolloutStore

log = structlog.get_logger(__name__)

RENEW_S: Final = 2.0 * SECONDS
"""Interval of looks and renewals."""
WRITE_S: Final = 10.0 * SECONDS
"""Interval of writing the evidence, which has up to a megabyte. A crash loses this much of it."""
FOLLOW_POLLS: Final = 4
"""Intervals in which every server looks at the members file, though its machine is busy. Without
the temporary route, one that has not would go back to the stable version for a moment."""
SHOWN_S: Final = 3600.0 * SECONDS
"""Servers see a rollout this long after its end."""
JUDGE: Final = "judge"
"""Actor of changes without an order."""
MAX_REASON: Final = 128
"""Characters of a reason in the audit log."""
ACTIONS: Final = {
    RolloutPhase.SHADOW: Action.ROLLOUT_STEP,
    RolloutPhase.CANARY: Action.ROLLOUT_STEP,
    RolloutPhase.PAUSED: Action.ROLLOUT_PAUSE,
    RolloutPhase.PROMOTED: Action.ROLLOUT_PROMOTE,
    RolloutPhase.ROLLED_BACK: Action.ROLLOUT_ROLLBACK,
}


class Rollouts:
    """The rollouts of one fleet.

    Args:
      config: timeouts.
      controller: the fleet's models.
      changes: operations on models, which a rollout excludes for its versions.
      supervisor: socket of the supervisor.
      store: keeps rollouts.
      publish: sends the news to servers.
      wall: returns the Unix time.
      run_id: returns the id of the supervisor's run; empty while it is not known.
      nursery: runs the rollouts.

    Attributes:
      latest: the latest rollout of each model, by public name.
      activities: latest report of each server.
    """

    def __init__(
        self,
        config: ControlConfig,
        controller: Controller,
        changes: Changes,
        supervisor: Path,
        store: RolloutStore,
        publish: Callable[[], None],
        wall: Callable[[], float],
        run_id: Callable[[], str],
        nursery: trio.Nursery,
    ) -> None:
        self.latest: dict[str, LiveRollout] = {}
        self.activities: dict[str, Activity] = {}
        self._is_taken_up = False
        self._config = config
        self._controller = controller
        self._changes = changes
        self._supervisor = supervisor
        self._store = store
        self._publish = publish
        self._wall = wall
        self._run_id = run_id
        self._nursery = nursery

    async def take_up(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Go on with the rollouts of an earlier control, once the store answers.

        Args:
          task_status: started after the first try.
        """
        found: list[KeptRollout] | None = None
        try:
            found = await self._store.read()
        except RolloutStoreAway as error:
            log.warning("rollouts_not_read", reason=str(error))
        task_status.started()
        while found is None:
            await trio.sleep(RENEW_S)
            with suppress(RolloutStoreAway):  # the reason is logged once
                found = await self._store.read()
        for one in found:
            self._begin(LiveRollout(one), _operation(one.rollout))
        self._is_taken_up = True

    def are_looked_at(self) -> bool:
        """Return whether each rollout of an earlier control was looked at. Until then news would
        withdraw its route."""
        return self._is_taken_up and all(one.is_looked_at for one in self.latest.values())

    async def start(self, rollout: Rollout) -> None:
        """Write a new rollout to the store and begin it.

        Raises:
          Conflict: its model is being changed, or the store cannot be read or written.
          UnknownModel: its model was dropped.
        """
        name, now = rollout.settings.model, self._wall()
        if not self._is_taken_up:
            raise Conflict(
                f"the rollout of {name} was not begun: those of the control before have not been "
                "read yet; the log of control says why (rollouts_not_read)"
            )
        operation = _operation(rollout)
        self._changes.require(operation)
        number, before = 0, self.latest.get(name)
        if before is not None:
            number = before.number
            # A server that was away may still have its last route, and takes only a higher one.
            rollout.revision = before.rollout.revision + 1
        self._changes.under_way |= dict.fromkeys(operation.names, operation)
        try:
            number = await self._store.write(rollout, number, now)
        except (RolloutStoreAway, RolloutStolen) as error:
            self._release(operation)
            raise Conflict(f"the rollout of {name} was not begun: {error}") from error
        self._begin(LiveRollout(KeptRollout(rollout, number, now)), operation)

    def require(self, name: str, order: RolloutOrder, revision: int | None) -> LiveRollout:
        """Return a rollout that can obey an order.

        Args:
          name: public name of the model.
          order: the order.
          revision: revision of the rollout that the operator saw; None for any.

        Raises:
          UnknownRollout: there is none.
          Conflict: the rollout has changed since, or cannot be written.
          RolloutRefused: it cannot be obeyed now.
        """
        live = self.latest.get(name)
        if live is None:
            raise UnknownRollout(name)
        if revision not in (None, live.rollout.revision):
            raise Conflict(
                f"the rollout {live.rollout.id} of {name} has changed since you looked: it is "
                f"{live.rollout.phase}, step {live.rollout.evidence.step}; decide again after "
                f"`triolet rollout status {name}`"
            )
        live.rollout.require(order)
        if live.trouble and (live.is_left or order is not RolloutOrder.ROLLBACK):
            raise Conflict(f"the rollout of {name} cannot be written now: {live.trouble}")
        return live

    def obey(self, live: LiveRollout, order: RolloutOrder, actor: str) -> None:
        """Obey an operator's order.

        Raises:
          RolloutRefused: it cannot be obeyed now.
        """
        live.rollout.order(order, actor, self._wall())
        if live.rollout.phase is RolloutPhase.ROLLED_BACK:
            live.adding.cancel()
            self._withdraw(live)
        live.due.set()

    def _withdraw(self, live: LiveRollout) -> None:
        """Withdraw the temporary route, without waiting for the store."""
        live.routes = {}
        self._publish()

    def with_rollouts(self, told: Models, zone: str) -> Models:
        """Return news for a zone with the routes and views of rollouts."""
        since = self._wall() - SHOWN_S
        latest = self.latest.values()
        shown = [one for one in latest if not one.rollout.is_over or one.renewed_at > since]
        routes = {
            one.view.model: route
            for one in shown
            if (route := one.routes.get(zone, one.routes.get(""))) is not None
        }
        views = tuple(one.view for one in shown)
        return msgspec.structs.replace(told, routes=told.routes | routes, rollouts=views)

    def hear(self, said: Activity | Observed) -> None:
        """Record a server's report."""
        if isinstance(said, Activity):
            alive = self._controller.heard_at.keys()
            self.activities = {name: one for name, one in self.activities.items() if name in alive}
            self.activities[said.server] = said
            return
        activity = self.activities.get(said.server)
        zone = "" if activity is None else activity.zone
        for one in self.latest.values():
            if not one.rollout.is_over:
                one.observe(said, zone)

    def freezes(self) -> list[str]:
        """Return why no rollout should go on, as servers that are alive say."""
        alive = self._controller.heard_at.keys()
        heard = [one for name, one in self.activities.items() if name in alive]
        return sorted({why for one in heard for why in one.freezes})

    def _release(self, operation: Operation) -> None:
        operation.status = OperationStatus.DONE
        self._changes.release(operation)

    def _begin(self, live: LiveRollout, operation: Operation) -> None:
        self.latest[live.view.model] = live
        if not live.rollout.is_over:
            self._changes.under_way |= dict.fromkeys(operation.names, operation)
            self._nursery.start_soon(self._run, live, operation)

    async def _run(self, live: LiveRollout, operation: Operation) -> None:
        """Carry out a rollout from wherever it is to its end."""
        rollout = live.rollout
        log.info("rollout_begins", rollout=rollout.id, model=live.view.model, phase=rollout.phase)
        async with trio.open_nursery() as nursery:
            # Before the first look: what is lost must not be judged.
            is_same_run = await self._is_same_run(rollout)
            lost = "the fleet ended, and its candidate with it"
            if is_same_run:
                is_alone = self._changes.switches.fence
                lost = "" if is_alone else await _lost(live, self._supervisor, self._wall())
            if lost:
                rollout.fail(lost, self._wall())
            nursery.start_soon(self._watch, live, nursery.cancel_scope)
            nursery.start_soon(_record, live, self._config.tick_s)
            if is_same_run:
                _keep_loaded(self._controller.models, rollout.plan, is_kept=True)
                if rollout.is_live:
                    with live.adding:
                        await self._add(live, operation)
                live.due.set()
                await live.ended.wait()
                await self._leave_one(live, operation)
            while rollout.unrecorded:  # noqa: ASYNC110 (the end of `_record`)
                await trio.sleep(self._config.tick_s)
            rollout.finish()
            live.due.set()
            await live.over.wait()
            nursery.cancel_scope.cancel()
        _keep_loaded(self._controller.models, rollout.plan, is_kept=False)
        self._changes.steps.changed_at = trio.current_time()
        self._release(operation)
        live.is_released = not live.is_left

    async def _is_same_run(self, rollout: Rollout) -> bool:
        """Return whether the fleet is the one in which the rollout began."""
        with trio.move_on_after(self._config.operation_timeout_s):
            while not self._run_id():  # noqa: ASYNC110 (the supervisor's first answer)
                await trio.sleep(self._config.tick_s)
        return self._run_id() == rollout.run

    async def _add(self, live: LiveRollout, operation: Operation) -> None:
        """Let all servers have the candidate, without requests. Idempotent."""
        rollout, switches, steps = live.rollout, self._changes.switches, self._changes.steps
        plan, order = rollout.plan, operation.switch
        assert order is not None, "a rollout has the settings of a switch"
        try:
            if switches.fence:
                await steps.wait_served(operation, plan.candidate, is_ready=True)
            else:
                listed = await ask_models(self._supervisor)
                switches.routes = listed.routes
                known = {one.name: one for one in listed.configs}
                request = AddVersionRequest(
                    plan.candidate, plan.stable, order.ref, is_of_port(operation), is_beside=True
                )
                # One that serves must not be taken back because the supervisor is slow.
                config = known.get(plan.candidate) or await steps.ask_added(operation, request)
                steps.add(config, await trio.to_thread.run_sync(expected_bytes, config))
                _keep_loaded(self._controller.models, plan, is_kept=True)
                route = switches.routes.get(order.public_name)
                await switches.put_beside(operation, order, route)
        except (OperationFailed, CommandFailed, NoRoom) as error:
            if rollout.is_prepared:  # it has served, and the judge sees whether it still does
                log.warning("candidate_not_ready", rollout=rollout.id, reason=str(error))
            else:
                rollout.fail(f"{plan.candidate} cannot serve: {error}", self._wall())
        else:
            config = self._controller.models[plan.candidate].config
            is_alike = bool(config.workers_of)
            rollout.note_prepared(config.digest, self._wall(), is_alike=is_alike)

    async def _watch(self, live: LiveRollout, scope: trio.CancelScope) -> None:
        """Look, write and renew until the end was written."""
        rollout, plan = live.rollout, live.rollout.plan
        live.due.set()
        while not live.over.is_set():
            with trio.move_on_after(RENEW_S):
                await live.due.wait()
            models = self._controller.models
            work = _work(models.get(plan.stable)), _work(models.get(plan.candidate))
            freezes, now = self.freezes(), self._wall()
            rollout.resume(live.renewed_at, now)
            share = _workers_share(models, plan)
            rollout.look(live.take(now, share, self.activities.values(), freezes, work))
            if live.routes and rollout.phase is RolloutPhase.ROLLED_BACK:
                self._withdraw(live)
            try:
                await self._keep(live)
            except RolloutStolen as error:
                log.warning("rollout_left", rollout=rollout.id, reason=str(error))
                live.trouble, live.is_left = str(error), True
                self._withdraw(live)
                scope.cancel()
            live.is_looked_at |= live.is_left or not live.trouble
            is_written = live.written == rollout.revision
            # The stable version is removed only after a promotion that the next control knows of.
            if rollout.phase is RolloutPhase.ROLLED_BACK or (is_written and not rollout.is_live):
                live.ended.set()
            await trio.sleep(self._config.tick_s)

    async def _keep(self, live: LiveRollout) -> None:
        """Write or renew a rollout. If that succeeds, renew its route at servers.

        Raises:
          RolloutStolen: another control has written it.
        """
        rollout, now = live.rollout, self._wall()
        revision, is_over = rollout.revision, rollout.is_over
        is_changed = revision != live.written or is_over or now - live.written_at >= WRITE_S
        if not is_changed and now - live.renewed_at < RENEW_S:
            return
        view, zones = rollout.view(), ("", *rollout.settings.zones)
        routes = {zone: rollout.route(now + VALID_S, zone) for zone in zones}
        try:
            if is_changed:
                live.number = await self._store.write(rollout, live.number, now)
                live.written, live.written_at = revision, now
            else:
                await self._store.renew(rollout, live.number, now)
        except RolloutStoreAway as error:
            if not live.trouble:
                log.warning("rollout_not_kept", rollout=rollout.id, reason=str(error))
            live.trouble = str(error)
            return
        live.trouble, live.renewed_at, live.view = "", now, view
        # It may have been rolled back meanwhile.
        is_withdrawn = live.is_moved or rollout.phase is RolloutPhase.ROLLED_BACK
        live.routes = {z: one for z, one in routes.items() if one and not is_withdrawn}
        self._publish()
        if is_over:
            live.over.set()

    async def _leave_one(self, live: LiveRollout, operation: Operation) -> None:
        """Give the name to the candidate and remove the stable version, or remove the candidate.
        Repeat it until it succeeds; log each new reason once."""
        reason = ""
        while True:
            try:
                if live.rollout.phase is RolloutPhase.PROMOTED:
                    await self._move(live, operation)
                elif not self._changes.switches.fence:
                    await self._changes.steps.take_back(operation)
                return
            except (OperationFailed, CommandFailed) as error:
                if str(error) != reason:
                    reason = str(error)
                    log.error("rollout_not_finished", rollout=live.rollout.id, reason=reason)
            await trio.sleep(RENEW_S)

    async def _move(self, live: LiveRollout, operation: Operation) -> None:
        """Move the permanent route to the candidate, and remove the stable version.

        Raises:
          OperationFailed: servers have the route of before.
          CommandFailed: the supervisor refused it, or workers still run.
        """
        order, switches, steps = operation.switch, self._changes.switches, self._changes.steps
        assert order is not None, "a rollout has the settings of a switch"
        if switches.fence:
            # Servers report temporary routes only: another control does not know the permanent one.
            first = Route({order.replaced: 1.0}, order.replaced, live.rollout.permanent_revision)
            route = switches.routes.setdefault(order.public_name, first)
            order = msgspec.structs.replace(order, revision=route.revision)
            switches.move_servers(operation, order)
            live.is_moved = True
            self._withdraw(live)  # servers take the permanent route in place of it
            await steps.wait_for_servers(partial(switches.are_following, order.public_name))
            return
        if live.rollout.is_alike:
            await self._take_over(live, operation, order)
            return
        switches.routes = (await ask_models(self._supervisor)).routes
        route = switches.routes[order.public_name]
        if route.stable != operation.model:
            moved = RouteRequest(operation.model, order.replaced, route.revision, is_moved=True)
            await steps.ask_route(moved)
        await trio.sleep(FOLLOW_POLLS * self._config.members_poll_s)
        live.is_moved = True
        self._withdraw(live)
        await steps.wait_let_go(order.replaced)
        await steps.end(operation, order.replaced)
        steps.drop(order.replaced)

    async def _take_over(self, live: LiveRollout, operation: Operation, order: SwitchOrder) -> None:
        """Give the candidate's files to the stable version, which has the workers of both; then
        remove the candidate.

        Raises:
          OperationFailed: a server does not have them in time.
          CommandFailed: the supervisor refused it.
        """
        listed, steps = await ask_models(self._supervisor), self._changes.steps
        if operation.model not in {one.name for one in listed.configs}:
            live.is_moved = True  # by an earlier control
            self._withdraw(live)
            return
        revision = listed.routes[order.public_name].revision
        moved = RouteRequest(operation.model, order.replaced, revision, is_moved=True)
        await steps.ask_route(moved)
        configs = {one.name: one for one in (await ask_models(self._supervisor)).configs}
        self._controller.models[order.replaced].config = configs[order.replaced]
        await steps.wait_served(operation, order.replaced)
        live.is_moved = True
        self._withdraw(live)
        await steps.take_back(operation)


def _operation(rollout: Rollout) -> Operation:
    """Return the operation that excludes others on the versions of a rollout."""
    settings, plan = rollout.settings, rollout.plan
    order = SwitchOrder(settings.model, plan.stable, settings.ref)
    return Operation(
        rollout.id,
        plan.candidate,
        WantedState.ROLLOUT,
        settings.actor,
        rollout.evidence.began_at,
        OperationStatus.RUNNING,
        settings=msgspec.json.encode(order).decode(),
        run=rollout.run,
    )


def _keep_loaded(models: Mapping[str, Model], plan: RolloutPlan, *, is_kept: bool) -> None:
    for name in {plan.stable, plan.candidate} & models.keys():
        models[name].is_kept = is_kept


def _work(model: Model | None) -> WorkDone:
    """Return the work of a version's workers. Each server reports that of all."""
    works = () if model is None else (one.work for one in model.activity.values())
    return max(works, key=attrgetter("busy_s"), default=WorkDone())


def _workers_share(models: Mapping[str, Model], plan: RolloutPlan) -> float:
    """Return the candidate's share of workers; 0 if control does not know the workers."""
    stable, canary = (
        len(models[name].workers) if name in models else 0 for name in (plan.stable, plan.candidate)
    )
    return canary / max(1, stable + canary)


async def _lost(live: LiveRollout, supervisor: Path, now: float) -> str:
    """Return why the rollout of an earlier control cannot go on; empty if it can.

    That control removes the candidate only after a rollback, which it could not write if its store
    was away.
    """
    plan, is_prepared = live.rollout.plan, live.rollout.is_prepared
    if not is_prepared and now - live.renewed_at <= VALID_S:
        return ""
    try:
        listed = await ask_models(supervisor)
    except CommandFailed as error:
        log.warning("candidate_not_known", rollout=live.rollout.id, reason=str(error))
        return ""
    there = listed.served if is_prepared else [one.name for one in listed.configs]
    if plan.candidate in there:
        return ""
    return f"{plan.candidate} was removed before control was restarted: it was rolled back"


async def _record(live: LiveRollout, tick_s: float) -> None:
    """Record each change in the audit log once it was written. A change that was recorded just
    before a crash is recorded twice."""
    rollout = live.rollout
    while True:
        if rollout.unrecorded and live.written == rollout.revision:
            note = rollout.history[-rollout.unrecorded]
            log.info("rollout_changed", rollout=rollout.id, **msgspec.structs.asdict(note))
            await _audit_change(rollout, note)
            rollout.unrecorded -= 1
            live.written_at = 0.0
        else:
            await trio.sleep(tick_s)


async def _audit_change(rollout: Rollout, note: RolloutNote) -> None:
    """Record a change in the audit log. An order has the action that was recorded when it was
    given."""
    is_promoted = note.actor and note.phase is RolloutPhase.CANARY
    try:
        await audit(
            Action.ROLLOUT_PROMOTE if is_promoted else ACTIONS[note.phase],
            rollout.settings.model,
            note.actor or JUDGE,
            rollout.id,
            AuditOutcome.DONE,
            note.said[:MAX_REASON],
            rollout.digest,
            {"step": note.step},
        )
    except AuditLogError as error:
        log.error("rollout_not_recorded", rollout=rollout.id, error=str(error))

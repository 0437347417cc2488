"""Admin routes of rollouts: start one, show them, and give orders to one."""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio
from quart import Response, request

from store.measured import KeptMeasurement, MeasuredCapacity, measured_of
from store.referrers import CAPACITY_TYPE
from triolet.config.limits import Count, Positive, Share  # noqa: TC001 (msgspec reads annotations)
from triolet.config.routes import NUM_BUCKETS, RouteCaps
from triolet.errors import ConfigError
from triolet.service_class import ServiceClass
from triolet.slo.objectives import Indicator, read_objectives
from triolet.units import SECONDS
from triolet.usage_database import usage_by

from ..audit.events import Action, AuditOutcome, os_user
from ..models.stored import store_of
from ..rollouts.evidence import RolloutEvidence
from ..rollouts.forecast import DAY_S, forecast
from ..rollouts.plan import Objective, RolloutPlan, StepCosts, StepRules
from ..rollouts.rollout import Rollout, RolloutOrder, RolloutRefused, RolloutSettings
from .auditing import audit
from .control import new_id, wall
from .operations import Conflict, UnknownModel, UnknownRollout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from triolet.slo.objectives import ServiceObjective

    from .control import Control
    from .live_rollout import LiveRollout

    View = Callable[..., Awaitable[Response]]

SALT_BYTES: Final = 16
GOLDEN_S: Final = 30.0 * SECONDS
"""Interval of golden prompts: a candidate that computes wrongly is found within a minute."""
HOUR_S: Final = 3600.0 * SECONDS
SIGNALS: Final = {
    Indicator.AVAILABILITY: "errors",
    Indicator.FIRST_TOKEN: "ttft",
    Indicator.INTER_TOKEN: "itl",
}
"""Signals of the objectives that rollouts are judged by."""
DEFAULT_OBJECTIVES: Final = {"errors": Objective(0.99), "rejected": Objective(0.5)}
"""Clients cause most rejected requests, so only their comparison between versions counts."""
ORDER_ACTIONS: Final = {
    RolloutOrder.PAUSE: Action.ROLLOUT_PAUSE,
    RolloutOrder.PROMOTE: Action.ROLLOUT_PROMOTE,
    RolloutOrder.PROMOTE_FULLY: Action.ROLLOUT_PROMOTE,
    RolloutOrder.ROLLBACK: Action.ROLLOUT_ROLLBACK,
}


class RolloutAsked(StepRules, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of a request that starts a rollout; see `RolloutPlan` and `RolloutSettings`.

    `experiment` is the share of an experiment, in place of `shares`. `golden` is whether the
    candidate answers the golden prompts. `retention_s` is `bake_s` if it is missing.
    """

    model: str
    ref: str
    retention_s: Positive | None = None
    shadow_share: Share | None = None
    cap_streams: Count | None = None
    cap_tenant_share: Share = 1.0
    golden: bool = True
    experiment: Share | None = None
    despite_freeze: bool = False
    zones: tuple[str, ...] = ()


def rollout_routes(
    control: Control, actor: str, require_references: Callable[[Iterable[str]], None]
) -> tuple[tuple[str, str, View], ...]:
    """Return the routes: method, path and view.

    Args:
      control: the control to operate.
      actor: actor of the requests.
      require_references: refuses paths.
    """
    return (
        ("GET", "/admin/rollouts", partial(_list, control)),
        ("POST", "/admin/rollouts", partial(_start, control, actor, require_references)),
        ("GET", "/admin/rollouts/<name>", partial(_show, control)),
        ("POST", "/admin/rollouts/<name>/<order>", partial(_order, control, actor)),
    )


async def _list(control: Control) -> Response:
    return _json({"rollouts": [_shown(one) for one in control.rollouts.latest.values()]})


async def _show(control: Control, name: str) -> Response:
    live = control.rollouts.latest.get(name)
    if live is None:
        raise UnknownRollout(name)
    return _json(_shown(live))


def _shown(live: LiveRollout) -> dict[str, Any]:
    rollout, view = live.rollout, live.rollout.view()
    more = {"revision": rollout.revision, "share": view.share, "trouble": live.trouble}
    more |= {"is_over": live.is_released, "is_left": live.is_left}
    return {**msgspec.to_builtins(view), **more}


async def _start(
    control: Control, actor: str, require_references: Callable[[Iterable[str]], None]
) -> Response:
    """Start the rollout in the body."""
    asked = await _body(RolloutAsked)
    if actor != os_user():
        require_references((asked.ref,))
    freezes = control.rollouts.freezes()
    if freezes and not asked.despite_freeze:
        raise Conflict(
            f"no rollout may begin now: {'; '.join(freezes)}. Wait for its end, or give "
            "--despite-freeze, which the audit log records"
        )
    rollout = _planned(control, asked, actor)
    rollout.said = await trio.to_thread.run_sync(_forecast, control.config.usage_dir, rollout)
    noted = partial(audit, Action.ROLLOUT_START, asked.model, actor, rollout.id)
    freeze = "despite a freeze" if freezes else ""
    await noted(AuditOutcome.BEGUN, freeze)
    try:
        await control.rollouts.start(rollout)
    except (Conflict, UnknownModel):
        await noted(AuditOutcome.FAILED, "conflict")
        raise
    await noted(AuditOutcome.DONE, freeze)
    return _json(_shown(control.rollouts.latest[rollout.settings.model]), 202)


def _planned(control: Control, asked: RolloutAsked, actor: str) -> Rollout:
    """Return a new rollout.

    Raises:
      UnknownModel: no model has this name.
      Conflict: the new version belongs to another model.
      ConfigError: a value is not allowed.
    """
    switches = control.changes.switches
    zones = {one.zone for one in control.rollouts.activities.values()}
    if {*asked.zones} - zones or len({*asked.zones}) < len(asked.zones):
        raise ConfigError(
            f"zones is {', '.join(asked.zones)}; allowed: each of the servers' zones once, "
            f"{', '.join(sorted(zones))}"
        )
    control.changes.require_free(switches.version_of(asked.model))
    candidate, order = switches.plan(asked.model, asked.ref, control.changes.under_way)
    caps = RouteCaps(asked.cap_streams, asked.cap_tenant_share)
    rules = {name: getattr(asked, name) for name in StepRules.__struct_fields__}
    if asked.experiment is not None:
        rules["shares"] = (asked.experiment, 1.0)
    plan = RolloutPlan(
        **rules,
        stable=order.replaced,
        candidate=candidate,
        salt=secrets.token_hex(SALT_BYTES),
        objectives=objectives_of(read_objectives(control.config.objectives), order.public_name),
        costs=_costs(control, order.replaced),
        caps=None if caps == RouteCaps() else caps,
    )
    settings = RolloutSettings(
        model=order.public_name,
        ref=asked.ref,
        actor=actor,
        retention_s=asked.bake_s if asked.retention_s is None else asked.retention_s,
        golden_every_s=GOLDEN_S if asked.golden else 0.0,
        shadow_share=asked.shadow_share or 0.0,
        is_experiment=asked.experiment is not None,
        ignores_freezes=asked.despite_freeze,
        zones=asked.zones,
    )
    evidence = RolloutEvidence().begin_step(plan, 0, wall())
    return Rollout(
        id=new_id(),
        settings=settings,
        plan=plan,
        run=control.run_id,
        permanent_revision=order.revision,
        evidence=evidence,
    )


def _costs(control: Control, version: str) -> StepCosts | None:
    """Return the measured step times of a version; None if there are none, or several."""
    model = control.controller.models.get(version)
    digest = "" if model is None else model.config.digest
    kept = measured_of(store_of(control.config.store), digest, CAPACITY_TYPE) if digest else []
    match [one.said for one in kept if isinstance(one, KeptMeasurement)]:
        case [MeasuredCapacity() as said]:
            prompt_token_s = 1.0 / max(1.0, said.prefill_tokens_per_s)
            return StepCosts(said.step_s, said.row_s, said.kv_token_s, prompt_token_s)
    return None


def _forecast(usage_dir: str | None, rollout: Rollout) -> str:
    """Return what the traffic of the last day, or of its last hour, makes of a rollout.

    Raises:
      RolloutRefused: there are too few requests, even if each came from another user.
    """
    name, plan = rollout.settings.model, rollout.plan
    if usage_dir is None:
        return "the traffic of the last day is not known: the fleet has no --usage-dir"
    # The ledger may be younger than a day, and traffic may grow: the last hour counts, too.
    requests = max(
        round(DAY_S / span_s) * count
        for span_s in (DAY_S, HOUR_S)
        for model, count, *_ in (*usage_by(usage_dir, ("model",), wall() - span_s), (name, 0))
        if model == name
    )
    # The ledger has no users: assume one in each bucket.
    buckets = max(1, min(requests, NUM_BUCKETS))
    found = forecast(plan, [requests // buckets] * buckets)
    if found.shares != plan.shares:
        raise RolloutRefused(
            f"{name} has too few requests for this rollout: {found.said}. Give larger --steps, a "
            "longer --max-step, or lower --min-requests and --min-buckets"
        )
    return found.said


def objectives_of(known: Iterable[ServiceObjective], model: str) -> dict[str, Objective]:
    """Return the objectives of a model's rollouts: of several for one signal, the strictest."""
    found = dict(DEFAULT_OBJECTIVES)
    for one in sorted(known, key=lambda one: one.target):
        if one.indicator in SIGNALS and one.covers(model, ServiceClass.DEFAULT):
            found[SIGNALS[one.indicator]] = Objective(one.target, one.threshold_s)
    return found


class OrderAsked(msgspec.Struct, forbid_unknown_fields=True):
    """Body of an order; may be missing.

    Attributes:
      revision: revision of the rollout that the operator saw; None for any.
    """

    revision: int | None = None


class RollbackAsked(OrderAsked, forbid_unknown_fields=False):
    """Body of a rollback. Other fields are ignored: Alertmanager's webhooks may order it."""


async def _order(control: Control, actor: str, name: str, order: str) -> Response:
    """Obey an order."""
    asked = await _body(RollbackAsked if order == RolloutOrder.ROLLBACK else OrderAsked)
    if order not in set(RolloutOrder):
        raise RolloutRefused(f"no order is called {order!r}; allowed: {', '.join(RolloutOrder)}")
    given, rollouts = RolloutOrder(order), control.rollouts
    live = rollouts.require(name, given, asked.revision)
    noted = partial(audit, ORDER_ACTIONS[given], name, actor, live.rollout.id)
    await noted(AuditOutcome.BEGUN)
    try:
        rollouts.obey(rollouts.require(name, given, asked.revision), given, actor)
    except (Conflict, RolloutRefused):  # it changed while the entry was written
        await noted(AuditOutcome.FAILED, "conflict")
        raise
    return _json(_shown(live))


async def _body(kind: type[Any]) -> Any:  # noqa: ANN401 (an instance of `kind`)
    """Parse the body.

    Raises:
      ConfigError: it is not valid.
    """
    try:
        return msgspec.json.decode(await request.get_data() or b"{}", type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"the body is not valid: {error}") from None


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value) + b"\n", status, mimetype="application/json")

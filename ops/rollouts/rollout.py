"""A rollout: its phases, what evidence, orders and time do to it, and the route and the view that
servers get. No I/O, no clock."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from transport.rollout_protocol import (
    ENDED_PHASES,
    CandidateReport,
    FinishedRequest,
    RolloutNote,
    RolloutPhase,
    RolloutView,
    SeenIncident,
    ShadowComparison,
    WorkDone,
)
from triolet.config.limits import NotNegative, Positive  # noqa: TC001 (msgspec reads annotations)
from triolet.config.routes import Route  # noqa: TC001 (msgspec reads the annotations)
from triolet.errors import TrioletError
from triolet.units import SECONDS

from .evidence import RolloutEvidence
from .forecast import DAY_S, forecast
from .judge import RolloutVerdict, alarm, cost_bounds, judge
from .plan import LOOKS, MIN_BAD, RolloutPlan

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

VALID_S: Final = 10.0 * SECONDS
"""A route that is not renewed for this long ends: four renewals may be lost."""
BATCH_S: Final = 10.0 * SECONDS
"""Costs are compared over this time."""
MIN_PAIRS: Final = 20
"""Compared shadow copies without which the first step does not begin."""
MAX_NOTES: Final = 50
"""Changes that are kept: a step may be repeated. The audit log has all."""
SHOWN_NOTES: Final = 8
"""Changes that servers get with each message."""

AFTER: Final = {
    RolloutPhase.PREPARING: frozenset(
        {RolloutPhase.SHADOW, RolloutPhase.CANARY, RolloutPhase.ROLLED_BACK}
    ),
    RolloutPhase.SHADOW: frozenset(
        {RolloutPhase.CANARY, RolloutPhase.PAUSED, RolloutPhase.ROLLED_BACK}
    ),
    # To itself: another step.
    RolloutPhase.CANARY: frozenset(RolloutPhase) - {RolloutPhase.PREPARING, RolloutPhase.SHADOW},
    RolloutPhase.PAUSED: frozenset(RolloutPhase) - {RolloutPhase.PREPARING, RolloutPhase.SHADOW},
    RolloutPhase.PROMOTED: frozenset[RolloutPhase](),
    RolloutPhase.ROLLED_BACK: frozenset[RolloutPhase](),
}
"""The phases that may follow each phase."""


class RolloutOrder(StrEnum):
    """An operator's order."""

    PAUSE = "pause"
    PROMOTE = "promote"
    """Go to the next step, or end the last one."""
    PROMOTE_FULLY = "promote_fully"
    """Go to the last step."""
    ROLLBACK = "rollback"


TO_CANARY: Final = frozenset({RolloutPhase.SHADOW, RolloutPhase.CANARY, RolloutPhase.PAUSED})
ALLOWED_IN: Final = {
    RolloutOrder.PAUSE: frozenset({RolloutPhase.SHADOW, RolloutPhase.CANARY}),
    RolloutOrder.PROMOTE: TO_CANARY,
    RolloutOrder.PROMOTE_FULLY: TO_CANARY,
    RolloutOrder.ROLLBACK: TO_CANARY | {RolloutPhase.PREPARING},
}
"""The phases in which each order is obeyed."""


class RolloutRefused(TrioletError):
    """An order that a rollout cannot obey now; the text says why."""


class RolloutSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an operator asked for, besides the plan.

    Attributes:
      model: public name of the model.
      ref: directory, file or version of the candidate.
      actor: who asked for it.
      retention_s: duration of the last step: as long, the stable version stays loaded.
      golden_every_s: interval of golden prompts; 0 for none.
      shadow_share: share of requests that are copied to the candidate before the first step; 0 for
        no such phase.
      is_experiment: keep the share of the first step, whatever the verdict, until an order.
      ignores_freezes: whether it goes on while servers say that no rollout should.
      zones: zones in the order in which they get the candidate: the steps are those of the first
        one. Empty for all zones at once.
    """

    model: str
    ref: str
    actor: str = ""
    retention_s: Positive = 60 * SECONDS
    golden_every_s: NotNegative = 30 * SECONDS
    shadow_share: NotNegative = 0.0
    is_experiment: bool = False
    ignores_freezes: bool = False
    zones: tuple[str, ...] = ()


class RolloutSight(NamedTuple):
    """What control has seen of a rollout since the last look.

    Attributes:
      now: Unix time.
      requests: ended requests.
      incidents: incidents of workers.
      canary_share: the candidate's share of workers; 0 if they are not known.
      reports: latest report about the candidate of each server.
      freezes: why no rollout should go on.
      work: work of the stable version's workers and of the candidate's since they started; None if
        it is not known.
      trouble: why the rollout cannot be written; then it may only be rolled back. Empty if it can.
    """

    now: float
    requests: Collection[FinishedRequest] = ()
    incidents: Collection[SeenIncident] = ()
    canary_share: float = 0.0
    reports: Mapping[str, CandidateReport] = {}
    freezes: Collection[str] = ()
    work: tuple[WorkDone, WorkDone] | None = None
    trouble: str = ""


class Rollout(msgspec.Struct, kw_only=True):
    """A rollout of a candidate in place of a stable version.

    Attributes:
      id: its id.
      settings: what was asked for.
      plan: steps, objectives and limits.
      run: id of the supervisor's run; another run does not have the candidate.
      permanent_revision: revision of the permanent route when it began, without a supervisor.
      digest: digest of the candidate; empty until it is known, and outside the store.
      is_prepared: whether all servers can send requests to the candidate.
      is_alike: whether the workers of the stable version serve the candidate, too.
      phase: current phase.
      zone: number of the current zone in `zones`.
      evidence: evidence of the current step.
      golden: first answers to the golden prompts.
      work: slot of ten seconds, and the work of both versions at its start.
      shadow: sums of all servers' shadow copies.
      said: latest verdict, for people.
      history: latest changes, oldest first.
      unrecorded: how many of the latest ones are not in the audit log yet.
      revision: grows with each change.
      is_over: it has ended, and one version is left.
    """

    id: str
    settings: RolloutSettings
    plan: RolloutPlan
    run: str = ""
    permanent_revision: int = 0
    digest: str = ""
    is_prepared: bool = False
    is_alike: bool = False
    phase: RolloutPhase = RolloutPhase.PREPARING
    zone: int = 0
    evidence: RolloutEvidence
    golden: tuple[str, ...] = ()
    work: tuple[int, WorkDone, WorkDone] | None = None
    shadow: ShadowComparison = ShadowComparison()
    said: str = ""
    history: list[RolloutNote] = []
    unrecorded: int = 0
    revision: int = 1
    is_over: bool = False

    @property
    def is_live(self) -> bool:
        """Whether it has not ended."""
        return self.phase not in ENDED_PHASES

    def note_prepared(self, digest: str, now: float, *, is_alike: bool = False) -> None:
        """Record that all servers can send requests to the candidate.

        Args:
          digest: digest of the candidate.
          now: Unix time.
          is_alike: whether the workers of the stable version serve it, too. Then there are no costs
            to compare, and shadow copies would compute the same.
        """
        if self.is_live and not self.is_prepared:
            self.digest, self.is_prepared, self.is_alike = digest, True, is_alike
            if is_alike:
                self.plan = msgspec.structs.replace(self.plan, costs=None)
                self.settings = msgspec.structs.replace(self.settings, shadow_share=0.0)
            self.evidence = self.evidence.begin_step(self.plan, 0, now)
            self.revision += 1

    def fail(self, why: str, now: float) -> None:
        """Roll back: the candidate cannot serve."""
        if self.is_live:
            self._go(RolloutPhase.ROLLED_BACK, self.evidence.step, why, now)

    def resume(self, renewed_at: float, now: float) -> None:
        """Go on after an outage of control or of its store.

        If servers fell back to the stable version, the evidence of the step begins again.

        Args:
          renewed_at: when the route was last renewed.
          now: Unix time.
        """
        if self.is_live and now - renewed_at > VALID_S:
            was_good = self.evidence.was_good
            self.evidence = self.evidence.begin_step(self.plan, self.evidence.step, now)
            self.evidence.was_good, self.work = was_good, None

    def require(self, order: RolloutOrder) -> None:
        """Check that an order can be obeyed.

        Raises:
          RolloutRefused: it cannot.
        """
        if self.phase not in ALLOWED_IN[order]:
            raise RolloutRefused(
                f"the rollout {self.id} of {self.settings.model} is {self.phase}: {self.said}; it "
                f"takes {order.partition('_')[0]} only while it is "
                f"{' or '.join(sorted(ALLOWED_IN[order]))}"
            )

    def order(self, order: RolloutOrder, actor: str, now: float) -> None:
        """Obey an order.

        Raises:
          RolloutRefused: it cannot be obeyed now; nothing has changed.
        """
        self.require(order)
        step, said = self.evidence.step, f"ordered by {actor}"
        if order is RolloutOrder.PAUSE:
            self._go(RolloutPhase.PAUSED, step, said, now, actor)
        elif order is RolloutOrder.ROLLBACK:
            self._go(RolloutPhase.ROLLED_BACK, step, said, now, actor)
        elif step == self.plan.last_step:
            self._end_zone(said, now, actor)
        else:
            is_full = order is RolloutOrder.PROMOTE_FULLY
            to_step = self.plan.last_step if is_full else step + 1
            self._go(RolloutPhase.CANARY, to_step, said, now, actor)

    def look(self, seen: RolloutSight) -> None:
        """Add what was seen to the evidence, and obey the verdict."""
        if not self.is_live:
            return
        evidence, plan = self.evidence, self.plan
        freezes = [] if self.settings.ignores_freezes else sorted({*seen.freezes})
        if seen.trouble:
            freezes = [f"the rollout cannot be written: {seen.trouble}"]
        if freezes:
            evidence.frozen_at = seen.now
        evidence.add_requests(plan, seen.requests, seen.now)
        evidence.add_incidents(plan, seen.incidents, seen.canary_share)
        self._note_work(seen)
        if not self.is_prepared:  # reports may still be about the candidate of an earlier rollout
            return
        if faults := self._note_reports(seen.reports):
            self.fail(faults[0], seen.now)
        elif self.settings.golden_every_s and not self.golden:
            self.said = f"{plan.candidate} has not answered the golden prompts yet"
            if seen.now - evidence.timed_from >= plan.max_step_s:
                self.fail(f"{self.said}, in {plan.max_step_s:g} s", seen.now)
        elif self.phase is RolloutPhase.PREPARING and self.settings.shadow_share and not freezes:
            self._go(RolloutPhase.SHADOW, 0, "requests are copied to the candidate", seen.now)
        else:
            self._obey(self._verdict(freezes), seen.now)

    def _note_work(self, seen: RolloutSight) -> None:
        """Compare the costs of the last ten seconds."""
        slot = int(seen.now // BATCH_S)
        if seen.work is None or self.plan.costs is None or (self.work and slot <= self.work[0]):
            return
        if self.work and slot == self.work[0] + 1:
            done = [now.since(then) for then, now in zip(self.work[1:], seen.work, strict=True)]
            self.evidence.add_work(self.plan.costs, *done)
        self.work = slot, *seen.work

    def _note_reports(self, reports: Mapping[str, CandidateReport]) -> list[str]:
        """Compare the answers to golden prompts, and add up shadow copies.

        Returns:
          Why golden prompts failed before their first answers; a candidate that has answered may
          merely be busy.
        """
        if reports:
            self.shadow = sum((one.shadow for one in reports.values()), ShadowComparison())
        for server, report in sorted(reports.items()):
            if report.golden and not self.golden:
                self.golden = report.golden
            if report.golden and report.golden != self.golden:
                self.evidence.golden_difference = f"at {server.partition('/')[0]}"
        return [
            f"golden prompts to {self.plan.candidate} failed: {one.golden_error}"
            for one in reports.values()
            if one.golden_error and not self.golden
        ]

    def _verdict(self, freezes: Collection[str]) -> RolloutVerdict:
        evidence, plan = self.evidence, self.plan
        if self.phase is RolloutPhase.PAUSED or freezes:
            why = f"frozen: {'; '.join(freezes)}" if freezes else self.said
            return alarm(evidence, plan) or RolloutVerdict("hold", "frozen", why)
        verdict, shadow = judge(evidence, plan), self.shadow
        if self.phase is not RolloutPhase.SHADOW or verdict.action != "advance":
            return verdict
        said = f"{shadow.pairs} shadow copies were compared, {shadow.failed} failed"
        if shadow.failed >= max(MIN_BAD, shadow.pairs):
            return RolloutVerdict("rollback", "step", said)
        if shadow.pairs >= MIN_PAIRS:
            return verdict
        is_late = evidence.now - evidence.timed_from >= plan.max_step_s
        said = f"{said}; {MIN_PAIRS} are needed"
        return RolloutVerdict("pause" if is_late else "hold", "evidence", said)

    def _obey(self, verdict: RolloutVerdict, now: float) -> None:
        evidence, plan = self.evidence, self.plan
        if verdict.look is not None:
            evidence.looks = [*evidence.looks, verdict.look][-LOOKS:]
        self.said = verdict.said
        step, is_last = evidence.step, evidence.step == plan.last_step
        has_more = self.zone + 1 < len(self.settings.zones)
        if self.settings.is_experiment and step and not is_last:
            self.said = f"experiment; the verdict would be {verdict.action}: {verdict.said}"
            return
        match verdict.action:
            case "rollback" if verdict.to_step:
                self._go(self.phase, verdict.to_step, verdict.said, now)
            case "rollback":
                self._go(RolloutPhase.ROLLED_BACK, step, verdict.said, now)
            case "pause":
                self._go(RolloutPhase.PAUSED, step, verdict.said, now)
            case "advance" if not is_last:
                said = verdict.said if step else f"{verdict.said}; {self._forecast()}"
                self._go(RolloutPhase.CANARY, verdict.to_step, said, now)
            # In zones before the last one, the stable version is needed anyway.
            case "advance" if has_more or now - evidence.timed_from >= self.settings.retention_s:
                self._end_zone(verdict.said, now)
            case "advance":
                kept_s = self.settings.retention_s
                self.said = f"{verdict.said}; {plan.stable} stays loaded for {kept_s:g} s in all"

    def _end_zone(self, said: str, now: float, actor: str = "") -> None:
        """Go to the next zone, which gets the candidate at once; after the last one, promote it."""
        step, zones = self.plan.last_step, self.settings.zones
        if self.zone + 1 >= len(zones):
            self._go(RolloutPhase.PROMOTED, step, said, now, actor)
            return
        self.zone += 1
        self.evidence = self.evidence.begin_step(self.plan, step, now)
        said = f"zone {zones[self.zone]} begins: {said}"
        self._go(RolloutPhase.CANARY, step, said, now, actor)

    def _forecast(self) -> str:
        """Return whether the traffic since the candidate was ready will do for the steps."""
        evidence = self.evidence
        seen_s = max(1.0, evidence.now - evidence.began_at)
        seen = (max(one.requests.values(), default=0) for one in evidence.tallies.values())
        found = forecast(self.plan, [round(count * DAY_S / seen_s) for count in seen])
        return f"if traffic stays as in the last {seen_s:.0f} s, {found.said}"

    def _go(self, phase: RolloutPhase, step: int, said: str, now: float, actor: str = "") -> None:
        """Go to a phase and step.

        Raises:
          RolloutRefused: this phase cannot follow the current one; nothing has changed.
        """
        if phase not in AFTER[self.phase]:
            raise RolloutRefused(f"the rollout {self.id} is {self.phase}, and cannot be {phase}")
        if step != self.evidence.step:
            self.evidence = self.evidence.begin_step(self.plan, step, now)
        self.phase, self.said = phase, said
        self.revision += 1
        note = RolloutNote(now, phase, step, said, actor)
        self.history = [*self.history, note][-MAX_NOTES:]
        self.unrecorded = min(self.unrecorded + 1, MAX_NOTES)

    def finish(self) -> None:
        """Record that one version is left, and drop the evidence."""
        last = self.evidence
        self.is_over = True
        self.evidence = RolloutEvidence(last.step, last.began_at, last.now)

    def route(self, valid_until: float, zone: str = "") -> Route | None:
        """Return the temporary route of the current step in a zone; None if there is none."""
        step, zones = self.evidence.step, self.settings.zones
        has_route = self.phase is not RolloutPhase.ROLLED_BACK and not self.is_over
        if not step or not has_route:
            return None
        if zones and self.is_live:
            place = zones.index(zone) if zone in zones else len(zones)
            if place > self.zone:
                return None
            step = step if place == self.zone else self.plan.last_step
        return self.plan.route(step, self.revision, valid_until)

    def view(self) -> RolloutView:
        """Return what servers, metrics and people see of it."""
        evidence, plan = self.evidence, self.plan
        is_served = self.is_live and self.is_prepared
        return RolloutView(
            self.id,
            self.settings.model,
            plan.stable,
            plan.candidate,
            self.digest,
            self.phase,
            evidence.step,
            plan.shares,
            evidence.began_at,
            self.said,
            self.settings.golden_every_s if is_served else 0.0,
            self.settings.shadow_share if self.phase is RolloutPhase.SHADOW else 0.0,
            {name: _counts(evidence, name) for name in plan.objectives},
            {name: evidence.recent(name) for name in plan.objectives},
            cost_bounds(evidence),
            self.shadow,
            tuple(self.history[-SHOWN_NOTES:]),
            self.settings.zones[: self.zone + 1] if self.is_live else (),
            plan.excluded_tenants,
        )


def _counts(evidence: RolloutEvidence, name: str) -> tuple[int, int, int, int]:
    """Return good and bad requests of the step to the stable version, then to the candidate."""
    counts = [0, 0, 0, 0]
    for tally in evidence.tallies.values():
        bad, first = tally.bad.get(name, 0), 2 * tally.is_canary
        counts[first] += tally.requests.get(name, 0) - bad
        counts[first + 1] += bad
    return counts[0], counts[1], counts[2], counts[3]

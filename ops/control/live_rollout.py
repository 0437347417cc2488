"""A rollout while control carries it out: its state, what servers have reported since the last
look, and what they get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from ..rollouts.rollout import RolloutSight

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from transport.control_protocol import Activity, Observed
    from transport.rollout_protocol import FinishedRequest, SeenIncident, WorkDone
    from triolet.config.routes import Route

    from .rollout_stores import KeptRollout

MAX_PENDING: Final = 100_000
"""Ended requests between two looks; more are dropped."""


class LiveRollout:
    """A rollout that this control carries out or has carried out.

    Args:
      kept: the rollout as it is in the store.

    Attributes:
      rollout: its state.
      number: number of its last write.
      renewed_at: Unix time of the last write or renewal.
      written_at: Unix time of the last write; 0 before this control's first one.
      written: revision that was written.
      trouble: why it cannot be written; empty if it can.
      is_looked_at: whether control has renewed or withdrawn its routes since it started.
      is_left: whether another control carries it out.
      is_moved: whether servers have the permanent route to the candidate.
      is_released: whether it has ended, and others may change its versions.
      routes: the routes that servers get, by zone; the empty name is for all other zones.
      view: what servers see of it.
      due: set when a look is due at once.
      ended: set when it has ended.
      over: set when its end was written.
      adding: cancels the addition of the candidate.
    """

    def __init__(self, kept: KeptRollout) -> None:
        self.rollout, self.number, self.renewed_at = kept
        self.written_at = 0.0
        self.written = self.rollout.revision
        self.trouble = ""
        zones = ("", *self.rollout.settings.zones)
        self.is_looked_at = not any(self.rollout.route(0.0, zone) for zone in zones)
        self.is_left = False
        self.is_moved = False
        self.is_released = self.rollout.is_over
        self.routes: dict[str, Route] = {}
        self.view = self.rollout.view()
        self.due = trio.Event()
        self.ended = trio.Event()
        self.over = trio.Event()
        self.adding = trio.CancelScope()
        self._requests: list[FinishedRequest] = []
        self._incidents: list[SeenIncident] = []

    def observe(self, said: Observed, zone: str) -> None:
        """Record requests and incidents of this rollout's versions in its current zone.

        Args:
          said: what a server saw.
          zone: zone of the server.
        """
        zones = self.rollout.settings.zones
        if zones and zone != zones[self.rollout.zone]:
            return
        versions = {self.rollout.plan.stable, self.rollout.plan.candidate}
        requests = [one for one in said.requests if one.version in versions]
        self._requests += requests[: MAX_PENDING - len(self._requests)]
        incidents = [one for one in said.incidents if one.version in versions]
        self._incidents += incidents[: MAX_PENDING - len(self._incidents)]
        self.due.set()

    def take(
        self,
        now: float,
        canary_share: float,
        activities: Iterable[Activity],
        freezes: Collection[str],
        work: tuple[WorkDone, WorkDone],
    ) -> RolloutSight:
        """Return what was seen since the last look.

        Args:
          now: Unix time.
          canary_share: see `RolloutSight`.
          activities: latest reports of servers that are alive.
          freezes: why no rollout should go on.
          work: see `RolloutSight`.
        """
        name = self.rollout.plan.candidate
        reports = {one.server: one.candidates[name] for one in activities if name in one.candidates}
        requests, incidents = self._requests, self._incidents
        self._requests, self._incidents, self.due = [], [], trio.Event()
        return RolloutSight(
            now, requests, incidents, canary_share, reports, freezes, work, self.trouble
        )

"""Follows the rollouts that control announces: asks golden prompts and sends shadow copies to the
candidates that this server has, and reports both."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import trio

from transport.rollout_protocol import ENDED_PHASES, CandidateReport
from triolet.errors import RequestError

from .golden import golden_answers
from .shadow import ShadowCopies

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from transport.rollout_protocol import RolloutView
    from triolet.config import CandidateConfig

    from ..scheduling.links import Links


class ServedVersion(NamedTuple):
    """A version of a model that this server has.

    Attributes:
      links: its workers.
      encode: returns the token ids of a text.
    """

    links: Links
    encode: Callable[[str], Awaitable[tuple[int, ...]]]


class _Candidate:
    """The candidate of one rollout.

    Args:
      view: the rollout.
      own: the candidate.
      shadow: its shadow copies.

    Attributes:
      version: its name.
      shadow: its shadow copies.
      scope: cancels `run`.
    """

    def __init__(self, view: RolloutView, own: ServedVersion, shadow: ShadowCopies) -> None:
        self.version = view.candidate
        self.shadow = shadow
        self.scope = trio.CancelScope()
        self._every_s = view.golden_every_s
        self._own = own
        self._golden = CandidateReport()

    @property
    def report(self) -> CandidateReport:
        """What is known about it."""
        return msgspec.structs.replace(self._golden, shadow=self.shadow.sums)

    async def run(self, config: CandidateConfig) -> None:
        """Test it once its workers are ready, until cancelled."""
        with self.scope:
            await self._own.links.wait_ready()
            with self.shadow:
                while self._every_s:
                    await self._ask(config)
                    await trio.sleep(self._every_s)
                await trio.sleep_forever()

    async def _ask(self, config: CandidateConfig) -> None:
        links, encode = self._own
        try:
            self._golden = CandidateReport(await golden_answers(links, encode, config))
        except RequestError as error:
            # One that has answered may merely be busy; errors of users show a fault.
            if not links.admission.is_draining and not self._golden.golden:
                said = f"a golden prompt failed: {error.message}"
                self._golden = CandidateReport(golden_error=said)


class Candidates:
    """The candidates of rollouts on this server.

    Args:
      config: bounds.
      find: returns a version by its name; None if this server does not have it.
    """

    def __init__(
        self, config: CandidateConfig, find: Callable[[str], ServedVersion | None]
    ) -> None:
        self._config = config
        self._find = find
        self._views: Sequence[RolloutView] = ()
        self._news = trio.Event()
        self._known: dict[tuple[str, Links, Links, float], _Candidate] = {}

    def use(self, rollouts: Sequence[RolloutView]) -> None:
        """Follow these rollouts from now on. Call it with all of control's news: without any for
        `news_s`, all candidates are forgotten."""
        self._views = rollouts
        self._news.set()

    def reports(self) -> dict[str, CandidateReport]:
        """Return what is known about each candidate, by version."""
        return {one.version: one.report for one in self._known.values()}

    async def run(self) -> None:
        """Follow the rollouts until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                with trio.move_on_after(self._config.news_s) as silence:
                    await self._news.wait()
                self._news = trio.Event()
                self._follow(() if silence.cancelled_caught else self._views, nursery)

    def _follow(self, views: Sequence[RolloutView], nursery: trio.Nursery) -> None:
        """Start and end the candidates' tasks."""
        before, self._known = self._known, {}
        for view in views:
            stable, own = self._find(view.stable), self._find(view.candidate)
            if (
                view.phase in ENDED_PHASES
                or stable is None
                or own is None
                or stable.links is own.links  # a rollout to the same version
            ):
                continue
            # The interval is 0 until all servers have the candidate.
            key = view.id, stable.links, own.links, view.golden_every_s
            one = before.pop(key, None)
            if one is None:
                shadow = ShadowCopies(*key[1:3], self._config.max_copies)
                one = _Candidate(view, own, shadow)
                nursery.start_soon(one.run, self._config)
            one.shadow.share = view.shadow_share
            one.shadow.excluded_tenants = view.excluded_tenants
            self._known[key] = one
        for one in before.values():
            one.scope.cancel()

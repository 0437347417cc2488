"""Whose turn it is, and where to.

Pure. Asks the queue who is first and the workers' announcements who has room. Moves nobody: who has
a turn is taken out of the queue by attempts.py, which begins the attempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from triolet.service_class import Band

from . import ends
from .dispatch import Route, choose_route, is_model_gone
from .forking import fork_route

if TYPE_CHECKING:
    from collections.abc import Callable

    from triolet.config import ServerConfig
    from triolet.service_class import ServiceClass

    from .dispatch import Need
    from .fair_queue import FairQueue
    from .recovery import Recovery
    from .sequence import Sequence
    from .workers import Worker

HANDOVER_TRUST: Final = 0.2
"""How far one transfer of KV moves what is expected of the next."""


class Turns:
    """Who may go now.

    Args:
      config: who may compute prompts.
      workers: every worker there is or will be.
      line: who waits.
      recovery: what faults so far mean.
      kept_share: which share of each worker is not for a class now.
    """

    def __init__(
        self,
        config: ServerConfig,
        workers: tuple[Worker, ...],
        line: FairQueue[Sequence],
        recovery: Recovery,
        kept_share: Callable[[ServiceClass, float], float],
    ) -> None:
        self._routing = config.routing
        self._workers = workers
        self._line = line
        self._recovery = recovery
        self._kept_share = kept_share
        self._handover_s = 0.0

    def handed_over(self, took_s: float) -> None:
        """Learn how long KV took, from prefill's first token until decode had it."""
        self._handover_s += HANDOVER_TRUST * (took_s - self._handover_s)

    def next(self, now: float) -> tuple[Sequence, Route | ends.End] | None:
        """Return who may leave the queue now, and where to or with which end."""
        line = self._line
        try:
            sequence = line.first()
            while sequence is not None:
                turn = self._turn_of(sequence, now)
                if turn is not None:
                    return sequence, turn
                if self._waits_for_probation(self._need(sequence, now), now):
                    line.set_aside(sequence)
                    sequence = line.first()
                elif line.lets_pass(sequence):
                    sequence = line.first(is_aged_too=False)
                else:
                    return None
        finally:
            line.restore()
        return None

    def _turn_of(self, sequence: Sequence, now: float) -> Route | ends.End | None:
        """Return where one may go that is first, or how it ends; None if it has to wait."""
        need = self._need(sequence, now)
        route = fork_route(sequence, now) or self._route(need, now)
        if route is not None:
            return self._recovery.objection_to(sequence.request, now) or route
        if is_model_gone(self._workers, need, self._routing):
            return ends.other_model()
        return None

    def _need(self, sequence: Sequence, now: float) -> Need:
        """Return what one that waits asks of workers now."""
        own = sequence.request.claim.service_class
        kept_share, band = self._kept_share(own, now), Band(own, self._line.is_beyond(sequence))
        return sequence.need._replace(kept_share=kept_share, band=band)

    def _waits_for_probation(self, need: Need, now: float) -> bool:
        """Return whether there is room, but not for one that workers may have died of."""
        freely = need._replace(is_on_probation=False, is_suspect=False)
        return freely != need and self._route(freely, now) is not None

    def _route(self, need: Need, now: float) -> Route | None:
        paths, routing = self._recovery.paths, self._routing
        return choose_route(self._workers, need, paths, routing, self._handover_s, now)

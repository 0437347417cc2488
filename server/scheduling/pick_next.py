"""Whose turn it is, and where to.

Pure. Asks the queue who is first and the workers' announcements who has room. Moves nobody: who has
a turn is taken out of the queue by attempts.py, which begins the attempt.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from triolet.config import BACKGROUND_HOLD_S, BACKGROUND_WINDOW
from triolet.service_class import Band, ServiceClass

from . import outcome
from .forking import fork_route
from .request import Phase
from .routing import Route, choose_route, is_model_gone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from triolet.config import ServerConfig

    from ..contract.generation import GenerationRequest
    from .queue import FairQueue
    from .recovery import Recovery
    from .request import Request
    from .routing import Need
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
        line: FairQueue[Request],
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

    def next(self, now: float) -> tuple[Request, Route | outcome.Failure] | None:
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

    def _turn_of(self, sequence: Request, now: float) -> Route | outcome.Failure | None:
        """Return where one may go that is first, or how it ends; None if it has to wait."""
        need = self._need(sequence, now)
        route = fork_route(sequence, now) or self._route(need, now)
        if route is not None:
            return self._recovery.objection_to(sequence.request, now) or route
        if is_model_gone(self._workers, need, self._routing):
            return outcome.other_model()
        return None

    def _need(self, sequence: Request, now: float) -> Need:
        """Return what one that waits asks of workers now."""
        own = sequence.request.scheduling.service_class
        kept_share, band = self._kept_share(own, now), Band(own, self._line.is_over_share(sequence))
        return sequence.need._replace(kept_share=kept_share, band=band)

    def _waits_for_probation(self, need: Need, now: float) -> bool:
        """Return whether there is room, but not for one that workers may have died of."""
        freely = need._replace(is_isolated=False, is_suspect=False)
        return freely != need and self._route(freely, now) is not None

    def _route(self, need: Need, now: float) -> Route | None:
        paths, routing = self._recovery.paths, self._routing
        return choose_route(self._workers, need, paths, routing, self._handover_s, now)


_BEFORE_FIRST_TOKEN: Final = (Phase.QUEUED, Phase.RESERVING, Phase.PREFILLING)


def is_background(request: GenerationRequest) -> bool:
    """Return whether a request stands back for all others."""
    return request.scheduling.service_class is ServiceClass.BATCH


def window_of(request: GenerationRequest, token_window: int) -> int:
    """Return how far a stream may run ahead of its reader."""
    return min(token_window, BACKGROUND_WINDOW) if is_background(request) else token_window


class Background:
    """Who stands still for others now.

    Args:
      sequences: all that there are.
      line: where they wait.
    """

    def __init__(self, sequences: Iterable[Request], line: FairQueue[Request]) -> None:
        self._sequences = sequences
        self._line = line
        self._held: dict[Request, float | None] = {}

    def __bool__(self) -> bool:
        """Whether somebody stands still."""
        return bool(self._held)

    def is_urgent(self) -> bool:
        """Return whether somebody interactive waits for its first token, and not only for another
        one of its tenant's to end: whoever stands still would be no help to that."""
        return any(
            sequence.phase in _BEFORE_FIRST_TOKEN
            and not sequence.is_input
            and not is_background(sequence.request)
            and not self._line.is_held(sequence)
            for sequence in self._sequences
        )

    def hold_s(self) -> float:
        """Return for how long what would begin now stands back at most: not for ever while others
        wait, of whom its class has a part; but while its class is paused, when it would only grow
        old in the line."""
        if self._line.classes[ServiceClass.BATCH].is_paused:
            return math.inf
        return BACKGROUND_HOLD_S if self.is_urgent() else 0.0

    def holds(self, sequence: Request) -> bool:
        """Return whether one that has read what it had gets no more for now."""
        if not is_background(sequence.request) or not self.is_urgent():
            return False
        self._held.setdefault(sequence, None)
        return True

    def released(self, now: float) -> list[Request]:
        """Return those that may go on: all once nobody is in a hurry, and each after a while. Its
        row and its blocks may be what others wait for."""
        if self._held and not self.is_urgent():
            released = list(self._held)
        else:
            released = []
            for sequence, since in self._held.items():
                if since is None:
                    self._held[sequence] = now
                elif now - since >= BACKGROUND_HOLD_S:
                    released.append(sequence)
        for sequence in released:
            del self._held[sequence]
        return released

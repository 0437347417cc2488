"""Where requests meet what is decided of overload: asks, and tells what became of them.

Pure. Turns requests, the line and workers into the numbers that overload.py decides by. Knows all
of these; decides nothing itself.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from transport.frames import EndReason
from triolet.errors import RequestError, crowded_out, deadline_exceeded
from triolet.ids import Role
from triolet.service_class import ServiceClass

from . import outcome
from .accounting import Outcome
from .newcomer import is_modest
from .overload import Overload
from .request import Ask
from .wait_estimate import Capacity

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from triolet.config import ServerConfig
    from triolet.service_class import Scheduling

    from ..contract.generation import GenerationRequest
    from .fair_queue import FairQueue
    from .observer import OverloadObserver
    from .request import Forecast, Request
    from .request_table import RequestTable
    from .status import OverloadStatus
    from .workers import Worker


DRAWN_BYTES: Final = 4
"""Of a request's id, which is random: as much chance as a wait needs."""
LEAST_TOKENS: Final = 1
"""Of a prompt that is not tokenised yet, and of one that shares another's."""


class Gate:
    """The gate of one server.

    Args:
      config: bounds, and which mechanisms are on.
      workers: every worker there is or will be.
      line: who waits for them.
      observer: told of refusals and levels.
      now: the time of the start.

    Attributes:
      overload: what decides.
    """

    def __init__(
        self,
        config: ServerConfig,
        workers: tuple[Worker, ...],
        line: FairQueue[Request],
        observer: OverloadObserver,
        now: float,
    ) -> None:
        self.overload = Overload(config.overload, observer, now, config.routing.overtaken_s)
        self._workers = workers
        self._line = line
        self._swept_at = now

    def judge(self, requests: Sequence[GenerationRequest], now: float) -> list[Forecast]:
        """Return what is expected of requests that come together.

        Raises:
          RequestError: one of them is refused.
        """
        asks = [_ask(request) for request in requests]
        together = sum(ask.num_tokens for ask in asks)
        sizes = [(len(request.prompt_ids), request.sampling.max_tokens) for request in requests]
        forecasts: list[Forecast] = []
        for request, one in zip(requests, asks, strict=True):
            due = now + request.deadline_s
            ahead = self._line.tokens_ahead(
                request.scheduling,
                request.priority,
                due,
                one.num_tokens,
                request.sampling.max_tokens,
            )
            spares = is_modest(self._line, request.scheduling, sizes)
            ask = one._replace(together_tokens=together, is_modest=spares)
            forecast = self.overload.judge(ask, ahead, now)
            # One answer holds them all: it begins with the first, and the others may take as long.
            forecasts.append(forecast.of_sibling(due) if forecasts else forecast)
        return forecasts

    def judge_early(
        self, scheduling: Scheduling, request_id: bytes, key: int, deadline_s: float, now: float
    ) -> None:
        """Raise for a request that is refused whatever its prompt is, before anything is spent.

        Raises:
          RequestError: as `judge` does.
        """
        ahead = self._line.tokens_ahead(scheduling, 0, now + deadline_s)
        ask = Ask(
            scheduling,
            LEAST_TOKENS,
            deadline_s,
            key,
            _draw(request_id),
            is_unread=True,
            is_modest=self.is_modest(scheduling, LEAST_TOKENS),
        )
        self.overload.judge(ask, ahead, now)

    def is_modest(self, scheduling: Scheduling, prompt_tokens: int) -> bool:
        """Return whether a tenant asks for less than its share, beside others, and still does with
        such a prompt."""
        return is_modest(self._line, scheduling, [(prompt_tokens, math.inf)])

    def took(self, sequence: Request, forecast: Forecast, now: float) -> None:
        """Note a request that was taken on."""
        sequence.forecast = forecast
        self.overload.took(_ask(sequence.request), forecast, now)

    def too_late(self, sequence: Request, now: float) -> outcome.End | None:
        """Return the end of a sequence that waits in vain: on which nothing was spent, and whose
        first token cannot come in time any more."""
        forecast = sequence.forecast
        if forecast is None or sequence.num_attempts:
            return None
        if not self.overload.is_hopeless(forecast, now):
            return None
        waited_s = now - sequence.times.submitted_at
        self.overload.expired(forecast, waited_s, is_limited=_is_limited(sequence))
        if forecast.slo_s is None or sequence.request.deadline_s < forecast.slo_s:
            error = deadline_exceeded("its first token would come after the request's deadline")
        else:
            text = f"it waited {waited_s:.1f} s, and its first token would come too late"
            error = crowded_out(text, max(forecast.slo_s / 2, 1.0))
        return outcome.End(error, Outcome.EXPIRED, EndReason.DEADLINE)

    def begun(self, sequence: Request, now: float) -> None:
        """Note that an attempt begins."""
        forecast = sequence.forecast
        if forecast is None or sequence.num_attempts:
            return
        times = sequence.times
        self.overload.dispatched(
            forecast,
            now - times.submitted_at,
            has_waited=now > times.queued_at,
            is_limited=_is_limited(sequence),
            now=now,
        )

    def first_token(self, sequence: Request, now: float) -> None:
        """Note a sequence's first token."""
        forecast, times = sequence.forecast, sequence.times
        if forecast is not None and times.dispatched_at is not None:
            ttft_s, resided_s = now - times.submitted_at, now - times.dispatched_at
            self.overload.first_token(forecast, ttft_s, resided_s, now)

    def ended(self, sequence: Request, now: float, *, is_well: bool) -> None:
        """Note that a sequence ends."""
        forecast, dispatched_at = sequence.forecast, sequence.times.dispatched_at
        if forecast is not None:
            held_s = now - dispatched_at if is_well and dispatched_at is not None else None
            self.overload.ended(forecast, held_s)

    def sweep(self, now: float, *, is_able: bool) -> None:
        """Let time pass. `is_able`: there are workers that could take who waits."""
        line = self._line
        elapsed_s, self._swept_at = now - self._swept_at, now
        if not is_able:
            self.overload.idle_s += elapsed_s
        # Asked so that whoever waits by its tenant's limits is known; rows that are left free for
        # others are no reason to take the line for empty.
        line.first()
        is_waiting = is_able and any(one.is_waiting for one in line.lines)
        self.overload.prediction.advance(now, is_waiting=is_waiting)
        self.overload.sweep(_capacity(self._workers), self._tokens_waiting, now)

    @property
    def paused(self) -> Collection[ServiceClass]:
        """Classes that stand still at the moment."""
        return (ServiceClass.BATCH,) if self.overload.brownout.pauses_batch else ()

    def _tokens_waiting(self, service_class: ServiceClass) -> float:
        """Return the prompt tokens of a class and those above it that wait for workers."""
        lines = self._line.lines[: service_class + 1]
        return float(sum(line.ready_tokens for line in lines if not line.is_paused))


def _ask(request: GenerationRequest) -> Ask:
    num_tokens = LEAST_TOKENS if request.origin_id else len(request.prompt_ids)
    key = request.key or hash((request.scheduling.tenant, request.prompt_ids))
    return Ask(request.scheduling, num_tokens, request.deadline_s, key, _draw(request.request_id))


def _is_limited(sequence: Request) -> bool:
    """Return whether one may wait by a limit of its tenant's, which says nothing of the line."""
    scheduling = sequence.request.scheduling
    return scheduling.max_running is not None or scheduling.kv_share < 1


def _draw(request_id: bytes) -> float:
    return int.from_bytes(request_id[:DRAWN_BYTES], "big") / 256**DRAWN_BYTES


def _capacity(workers: Iterable[Worker]) -> Capacity:
    usable = [worker for worker in workers if worker.is_usable]
    prefills = [worker for worker in usable if worker.role is Role.PREFILL]
    decodes = [worker for worker in usable if worker.role is Role.DECODE]
    rates = [worker.load.prompt_tokens_per_s for worker in prefills or decodes]
    return Capacity(
        rows=sum(worker.beat.row_credit for worker in decodes if worker.beat is not None),
        tokens_per_s=sum(rates),
        fastest_tokens_per_s=max(rates, default=0.0),
        foreign_tokens=sum(worker.foreign_tokens for worker in prefills),
    )


class Doorkeeper:
    """The door of one server.

    Args:
      gate: decides.
      book: counts.
    """

    def __init__(self, gate: Gate, book: RequestTable) -> None:
        self._gate = gate
        self._book = book

    def refuse_early(
        self, scheduling: Scheduling, request_id: bytes, key: int, deadline_s: float, now: float
    ) -> None:
        """Raise for a request that would be refused whatever its prompt is.

        Args:
          scheduling: whose it is.
          request_id: random bytes.
          key: names what it asks for, whoever asks again.
          deadline_s: within which it has to be done.
          now: the time.

        Raises:
          RequestError: 503, and it is counted as one request that was refused.
        """
        try:
            self._gate.judge_early(scheduling, request_id, key, deadline_s, now)
        except RequestError as error:
            self._book.receive()
            self._book.reject(scheduling, error)
            raise

    def max_tokens(self, scheduling: Scheduling, prompt_tokens: int) -> int | None:
        """Return how many tokens the answer to such a prompt may have at the moment; None for no
        cap. A tenant that asks for less than its share has none."""
        if self._gate.is_modest(scheduling, prompt_tokens):
            return None
        return self._gate.overload.brownout.max_tokens(scheduling.service_class)

    @property
    def level(self) -> int:
        """Of brownout, 0 to 4."""
        return int(self._gate.overload.brownout.level)

    def status(self, now: float) -> OverloadStatus:
        """Return what there is to be seen."""
        return self._gate.overload.status(now)

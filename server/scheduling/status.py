"""What the scheduler shows: its state at one moment, as plain values, and each event as it happens.

Calls of observers are synchronous and must be quick: they happen between two tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from triolet.config import LABEL_NAMES
from triolet.service_class import ServiceClass

from .request import ValueCounts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from transport.frames import Capacity, Load
    from triolet.control_protocol import ModelState
    from triolet.ids import Role

    from .queue import FairQueue
    from .workers import Worker


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker.

    Attributes:
      role: prefill or decode.
      name: its own, or its address as long as it has not answered.
      address: where it is reached.
      state: connecting, alive, suspect, draining or dead.
      fingerprint: of its model; empty until it answered.
      capacity: what it has; None until it answered.
      load: what it last said it does.
      attempts: this server's attempts there.
      breaker: closed, open or half_open; unless closed it is left out, or tried.
      trouble: why it does not answer or is not used, in words; empty if nothing is known.
      labels: where it runs and what it costs, those whose names are known here.
    """

    role: Role
    name: str
    address: str
    state: str
    fingerprint: str
    capacity: Capacity | None
    load: Load
    attempts: int
    breaker: str
    trouble: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OverloadStatus:
    """What admission sees.

    Attributes:
      brownout: level, 0 to 4.
      pressure: predicted wait of the default class, of what it may wait.
      guard_tokens: prompt tokens that may be owed a first token; None for no limit.
      owed_tokens: that are.
      expected_returns: refused requests that were told when to come back, and are expected.
      tokens_per_s: at which the queue moves; None if that is not known.
      error_s: mean error of predicted first tokens, of late.
    """

    brownout: int = 0
    pressure: float = 0.0
    guard_tokens: float | None = None
    owed_tokens: int = 0
    expected_returns: int = 0
    tokens_per_s: float | None = None
    error_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """All workers and requests.

    Attributes:
      workers: in the order of the configuration, prefill first.
      is_ready: a decode worker takes requests, and so does a prefill worker with the same model,
        or decode computes prompts itself.
      is_draining: this server takes nothing new.
      queued: requests that wait for workers.
      running: requests that workers are busy with.
      max_model_len: most tokens of prompt and completion together.
      received: requests submitted so far.
      accepted: of these, taken on.
      rejected: of these, refused; by error code.
      ended: terminal events so far; by outcome.
      retries_left: attempts after faults that the retry budget can pay for.
      quarantined: prompts and grammars that are refused for what they did to workers.
      overload: what admission sees.
      queued_by_class: those that wait, by service class.
      queues: which can be asked for what takes a look at every tenant.
      told: the model's state as control told it; None where there is no control.
      is_coming: whether requests may wait for workers that control starts.
    """

    workers: tuple[WorkerStatus, ...]
    is_ready: bool
    is_draining: bool
    queued: int
    running: int
    max_model_len: int
    received: int
    accepted: int
    rejected: Mapping[str, int]
    ended: Mapping[str, int]
    retries_left: float
    quarantined: int
    overload: OverloadStatus
    queued_by_class: Mapping[str, int]
    queues: tuple[FairQueue[Any], ...]
    told: ModelState | None = None
    is_coming: bool = False

    @property
    def queue_lag_tokens(self) -> float:
        """By how many tokens of weight 1 the tenants that wait are apart, when this is asked."""
        return max((one.lag_tokens for queue in self.queues for one in queue.classes), default=0.0)


def present(
    workers: Iterable[Worker], spare_addresses: Collection[str], *, is_asleep: bool = False
) -> list[Worker]:
    """Return the workers that there are or should be; a spare one counts while it is there.

    Args:
      workers: all that may be there.
      spare_addresses: of those that are there during restarts.
      is_asleep: the model's workers have ended on purpose: they are not missed.
    """
    return [w for w in workers if w.is_connected or not (is_asleep or w.address in spare_addresses)]


def queued_by_class(queues: Iterable[FairQueue[Any]]) -> dict[str, int]:
    """Return how many wait, by the names of service classes."""
    queues = tuple(queues)
    return {
        service_class.name.lower(): sum(q.classes[service_class].num_waiting for q in queues)
        for service_class in ServiceClass
    }


def worker_status(worker: Worker) -> WorkerStatus:
    """Return how a worker is shown."""
    labels = {} if worker.welcome is None else worker.welcome.labels
    is_leaving = worker.is_connected and worker.is_draining
    return WorkerStatus(
        role=worker.role,
        name=worker.address if worker.peer_id is None else worker.peer_id.name,
        address=worker.address,
        state="draining" if is_leaving else worker.monitor.state.value,
        fingerprint=worker.fingerprint,
        capacity=worker.capacity,
        load=worker.load,
        attempts=len(worker.shares),
        breaker=worker.breaker.state.value,
        trouble=worker.trouble,
        labels={name: text for name, text in labels.items() if name in LABEL_NAMES},
    )


class OverloadObserver:
    """Told of overload: refusals, predictions, levels of brownout."""

    def refused(self, reason: str, service_class: ServiceClass) -> None:
        """A request was refused or dropped because there is too much."""

    def predicted(self, predicted_s: float, ttft_s: float) -> None:
        """A first token came after `ttft_s`; `predicted_s` was expected."""

    def level_changed(self, was: int, level: int, pressure: float) -> None:
        """The level of brownout changed."""


class Observer:
    """Told of each event once.

    Args:
      overload: told of overload.

    Attributes:
      token_gaps: times between two tokens of one sequence [s].
    """

    def __init__(self, overload: OverloadObserver | None = None) -> None:
        self.overload = overload or OverloadObserver()
        self.token_gaps = ValueCounts(())

    def prompt_routed(self, role: str, why: str) -> None:
        """It is settled which role computes a prompt, and why."""

    def prompt_computed(self, queue_s: float | None, compute_s: float) -> None:
        """A prefill worker computed a prompt that waited there for `queue_s`; or, with None, decode
        computed one itself, so long after it had granted the lease."""

    def retry_unaffordable(self) -> None:
        """A request ends because too many others are tried again already."""

    def quarantined(self, what: str, request_id: str) -> None:
        """A `request` made workers fail, or its `grammar` took one too long to follow."""

    def worker_joined(self, worker: str, away_s: float | None = None) -> None:
        """A worker, or its next life, was greeted. One that had been given up without a farewell
        was not heard of for `away_s` before."""

    def worker_lost(self, worker: str, cause: str, num_requests: int = 0) -> None:
        """A worker was given up, with so many requests that needed it."""

    def worker_refused(self, worker: str, reason: str) -> None:
        """A worker and this server cannot work together; an operator has to act."""

    def worker_stepped(self, num_steps: int, num_tokens: int) -> None:
        """A worker computed so much between two heartbeats."""

    def breaker_changed(self, worker: str, state: str) -> None:
        """A worker is left out, tried, or used again."""

    def frames_dropped(self, reason: str, count: int = 1) -> None:
        """Frames of workers were not acted upon."""

    def server_paused(self, seconds: float) -> None:
        """This process itself stood still for so long."""

"""The scheduler's state at one moment as plain values, and the observers that receive its events.

Observer calls are synchronous and must be quick: they run between two tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from transport.rollout_protocol import WorkDone
from triolet.config import LABEL_NAMES
from triolet.ids import Role
from triolet.service_class import ServiceClass

from .request import ValueCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from transport.control_protocol import ModelState
    from transport.frames import Capacity, Load

    from ..contract.output_stream import OutputStream
    from .queue import FairQueue
    from .workers import Worker


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker.

    Attributes:
      role: prefill or decode.
      name: the worker's name; its address until it answers.
      address: the worker's address.
      state: connecting, alive, suspect, draining or dead.
      fingerprint: its model; empty until it answers.
      capacity: its capacity; None until it answers.
      load: its last reported load.
      attempts: number of this server's attempts on it.
      breaker: closed, open or half_open; an open one is left out, a half-open one is being tried.
      share: share of its usual work that it gets; below 1 while its zone returns.
      trouble: why it does not answer or is not used; empty if unknown.
      labels: where it runs and what it costs; known label names only.
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
    share: float
    trouble: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OverloadStatus:
    """The state of overload control.

    Attributes:
      brownout: brownout level, 0 to 4.
      pressure: predicted wait of the default class / its allowed wait.
      guard_tokens: limit on prompt tokens without a first token; None for no limit.
      owed_tokens: prompt tokens without a first token.
      expected_returns: refused requests that were told when to return and are still expected.
      tokens_per_s: rate of the queue; None if unknown.
      error_s: recent mean error of predicted first tokens.
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
    """The state of all workers and requests.

    Attributes:
      workers: workers in the order of the configuration, prefill first.
      is_ready: a decode worker takes requests, and a prefill worker with the same model does too or
        decode computes prompts itself.
      is_draining: this server accepts no new requests.
      queued: requests that wait for workers.
      running: requests on workers.
      max_model_len: maximum tokens of prompt and completion together.
      received: requests submitted so far.
      accepted: requests accepted so far.
      rejected: requests refused so far, by error code.
      ended: terminal events so far, by outcome.
      retries_left: retries that the budget can pay for.
      quarantined: prompts and grammars refused because of what they did to workers.
      overload: the state of overload control.
      queued_by_class: waiting requests by service class.
      queues: the queues, for values that need a pass over every tenant.
      told: the model's state as reported by control; None without control.
      is_coming: requests may wait for workers that control starts.
      lost_zones: zones of which no worker answers, or which are returning to their usual work.
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
    lost_zones: frozenset[str] = frozenset()

    @property
    def work(self) -> WorkDone:
        """The work of its workers since they started, as their heartbeats say."""
        loads = [(one.role, one.load) for one in self.workers]
        tokens = {of: sum(one.computed_tokens for at, one in loads if at is of) for of in Role}
        return WorkDone(
            sum(load.busy_s for _, load in loads),
            sum(load.steps for _, load in loads),
            tokens[Role.DECODE],
            prompt_tokens=tokens[Role.PREFILL],
        )

    @property
    def queue_lag_tokens(self) -> float:
        """The largest lag between waiting tenants, in tokens at weight 1, computed when read."""
        return max((one.lag_tokens for queue in self.queues for one in queue.classes), default=0.0)


def present(
    workers: Iterable[Worker], spare_addresses: Collection[str], *, is_asleep: bool = False
) -> list[Worker]:
    """Return the workers that are or should be connected; a spare one counts only while connected.

    Args:
      workers: all known workers.
      spare_addresses: addresses used only during restarts.
      is_asleep: the model's workers ended on purpose and are not missed.
    """
    return [w for w in workers if w.is_connected or not (is_asleep or w.address in spare_addresses)]


def queued_by_class(queues: Iterable[FairQueue[Any]]) -> dict[str, int]:
    """Return the number of waiting requests by service class name."""
    queues = tuple(queues)
    return {
        service_class.name.lower(): sum(q.classes[service_class].num_waiting for q in queues)
        for service_class in ServiceClass
    }


def worker_status(worker: Worker) -> WorkerStatus:
    """Return the status of a worker."""
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
        share=worker.breaker.share,
        trouble=worker.trouble,
        labels={name: text for name, text in labels.items() if name in LABEL_NAMES},
    )


class StreamWitness(Protocol):
    """Sees the streams of one model's accepted requests."""

    def submitted(self, stream: OutputStream) -> None:
        """Called with each new stream before anything is read from it."""
        ...

    def turn_over(self) -> None:
        """Called at the end of each turn in which requests may have begun or ceased to wait."""
        ...


class OverloadObserver:
    """Receives overload events: refusals, predictions, brownout levels."""

    def refused(self, reason: str, service_class: ServiceClass) -> None:
        """Called when a request is refused or dropped because of overload."""

    def predicted(self, predicted_s: float, ttft_s: float) -> None:
        """Called for a first token: it came after `ttft_s`, expected after `predicted_s`."""

    def level_changed(self, was: int, level: int, pressure: float) -> None:
        """Called when the brownout level changes."""


class Observer:
    """Receives each event of the scheduler once.

    Args:
      overload: receives overload events.

    Attributes:
      token_gaps: times between two tokens of one sequence [s].
      slow_gap_s: time between two tokens above which a gap is slow (docs/SLO.md).
      incident: called with the address of a worker that crashed, hung or failed a step.
    """

    def __init__(self, overload: OverloadObserver | None = None) -> None:
        self.incident: Callable[[str], object] = str
        self.overload = overload or OverloadObserver()
        self.token_gaps = ValueCounts(())
        self.slow_gap_s = math.inf

    def prompt_routed(self, role: str, why: str) -> None:
        """Called when a prompt's role is decided, with the reason."""

    def prompt_computed(self, queue_s: float | None, compute_s: float) -> None:
        """Called when a prompt is computed: on prefill after waiting there for `queue_s`; with
        None, by decode itself in the time since it granted the lease."""

    def retry_unaffordable(self) -> None:
        """Called when a request ends because the retry budget is spent."""

    def quarantined(self, what: str, request_id: str) -> None:
        """Called when a `request` crashed workers, or its `grammar` took too long."""

    def worker_joined(self, worker: str, away_s: float | None = None) -> None:
        """Called when a worker is greeted, first or after a restart. If it had been lost without a
        farewell, it had been silent for `away_s`."""

    def worker_lost(self, worker: str, cause: str, num_requests: int = 0) -> None:
        """Called when a worker is given up, with the number of requests that needed it."""

    def worker_refused(self, worker: str, reason: str, *, is_again: bool = False) -> None:
        """Called when this server cannot use a worker and an operator must act. `is_again` means
        that the previous attempt failed for the same reason."""

    def worker_stepped(self, num_steps: int, num_tokens: int) -> None:
        """Called with a worker's steps and tokens between two heartbeats."""

    def breaker_changed(self, worker: str, state: str) -> None:
        """Called when a worker, or `zone NAME`, is excluded, tried, or used again."""

    def frames_dropped(self, reason: str, count: int = 1) -> None:
        """Called when frames of workers are ignored."""

    def server_paused(self, seconds: float) -> None:
        """Called when this process was paused."""

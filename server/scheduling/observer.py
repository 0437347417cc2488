"""What the fleet tells whoever counts: metrics, logs, tests.

Knows facts and no metrics library. Calls are synchronous and must be quick: they happen between two
tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from triolet.service_class import Scheduling, ServiceClass

    from ..contract.generation import Usage
    from .accounting import Outcome


class FaultObserver(Protocol):
    """Told of what went wrong, and of what is done about it."""

    def retry_unaffordable(self) -> None:
        """A request ends because too many others are tried again already."""
        ...

    def request_quarantined(self, request_id: str) -> None:
        """It killed the workers that computed it."""
        ...

    def grammar_quarantined(self, request_id: str) -> None:
        """The grammar of this request took a worker too long to follow."""
        ...

    def breaker_changed(self, worker: str, state: str) -> None:
        """A worker is left out, tried, or used again."""
        ...

    def frames_dropped(self, reason: str, count: int = 1) -> None:
        """Frames of workers were not acted upon."""
        ...

    def server_paused(self, seconds: float) -> None:
        """This process itself stood still for so long."""
        ...


class OverloadObserver(Protocol):
    """Told of what is refused, and of what is given up."""

    def refused(self, reason: str, service_class: ServiceClass) -> None:
        """A request was refused because there is too much, or dropped before anything was spent."""
        ...

    def predicted(self, predicted_s: float, ttft_s: float) -> None:
        """A first token came, and when it had been expected."""
        ...

    def level_changed(self, was: int, level: int, pressure: float) -> None:
        """More or less is given up than before."""
        ...


class WorkObserver(Protocol):
    """Told of sizes: of what is asked for, and of workers' steps."""

    def asked(self, max_tokens: int) -> None:
        """A completion was accepted that may have so many tokens."""
        ...

    def answered(self, num_choices: int, longest_tokens: int) -> None:
        """All completions of one prompt have ended."""
        ...

    def stepped(self, num_steps: int, num_tokens: int) -> None:
        """A worker computed so much between two heartbeats."""
        ...


class FleetObserver(Protocol):
    """Told of each event once."""

    @property
    def work(self) -> WorkObserver:
        """What is told of sizes."""
        ...

    @property
    def overload(self) -> OverloadObserver:
        """Who is told of overload."""
        ...

    @property
    def faults(self) -> FaultObserver:
        """Who is told of faults."""
        ...

    def request_received(self) -> None:
        """Somebody submitted."""
        ...

    def request_rejected(self, code: str, scheduling: Scheduling) -> None:
        """It was refused before anything was begun."""
        ...

    def request_accepted(self) -> None:
        """It will get exactly one terminal event."""
        ...

    def request_dispatched(self, queue_s: float, service_class: ServiceClass) -> None:
        """Its first attempt begins, after so long in the queue."""
        ...

    def prefill_computed(self, queue_s: float, compute_s: float) -> None:
        """A prefill worker said how long a prompt waited there and took."""
        ...

    def prompt_routed(self, role: str, why: str) -> None:
        """It is settled who computes a prompt: a worker of this role, and why."""
        ...

    def local_prefill_computed(self, elapsed_s: float) -> None:
        """Decode computed a prompt itself, so long after it had granted the lease."""
        ...

    def first_token(self, ttft_s: float) -> None:
        """Its first token came."""
        ...

    def next_token(self, itl_s: float) -> None:
        """Another token came, so long after the one before."""
        ...

    def attempt_failed(self, cause: str) -> None:
        """An attempt is over and the request goes on with another one."""
        ...

    def request_ended(
        self, outcome: Outcome, usage: Usage, elapsed_s: float, scheduling: Scheduling
    ) -> None:
        """It got its terminal event."""
        ...

    def worker_joined(self, worker: str) -> None:
        """A worker, or its next life, was greeted."""
        ...

    def worker_lost(self, worker: str, cause: str) -> None:
        """A worker was given up."""
        ...

    def worker_refused(self, worker: str, reason: str) -> None:
        """A worker and this server cannot work together; an operator has to act."""
        ...


class SilentFaultObserver:
    """Counts nothing."""

    def retry_unaffordable(self) -> None:
        """Ignore it."""

    def request_quarantined(self, request_id: str) -> None:
        """Ignore it."""

    def grammar_quarantined(self, request_id: str) -> None:
        """Ignore it."""

    def breaker_changed(self, worker: str, state: str) -> None:
        """Ignore it."""

    def frames_dropped(self, reason: str, count: int = 1) -> None:
        """Ignore it."""

    def server_paused(self, seconds: float) -> None:
        """Ignore it."""


class SilentOverloadObserver:
    """Counts nothing."""

    def refused(self, reason: str, service_class: ServiceClass) -> None:
        """Ignore it."""

    def predicted(self, predicted_s: float, ttft_s: float) -> None:
        """Ignore it."""

    def level_changed(self, was: int, level: int, pressure: float) -> None:
        """Ignore it."""


class SilentWorkObserver:
    """Counts nothing."""

    def asked(self, max_tokens: int) -> None:
        """Ignore it."""

    def answered(self, num_choices: int, longest_tokens: int) -> None:
        """Ignore it."""

    def stepped(self, num_steps: int, num_tokens: int) -> None:
        """Ignore it."""


class SilentObserver:
    """Counts nothing."""

    def __init__(self) -> None:
        self.work: WorkObserver = SilentWorkObserver()
        self.overload: OverloadObserver = SilentOverloadObserver()
        self.faults: FaultObserver = SilentFaultObserver()

    def request_received(self) -> None:
        """Ignore it."""

    def request_rejected(self, code: str, scheduling: Scheduling) -> None:
        """Ignore it."""

    def request_accepted(self) -> None:
        """Ignore it."""

    def request_dispatched(self, queue_s: float, service_class: ServiceClass) -> None:
        """Ignore it."""

    def prefill_computed(self, queue_s: float, compute_s: float) -> None:
        """Ignore it."""

    def prompt_routed(self, role: str, why: str) -> None:
        """Ignore it."""

    def local_prefill_computed(self, elapsed_s: float) -> None:
        """Ignore it."""

    def first_token(self, ttft_s: float) -> None:
        """Ignore it."""

    def next_token(self, itl_s: float) -> None:
        """Ignore it."""

    def attempt_failed(self, cause: str) -> None:
        """Ignore it."""

    def request_ended(
        self, outcome: Outcome, usage: Usage, elapsed_s: float, scheduling: Scheduling
    ) -> None:
        """Ignore it."""

    def worker_joined(self, worker: str) -> None:
        """Ignore it."""

    def worker_lost(self, worker: str, cause: str) -> None:
        """Ignore it."""

    def worker_refused(self, worker: str, reason: str) -> None:
        """Ignore it."""

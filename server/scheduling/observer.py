"""What the scheduler tells metrics, logs and tests: base classes that ignore everything.

Calls are synchronous and must be quick: they happen between two tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triolet.service_class import Scheduling, ServiceClass

    from ..contract.generation import Usage


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
    """

    def __init__(self, overload: OverloadObserver | None = None) -> None:
        self.overload = overload or OverloadObserver()

    def request_rejected(self, code: str, scheduling: Scheduling) -> None:
        """A request was refused before anything was begun."""

    def request_accepted(self, max_tokens: int | None) -> None:
        """A request was taken on; None for an input, which has no tokens."""

    def request_dispatched(self, queue_s: float, service_class: ServiceClass) -> None:
        """Its first attempt begins, after so long in the queue."""

    def request_ended(
        self, outcome: str, usage: Usage, elapsed_s: float, scheduling: Scheduling
    ) -> None:
        """It got its terminal event; `outcome` is the column of the accounts."""

    def choices_ended(self, num_choices: int, longest_tokens: int) -> None:
        """All completions of one prompt have ended."""

    def prompt_routed(self, role: str, why: str) -> None:
        """It is settled which role computes a prompt, and why."""

    def prompt_computed(self, queue_s: float | None, compute_s: float) -> None:
        """A prefill worker computed a prompt that waited there for `queue_s`; or, with None, decode
        computed one itself, so long after it had granted the lease."""

    def first_token(self, ttft_s: float) -> None:
        """The first token of a request came."""

    def next_token(self, itl_s: float) -> None:
        """Another token came, so long after the one before."""

    def attempt_failed(self, cause: str) -> None:
        """An attempt is over and the request goes on with another one."""

    def retry_unaffordable(self) -> None:
        """A request ends because too many others are tried again already."""

    def quarantined(self, what: str, request_id: str) -> None:
        """A `request` made workers fail, or its `grammar` took one too long to follow."""

    def worker_joined(self, worker: str) -> None:
        """A worker, or its next life, was greeted."""

    def worker_lost(self, worker: str, cause: str) -> None:
        """A worker was given up."""

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

"""Metrics of requests and workers: counts request events and the scheduler's observer calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog
from prometheus_client import Counter, Histogram

from ..contract.request_events import (
    AttemptFailed,
    FirstTokenArrived,
    RequestAccepted,
    RequestDispatched,
    RequestEnded,
    RequestRefused,
)
from ..scheduling.requests import FAREWELL
from ..scheduling.status import Observer
from .counters import NO_USAGE, REJECTED, OverloadMetrics, TenantMetrics, VersionTokens
from .histogram import TokenHistogram

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from ..contract.request_events import RequestEvents

log = structlog.get_logger(__name__)

TTFT_BUCKETS: Final = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
)  # fmt: skip
ITL_BUCKETS: Final = (
    .001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5,
)  # fmt: skip
SECONDS_BUCKETS: Final = (.05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)  # fmt: skip
TOKEN_BUCKETS: Final = tuple(float(2**power) for power in range(18))
CHOICE_BUCKETS: Final = (1, 2, 5, 10, 20)
WAIT_BUCKETS: Final = (.001, .005, .02, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 60, 300)  # fmt: skip

COUNTERS: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("requests_received", "Sequences submitted", ()),
    ("requests_accepted", "Sequences accepted", ()),
    ("requests_rejected", "Sequences refused at admission", ("code", "class")),
    ("requests", "Ended sequences by outcome", ("outcome",)),
    ("prompts_routed", "Prompts by the role that computes them, and reason", ("role", "why")),
    ("attempts_failed", "Attempts that ended early and were retried", ("cause",)),
    ("prompt_tokens", "Prompt tokens", ()),
    ("cached_prompt_tokens", "Prompt tokens found in the KV cache", ()),
    ("completion_tokens", "Tokens generated", ()),
    ("grammars_checked", "Grammars of requests by the result of their check", ("verdict",)),
    ("workers_joined", "Workers greeted, including restarted ones", ()),
    ("workers_lost", "Workers given up", ("cause",)),
    ("workers_refused", "Workers that cannot be used by this server", ()),
    ("retries_refused", "Requests ended because the retry budget was spent", ()),
    ("requests_quarantined", "Requests that crashed the workers that computed them", ()),
    ("grammars_quarantined", "Requests with a grammar that took a worker too long to evaluate", ()),
    ("breaker_changes", "Circuit breaker changes of workers, by the new state", ("state",)),
    ("frames_dropped", "Frames of workers that were ignored", ("reason",)),
    ("server_pauses", "Pauses of this process", ()),
    ("server_paused_seconds", "Total length of this process's pauses", ()),
)
HISTOGRAMS: Final[tuple[tuple[str, str, tuple[float, ...]], ...]] = (
    ("time_to_first_token_seconds", "From submission to the first token", TTFT_BUCKETS),
    ("inter_token_latency_seconds", "Between tokens of one sequence", ITL_BUCKETS),
    ("request_seconds", "From submission to the end", SECONDS_BUCKETS),
    ("queue_seconds", "From submission to dispatch", SECONDS_BUCKETS),
    ("prefill_queue_seconds", "Wait in the prefill worker before computing", SECONDS_BUCKETS),
    ("prefill_seconds", "Computing time of a prompt on a prefill worker", SECONDS_BUCKETS),
    ("local_prefill_seconds", "Computing time of a prompt on a decode worker", SECONDS_BUCKETS),
    ("decode_seconds", "From the first token to the end", SECONDS_BUCKETS),
    ("inference_seconds", "From dispatch to the end, if there was a token", SECONDS_BUCKETS),
    ("request_token_seconds", "Mean time between the tokens of a completion", ITL_BUCKETS),
    ("request_prompt_tokens", "Prompt length in tokens", TOKEN_BUCKETS),
    ("request_completion_tokens", "Completion length in tokens", TOKEN_BUCKETS),
    ("request_longest_completion_tokens", "Longest completion of a prompt", TOKEN_BUCKETS),
    ("request_max_tokens", "Maximum completion tokens requested", TOKEN_BUCKETS),
    ("request_choices", "Completions per prompt", CHOICE_BUCKETS),
    ("step_tokens", "Tokens per worker step, averaged between heartbeats", TOKEN_BUCKETS),
)
LOSSES: Final = (
    *("restarted", "another_life", "protocol", "goodbye", "farewell", "link_gone", "link_full"),
    *("silent", "wedged", "server_paused"),
)
"""Causes of a worker's loss, exported at 0 from the start: Prometheus sees no increase in a counter
that starts at 1."""
MAX_WORDS: Final = 32
"""Maximum label values taken from other parts of the process; further ones become `other`."""


class Words:
    """Bounds the values of a label: the first ones keep their names."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def bounded(self, word: str) -> str:
        """Return the word, or `other` if there are too many."""
        if word not in self._seen:
            if len(self._seen) >= MAX_WORDS:
                return "other"
            self._seen.add(word)
        return word


@dataclass(slots=True)
class _PromptChoices:
    """The completions of one prompt.

    Attributes:
      num: number of completions.
      num_live: completions that have not ended.
      longest_tokens: length of the longest ended one.
    """

    num: int = 0
    num_live: int = 0
    longest_tokens: int = 0


class FleetMetrics(Observer):
    """Counts requests, attempts, faults and workers.

    Args:
      registry: the registry for the metrics.
      tenants: counts each ended request by tenant.
      tokens: counts tokens of each version of the model, by digest.

    Attributes:
      counters: counters by name, without the prefix.
      histograms: histograms by name, without the prefix.
      version_tokens: counters of tokens by the version's digest.
    """

    def __init__(
        self, registry: CollectorRegistry, tenants: TenantMetrics, tokens: dict[str, VersionTokens]
    ) -> None:
        super().__init__(OverloadMetrics(registry))
        self.version_tokens = tokens
        self._tenants = tenants
        self._choices: dict[bytes, _PromptChoices] = {}
        self._words = {name: Words() for name in ("outcome", "code", "cause")}
        self._waits = Histogram(
            "triolet_class_queue_seconds",
            "From submission to dispatch, by service class",
            ("class",),
            buckets=WAIT_BUCKETS,
            registry=registry,
        )
        self.counters = {
            name: Counter(f"triolet_{name}", text, labels, registry=registry)
            for name, text, labels in COUNTERS
        }
        self.histograms = {
            name: TokenHistogram(f"triolet_{name}", text, buckets, registry)
            for name, text, buckets in HISTOGRAMS
        }
        for cause in LOSSES:
            self.counters["workers_lost"].labels(cause)
        self.token_gaps = self.histograms["inter_token_latency_seconds"]

    def subscribe_to(self, events: RequestEvents) -> None:
        """Count these events from now on."""
        events.subscribe(RequestRefused, self.refused)
        events.subscribe(RequestAccepted, self.accepted)
        events.subscribe(RequestDispatched, self.dispatched)
        events.subscribe(FirstTokenArrived, self.first_token)
        events.subscribe(AttemptFailed, self.attempt_failed)
        events.subscribe(RequestEnded, self.ended)

    def refused(self, event: RequestRefused) -> None:
        """Count a refused request."""
        self.counters["requests_received"].inc()
        code = self._words["code"].bounded(event.code)
        service_class = event.service_class.name.lower()
        self.counters["requests_rejected"].labels(code, service_class).inc()
        self._tenants.count(event.tenant, event.service_class, REJECTED, NO_USAGE)

    def accepted(self, event: RequestAccepted) -> None:
        """Count an accepted request."""
        self.counters["requests_received"].inc()
        self.counters["requests_accepted"].inc()
        if event.facts.is_input:
            return
        self.histograms["request_max_tokens"].observe(event.max_tokens)
        choices = self._choices.setdefault(event.facts.prompt_id, _PromptChoices())
        choices.num += 1
        choices.num_live += 1

    def worker_stepped(self, num_steps: int, num_tokens: int) -> None:
        """Count a worker's steps between two heartbeats. Count and sum are exact."""
        if num_steps > 0:
            self.histograms["step_tokens"].observe(num_tokens / num_steps, num_steps)

    def dispatched(self, event: RequestDispatched) -> None:
        """Record a request's wait in the queue."""
        self.histograms["queue_seconds"].observe(event.queue_s)
        self._waits.labels(event.facts.service_class.name.lower()).observe(event.queue_s)

    def prompt_computed(self, queue_s: float | None, compute_s: float) -> None:
        """Record the times of a computed prompt; `queue_s` is None if decode computed it."""
        if queue_s is None:
            self.histograms["local_prefill_seconds"].observe(compute_s)
            return
        self.histograms["prefill_queue_seconds"].observe(queue_s)
        self.histograms["prefill_seconds"].observe(compute_s)

    def prompt_routed(self, role: str, why: str) -> None:
        """Count a prompt by role and reason, both from fixed sets."""
        self.counters["prompts_routed"].labels(str(role), str(why)).inc()

    def first_token(self, event: FirstTokenArrived) -> None:
        """Record the time to a first token."""
        self.histograms["time_to_first_token_seconds"].observe(event.ttft_s)

    def attempt_failed(self, event: AttemptFailed) -> None:
        """Count an attempt that is retried."""
        self.counters["attempts_failed"].labels(self._words["cause"].bounded(event.cause)).inc()

    def ended(self, event: RequestEnded) -> None:
        """Count an ended request, with its tokens and times."""
        facts, usage, elapsed_s = event.facts, event.counted, event.elapsed_s
        outcome = self._words["outcome"].bounded(event.outcome)
        self.counters["requests"].labels(outcome).inc()
        self._tenants.count(facts.tenant, facts.service_class, outcome, usage)
        self.version_tokens[facts.model_digest].add(usage)
        self.counters["prompt_tokens"].inc(usage.prompt_tokens)
        self.counters["cached_prompt_tokens"].inc(usage.cached_tokens)
        self.counters["completion_tokens"].inc(usage.completion_tokens)
        self.histograms["request_seconds"].observe(elapsed_s)
        if usage.prompt_tokens:
            self.histograms["request_prompt_tokens"].observe(usage.prompt_tokens)
        self.histograms["request_completion_tokens"].observe(usage.completion_tokens)
        if usage.ttft_s is not None:
            decode_s = max(0.0, elapsed_s - usage.ttft_s)
            self.histograms["decode_seconds"].observe(decode_s)
            self.histograms["inference_seconds"].observe(max(0.0, elapsed_s - usage.queue_s))
            if usage.completion_tokens > 1:
                mean_s = decode_s / (usage.completion_tokens - 1)
                self.histograms["request_token_seconds"].observe(mean_s)
        if not facts.is_input:
            self._note_choice(facts.prompt_id, usage.completion_tokens)

    def _note_choice(self, prompt_id: bytes, completion_tokens: int) -> None:
        """Record a prompt's completions when the last one has ended."""
        choices = self._choices[prompt_id]
        choices.num_live -= 1
        choices.longest_tokens = max(choices.longest_tokens, completion_tokens)
        if not choices.num_live:
            del self._choices[prompt_id]
            self.histograms["request_choices"].observe(choices.num)
            self.histograms["request_longest_completion_tokens"].observe(choices.longest_tokens)

    def worker_joined(self, worker: str, away_s: float | None = None) -> None:
        """Count and log a greeted worker. The return of a lost one is logged as a warning, so that
        readers of warnings learn that it is back."""
        self.counters["workers_joined"].inc()
        if away_s is None:
            log.info("worker_joined", worker=worker)
        else:
            log.warning("worker_joined", worker=worker, away_s=round(away_s, 3))

    def worker_lost(self, worker: str, cause: str, num_requests: int = 0) -> None:
        """Count and log a lost worker."""
        self.counters["workers_lost"].labels(self._words["cause"].bounded(cause)).inc()
        # A drained worker has moved or finished its requests: an operator restarted it.
        tell = log.info if cause == FAREWELL else log.warning
        tell("worker_lost", worker=worker, cause=cause, requests=num_requests)

    def worker_refused(self, worker: str, reason: str, *, is_again: bool = False) -> None:
        """Count a worker that cannot be used, and log each reason once. An operator must fix it."""
        self.counters["workers_refused"].inc()
        if not is_again:
            log.error("worker_refused", worker=worker, reason=reason)

    def retry_unaffordable(self) -> None:
        """Count a request that ended because the retry budget is spent."""
        self.counters["retries_refused"].inc()

    def quarantined(self, what: str, request_id: str) -> None:
        """Count and log a quarantined request or grammar."""
        self.counters[f"{what}s_quarantined"].inc()
        tell = log.error if what == "request" else log.warning
        tell(f"{what}_quarantined", request_id=request_id)

    def breaker_changed(self, worker: str, state: str) -> None:
        """Count and log a change of the circuit breaker of a worker or zone."""
        self.counters["breaker_changes"].labels(state).inc()
        log.warning("breaker", worker=worker, state=state)

    def frames_dropped(self, reason: str, count: int = 1) -> None:
        """Count ignored frames of workers."""
        self.counters["frames_dropped"].labels(reason).inc(count)

    def server_paused(self, seconds: float) -> None:
        """Count and log a pause of this process."""
        self.counters["server_pauses"].inc()
        self.counters["server_paused_seconds"].inc(seconds)
        log.warning("process_paused", seconds=round(seconds, 3))

"""Settings of the queue, admission, routing, quotas and recovery, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta

from ..errors import SettingError
from ..service_class import ServiceClass
from ..units import MILLISECONDS, SECONDS
from .limits import (  # noqa: TC001 (get_type_hints reads the annotations)
    Count,
    CountOrZero,
    NotNegative,
    Positive,
    Share,
    ShareOrZero,
)
from .redis_url import require_redis_url


@dataclass(frozen=True, slots=True)
class EmbeddingLimits:
    """Limits of requests for vectors, per request and in total."""

    max_inputs: int = 2048
    """Inputs of one request: the same limit as OpenAI's API."""
    max_documents: int = 1000
    """Documents of one ranking request, or pairs of one scoring request: the same limit as Cohere's
    API. Each is an input, and its score costs a dot product on the event loop."""
    max_request_tokens: int = 300_000
    """Tokens of all inputs of one request: the same limit as OpenAI's API."""
    max_waiting_inputs: int = 16_384
    """Inputs of all requests that wait for a worker; about 1 KiB each plus their tokens."""
    credit_share: float = 0.25
    """Share of a prefill worker's prompt credit that may be under way to it. Workers hold hardly
    any queue, so that fairness and cancels take effect in the server."""


@dataclass(frozen=True, slots=True)
class RecoveryConfig:
    """How a server recovers from faults (server/scheduling/recovery.py)."""

    breaker_min_failures: int = 3
    """Faults of one worker among its last outcomes before it is left out: one is chance, two may
    have the same cause."""
    breaker_memory_s: float = 30.0 * SECONDS
    """Older outcomes of a worker are ignored."""
    breaker_cooldown_s: float = 1.0 * SECONDS
    """How long a worker is left out before one request tries it. Doubles with each further trial
    that fails."""
    breaker_max_cooldown_s: float = 30.0 * SECONDS
    """A repaired worker is used again within this time."""
    zone_evict_s: Positive = 2.0 * SECONDS
    """A zone counts as lost when all its workers have been silent for this long: longer than the
    timeout of one worker (`peer_timeout_s`), and than most partitions that heal by themselves."""
    zone_return_share: Share = 0.1
    """Share of its usual work that a zone gets when it answers again. Little, because its caches
    are empty and its fault may come back."""
    zone_return_s: Positive = 30.0 * SECONDS
    """Interval after which a zone gets this share more. With the defaults it gets everything in
    under five minutes."""
    retry_share: float = 0.1
    """Retries earned by each accepted request: if more than one request in ten needs a retry, the
    fleet is in trouble, and more retries would make it worse."""
    retry_burst: float = 20.0
    """Most retries that are saved up; also the number at the start."""
    retry_floor_per_s: float = 1.0
    """Retries per second that are always available, for servers with few requests."""
    path_avoid_s: float = 10.0 * SECONDS
    """A prefill and a decode worker that lost their connection are not paired for this long if
    there are others."""
    quarantine_s: float = 600.0 * SECONDS
    """A tenant's prompt that killed workers is refused for this long: clients that repeat it give
    up earlier, and a repaired worker gets another chance."""
    max_quarantined: int = 1024
    """Prompts in quarantine, one digest each. Beyond this, the tenant with the most loses its
    oldest one."""


class LocalPrefill(StrEnum):
    """When decode computes a prompt itself."""

    OFF = "off"
    """Never: without a prefill worker requests wait, and are refused in the end."""
    AUTO = "auto"
    """If the prompt is short and delays running streams less than the way over a prefill worker
    takes, and whenever there is no prefill worker."""
    ALWAYS = "always"
    """Every prompt: prefill workers get nothing."""


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Limits on what decode may compute itself (conditional disaggregation)."""

    local_prefill: LocalPrefill = LocalPrefill.AUTO
    """Whether decode workers compute prompts themselves: `off`; `auto` (short ones, and all while
    there is no prefill worker); `always`."""
    max_local_tokens: CountOrZero = 256
    """Prompts with more uncached tokens always go to a prefill worker: rates are estimates for the
    next second, and a long prompt takes longer than that."""
    max_gap_growth: NotNegative = 0.5
    """A prompt computed beside running streams may lengthen a step by this share: disaggregation
    exists to keep gaps within one and a half of their usual length."""
    stream_weight: NotNegative = 0.25
    """Cost of a second that a running stream waits, relative to a second of waiting for a first
    token: readers are behind their streams and do not notice a short wait."""
    prefill_grace_s: NotNegative = 1.0 * SECONDS
    """How long to wait for the last prefill worker to return before decode computes long prompts
    too: most of a restart on the same machine. It also covers the start, when decode may connect
    first."""

    suspect_grace_s: NotNegative = 10.0 * SECONDS
    """Grace time for a prompt that may have crashed the worker. Covers slow restarts too. Prefill
    has only prompts to lose, decode has streams. A request that ran alone during a fault waits
    equally long for news of whether its workers' processes have died."""

    backlog_s: NotNegative = 250 * MILLISECONDS
    """Seconds of computing, at its measured pace, that a prefill worker gets in advance from all
    servers together; the rest waits in the queue, where classes, tenants and deadlines decide the
    order. A few steps, so that a worker never waits for the next prompt."""

    overtaken_s: NotNegative = 1.0 * SECONDS
    """A prompt that computes longer than this does not hold back shorter ones: the worker computes
    them alongside. Shorter prompts finish in turn; otherwise later ones would overtake them by
    their tenants' shares."""

    cross_zone_penalty_s: NotNegative = 0.5 * SECONDS
    """Extra wait for a prefill worker that is accepted to keep KV within a zone. The KV of 2,000
    tokens of a model with 8 billion parameters is 256 MiB; at 5 Gbit/s between zones that takes 0.4
    s, and providers charge for it by the byte."""

    candidates: Count = 3
    """Workers of each role that a request compares: up to half of them, rounded up, are those with
    most of its prompt cached; the others are random. Two random ones keep the fullest worker within
    a few requests of the average in a fleet of any size; the third replaces one that is full or
    away. Each costs a server about 5 µs per request."""


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """How waiting requests share the workers."""

    fair: bool = True
    """Order by class, then tenants by weight, then deadlines. If off: class, priority, arrival; the
    tenants' dispatch limits (`max_running`, `kv_share`) are not applied either."""
    min_class_share: ShareOrZero = 0.05
    """Share of the higher classes' tokens that a waiting lower class gets. One request in twenty
    keeps it from starving while a flood above it lasts, and costs the higher classes an eighth if
    all three lower ones wait."""
    expected_completion_tokens: Count = 256
    """Charged for a request of a tenant without completions so far, or the request's limit if
    lower. The charge is corrected by the actual usage."""
    completion_memory: ShareOrZero = 0.1
    """Weight of each completion in the estimate for the tenant's next one: ten determine it."""

    head_start_tokens: CountOrZero = 4096
    """Tokens / weight by which a tenant that uses less than its share may be ahead of tenants that
    use more: a few requests at once go first, also on workers. Shares change by no more than
    this."""

    spare_rows_share: ShareOrZero = 0.125
    """Share of decode rows that tenants above their share leave free while other tenants have
    requests or had some recently: a tenant that asks rarely finds a row at once. A single tenant
    uses every row."""


@dataclass(frozen=True, slots=True)
class SloConfig:
    """Time to first token per class, in addition to the time that the prompt takes alone.

    The right values depend on the operator: a small model on a GPU answers within 50 ms, a large
    one on a laptop within 10 s. The defaults are how long people wait before they give up, so that
    a slow machine refuses no request that waiting would have served.
    """

    critical_s: Positive = 10.0 * SECONDS
    """People who were promised a fast answer notice ten seconds."""
    default_s: Positive = 30.0 * SECONDS
    """As long as a browser's user waits, and as a restart of workers may take."""
    sheddable_s: Positive = 20.0 * SECONDS
    """Shorter than the default class: the class that is refused first should not wait longest."""
    batch_s: Positive | None = None
    """None: batches have hours, and wait until their own deadlines."""

    def of(self, service_class: ServiceClass) -> float | None:
        """Return the seconds of a class; None for no limit."""
        match service_class:
            case ServiceClass.CRITICAL:
                return self.critical_s
            case ServiceClass.DEFAULT:
                return self.default_s
            case ServiceClass.SHEDDABLE:
                return self.sheddable_s
            case ServiceClass.BATCH:
                return self.batch_s


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Refuse a request at once if it would be served too late."""

    is_on: bool = True
    """If off, a request that fits into `max_queued_requests` waits as long as necessary."""
    deadline_share: float = 0.8
    """Largest predicted wait of a new request, as a share of its deadline: predictions are off by
    some tenths, and accepted requests must be in time."""
    return_share: float = 0.9
    """Largest predicted wait of a request that returns at the time of its Retry-After, as a share
    of its deadline."""
    new_request_share: float = 0.35
    """Largest predicted wait of a new request, as a share of its deadline, while refused requests
    are expected back and all of them return. Does not apply to critical requests and tenants below
    their share. The difference to `return_share` is reserved for returning requests. Half a full
    queue is enough for Poisson arrivals at `return_rate_share`."""
    return_rate_share: Share = 0.8
    """Share of the measured rate at which refused requests are told to return, divided among
    tenants by weight: arrivals are random, and a queue that is always busy grows with every
    burst."""
    max_expected_returns: int = 20_000
    """Refused requests that are recognised when they return: 3 MiB, and a scan of 2 ms every 3 s
    for those that do not. One tenant may use all free entries. Further requests also get a time,
    but count as new when they return."""
    retry_jitter_least: float = 0.8
    """Smallest factor on the estimated wait in `Retry-After`: with a smaller one a request returns
    before there is room."""
    retry_jitter_most: float = 1.3
    """Largest factor: requests refused together return spread over half of their wait, and none
    waits a third longer than necessary."""
    headroom_share: float = 0.125
    """Share of a worker's rows, blocks and waiting tokens reserved for the critical class while it
    is used: enough until the next row is free."""
    headroom_memory_s: float = 30.0 * SECONDS
    """A fleet without critical requests for this long reserves nothing for them."""

    def __post_init__(self) -> None:
        if not 0 < self.new_request_share <= self.deadline_share:
            raise SettingError(
                f"new_request_share is {self.new_request_share!r}; allowed: above 0 and at most "
                f"deadline_share, {self.deadline_share!r}"
            )
        if not 0 < self.retry_jitter_least <= self.retry_jitter_most:
            raise SettingError(
                f"retry_jitter_least and retry_jitter_most are {self.retry_jitter_least!r} and "
                f"{self.retry_jitter_most!r}; allowed: above 0 and rising"
            )


@dataclass(frozen=True, slots=True)
class BrownoutConfig:
    """Levels of degraded service for the least important classes under load.

    Pressure is the predicted wait of a new request divided by the wait that admission allows its
    class: at 1 the default class is refused.
    """

    is_on: bool = True
    """If off, no answer is shortened, and requests are refused only because of their wait."""
    cap_sheddable_at: float = 0.4
    """Level 1. Before requests are refused: shorter answers are the mildest loss."""
    pause_batch_at: float = 0.6
    """Level 2. Batches have hours, and slow down every step while they run."""
    cap_default_at: float = 0.9
    """Level 3. Just below the point at which the default class is refused."""
    critical_only_at: float = 0.5
    """Level 4, by the critical class's own pressure: half of its deadline goes into waiting, which
    no lower class justifies."""
    fall_share: Annotated[float, Meta(gt=0, lt=1)] = 0.6
    """A level ends below this share of its start: the pressure of a half-full queue moves by a
    quarter within a second."""
    rise_after_s: float = 1.0 * SECONDS
    """Pressure must last this long before a level rises, so that a burst that fits the queue
    changes nothing."""
    fall_after_s: float = 0.5 * SECONDS
    """Pressure must be gone this long before a level falls; from the worst to normal in two
    seconds."""
    sheddable_max_tokens: int = 256
    """From level 1: long enough for most chat answers, but not for runaway ones."""
    default_max_tokens: int = 512
    """From level 3."""
    long_prompt_tokens: int = 4096
    """From level 3, longer prompts below the critical class are refused: one takes the place of
    many."""

    def __post_init__(self) -> None:
        if not 0 < self.cap_sheddable_at <= self.pause_batch_at <= self.cap_default_at:
            raise SettingError(
                "brownout levels 1 to 3 begin at "
                f"{self.cap_sheddable_at}, {self.pause_batch_at}, {self.cap_default_at}; allowed: "
                "above 0 and rising"
            )


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """Last resort when predictions are wrong: a limit on prompt tokens of accepted requests without
    a first token. It applies only once first tokens are late. In the tests' simulated fleet,
    goodput without it is 0.85 of that with it when workers slow down to a quarter, and 0.1 to 0.3
    when they announce ten times their speed; when predictions are right it is never reached."""

    is_on: bool = True
    """If off, only the prediction limits what is accepted."""
    window_s: float = 0.5 * SECONDS
    """Window over which first tokens are judged together."""
    late_share: float = 0.1
    """Share of a window's first tokens that may be late before the limit falls: prediction errors
    of some tenths are tolerated."""
    fall: float = 0.7
    """Factor on the limit after a bad window: three bad ones bring it to a third."""
    rise: float = 1.05
    """Factor after a good window in which the limit was reached: doubles within seven seconds."""
    least_tokens: int = 1024
    """Lowest limit: a step or two of a prefill worker, which keeps workers busy and shows their
    speed."""


@dataclass(frozen=True, slots=True)
class OverloadConfig:
    """All settings of overload control."""

    slo: SloConfig = field(default_factory=SloConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    brownout: BrownoutConfig = field(default_factory=BrownoutConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)


MEMORY: Final = "memory"


@dataclass(frozen=True, slots=True)
class QuotaConfig:
    """Accounts of what tenants have used, and where they are kept."""

    limits: str = field(default=MEMORY, repr=False)
    """`memory`, or the URL of a Redis or Valkey shared by several servers, or `@` and a file that
    holds the URL. Never shown: it may contain a password."""
    spend_file: str | None = None
    """File in which a server with in-memory accounts saves what tenants have spent; None means that
    a restart forgets it. Servers on one port may share it."""
    servers: Count = 1
    """Number of servers that share the limits without Redis: each enforces its part. The kernel
    chooses the server of a connection, so only parts that add up to the limit are safe."""
    flush_s: float = 1.0 * SECONDS
    """Interval at which spend is saved: a killed process loses at most this much."""
    call_timeout_s: Positive = 50 * MILLISECONDS
    """For one round trip to Redis, which takes less than a millisecond nearby. A request waits for
    it before it is queued."""
    connect_timeout_s: float = 1.0 * SECONDS
    """For a new connection with its handshake. Only the probe waits for it."""
    probe_s: float = 0.5 * SECONDS
    """Interval of probes of a failed Redis."""
    heartbeat_s: float = 1.0 * SECONDS
    """Interval at which a server renews the lease of its reservations."""
    lease_s: float = 10.0 * SECONDS
    """A server's reservations are given back when it has been silent for this long. Longer than any
    pause of a living process; one that returns late is still charged."""
    charged_once_s: Annotated[float, Meta(ge=1, le=31_536_000)] = 86_400 * SECONDS
    """How long the charge of a batch line is remembered, so that computing the line again does not
    charge it again. Longer than any time in which all servers of a batch are away. Redis holds
    about 150 bytes per line for this time."""

    def __post_init__(self) -> None:
        if self.limits != MEMORY:
            require_redis_url("limits", self.limits, f"{MEMORY}, ")

    @property
    def is_shared(self) -> bool:
        """Whether the accounts are shared by several servers."""
        return self.limits != MEMORY

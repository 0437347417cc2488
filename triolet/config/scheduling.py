"""Settings of the queue, admission, routing, quotas and recovery, each beside its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Final
from urllib.parse import SplitResult, urlsplit

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


@dataclass(frozen=True, slots=True)
class EmbeddingLimits:
    """What a server takes of one request for vectors, and of all together."""

    max_inputs: int = 2048
    """Inputs of one request: as many as the API's own."""
    max_documents: int = 1000
    """Documents of one request for a ranking, pairs of one for scores: as many as Cohere's API
    takes. Each is an input, and its score takes a product of two vectors on the event loop."""
    max_request_tokens: int = 300_000
    """Of all its inputs together: as many as the API's own."""
    max_waiting_inputs: int = 16_384
    """That wait for a worker, of all requests; about 1 KiB each plus their tokens."""
    credit_share: float = 0.25
    """Of a prefill worker's prompt credit: so much may be under way to it. Workers hold hardly any
    queue, so that fairness and cancels act in the server."""


@dataclass(frozen=True, slots=True)
class RecoveryConfig:
    """How a server goes on after faults (server/scheduling/recovery.py)."""

    breaker_min_failures: int = 3
    """Faults of one worker, within its last outcomes, before it is left out: one is chance, two
    may be one cause."""
    breaker_memory_s: float = 30.0 * SECONDS
    """An outcome older than this says nothing of a worker."""
    breaker_cooldown_s: float = 1.0 * SECONDS
    """How long a worker is left out before one request tries it. Doubles with each trial in a row
    that fails."""
    breaker_max_cooldown_s: float = 30.0 * SECONDS
    """A worker that was repaired is back within this time."""
    retry_share: float = 0.1
    """Retries that each accepted request pays for: with one request in ten tried again a fleet is
    sick, and more retries would make it sicker."""
    retry_burst: float = 20.0
    """Most retries that are saved up, and what a server starts with."""
    retry_floor_per_s: float = 1.0
    """Retries that a server with few requests may have all the same."""
    path_avoid_s: float = 10.0 * SECONDS
    """A prefill and a decode worker that lost one another are not paired again for this long where
    there are others."""
    quarantine_s: float = 600.0 * SECONDS
    """A prompt that killed workers is refused to its tenant for this long: a client that repeats it
    gives up earlier, and a repaired worker gets its chance."""
    max_quarantined: int = 1024
    """Prompts in quarantine; a digest each. At the bound the tenant that has most of them loses its
    oldest one."""


class LocalPrefill(StrEnum):
    """When decode computes a prompt itself."""

    OFF = "off"
    """Never: without a prefill worker requests wait, and are refused in the end."""
    AUTO = "auto"
    """Where it is short and costs its streams less than the way over a prefill worker takes, and
    whenever no prefill worker is there."""
    ALWAYS = "always"
    """Every prompt: prefill workers get nothing."""


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """What conditional disaggregation may cost."""

    local_prefill: LocalPrefill = LocalPrefill.AUTO
    """Whether decode workers compute prompts themselves: `off`; `auto`, short ones, and all while
    no prefill worker is there; `always`."""
    max_local_tokens: CountOrZero = 256
    """Prompt tokens without KV beyond which a prefill worker computes, whatever the rates say: a
    rate is a guess about the next second, and a long prompt lasts longer than that."""
    max_gap_growth: NotNegative = 0.5
    """A prompt that decode computes beside running streams may lengthen a step by this share of
    it: gaps within one and a half of their usual length are what disaggregation is for."""
    stream_weight: NotNegative = 0.25
    """What a second that a running stream waits for its next token counts, beside one that a
    client waits for its first: readers are behind their streams, and do not see a short wait."""
    prefill_grace_s: NotNegative = 1.0 * SECONDS
    """How long after the last prefill worker was lost its return is waited for, before decode
    computes long prompts too: most of a restart on the same machine. It also covers the start, when
    decode may be met first."""

    suspect_grace_s: NotNegative = 10.0 * SECONDS
    """The same for a prompt that may be what the last one died of: a restart, slow ones included.
    Prefill has nothing but prompts to lose, decode has streams. For as long, a request that was
    struck alone waits to hear whether the processes of its workers have died."""

    backlog_s: NotNegative = 250 * MILLISECONDS
    """Of computing, by its own measured pace, that a prefill worker is given ahead, all servers
    together; the rest waits here, where classes, tenants and deadlines decide the order. Some
    steps, so that a worker never waits for the next prompt."""

    overtaken_s: NotNegative = 1.0 * SECONDS
    """A prompt that computes for longer is no reason to keep shorter ones back: the worker computes
    them beside it. Whatever is shorter is done in its turn, or those that come after it by their
    tenants' shares would be before it."""


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """How requests that wait share the workers."""

    fair: bool = True
    """Classes, then tenants by weight, then deadlines. Without it: class, priority, arrival; limits
    of tenants at dispatch (`max_running`, `kv_share`) are not kept either."""
    min_class_share: ShareOrZero = 0.05
    """Of the tokens that higher classes are given, promised to a lower class while it waits. One
    request in twenty keeps it from starving for as long as a flood above it lasts, and costs the
    higher classes an eighth when all three lower ones wait."""
    expected_completion_tokens: Count = 256
    """Of a tenant without a completion so far, or as many as the request allows if these are fewer.
    The charge is settled by what was really used."""
    completion_memory: ShareOrZero = 0.1
    """How far one completion moves what is expected of the tenant's next one: ten settle it."""

    head_start_tokens: CountOrZero = 4096
    """Tokens / weight by which a tenant that asks for less than its share may be ahead of tenants
    that ask for more: a few requests at once go before theirs, also on workers. Shares change by no
    more than this."""

    spare_rows_share: ShareOrZero = 0.125
    """Of all decode rows, left free by tenants with more than their share while other tenants have
    requests or had some just now: a tenant that asks seldom finds a row at once. With one tenant
    alone every row is used."""


@dataclass(frozen=True, slots=True)
class SloConfig:
    """Within which time first tokens are owed, by class; what a prompt takes alone comes on top.

    The right values are the operator's: a small model on a GPU answers within 50 ms, a large one on
    a laptop within 10 s. The defaults are what people wait for before they give up, so that a slow
    machine refuses no request that waiting would have served.
    """

    critical_s: Positive = 10.0 * SECONDS
    """People who were promised something notice ten seconds."""
    default_s: Positive = 30.0 * SECONDS
    """As long as a browser's user waits, and a restart of workers may take."""
    sheddable_s: Positive = 20.0 * SECONDS
    """Below the default's: the class that is refused first should not wait longest for it."""
    batch_s: Positive | None = None
    """None: batches have hours, and wait as long as their own deadlines allow."""

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
    """Refusing at once what would come too late."""

    is_on: bool = True
    """Off: a request that fits into `max_queued_requests` waits for as long as it takes."""
    deadline_share: float = 0.8
    """Of a deadline that a predicted wait may take: predictions err by some tenths, and a request
    that is taken on shall be in time."""
    return_share: float = 0.9
    """The same for a request that comes back when it was told to."""
    new_request_share: float = 0.35
    """The same for new requests while refused ones are expected back and all of them return, but
    for critical ones and tenants below their share: the difference to `return_share` is kept for
    those that return. Half a full queue is enough for Poisson arrivals at `return_rate_share`."""
    return_rate_share: Share = 0.8
    """Of the measured rate, at which refused requests are told to come back, shared by tenants by
    weight: arrivals are random, and a queue that is busy all the time grows with each chance."""
    max_expected_returns: int = 20_000
    """Refused requests that are known when they return: 3 MiB, and a scan of 2 ms each 3 s for
    those that do not. One tenant has as many as are left, at most. Beyond, a time is told as well,
    and the request is a new one when it returns."""
    retry_jitter_least: float = 0.8
    """Smallest factor on the estimated wait that `Retry-After` tells: below it a request comes
    back before there is room."""
    retry_jitter_most: float = 1.3
    """Largest factor: requests that are refused together come back spread over half of their
    wait, and none waits a third longer than it has to."""
    headroom_share: float = 0.125
    """Of a worker's rows, blocks and waiting tokens, kept for the critical class while it is used:
    enough for what comes before the next row is free."""
    headroom_memory_s: float = 30.0 * SECONDS
    """A fleet without critical requests for so long keeps nothing free for them."""

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
    """Levels at which less is done for the classes that matter least.

    Pressure is the predicted wait of a new request / what admission lets its class wait: at 1 the
    default class is refused.
    """

    is_on: bool = True
    """Off: no answer is shortened, and only waits decide what is refused."""
    cap_sheddable_at: float = 0.4
    """Level 1. Before a request is refused: shorter answers are the mildest loss."""
    pause_batch_at: float = 0.6
    """Level 2. Batches have hours; while they run they slow every step."""
    cap_default_at: float = 0.9
    """Level 3. Just below the point where the default class is refused."""
    critical_only_at: float = 0.5
    """Level 4, of the critical class's own pressure: half of its deadline is spent on waiting,
    which no lower class is worth."""
    fall_share: Annotated[float, Meta(gt=0, lt=1)] = 0.6
    """A level is left below this share of where it began: a queue that is half full moves by a
    quarter within a second."""
    rise_after_s: float = 1.0 * SECONDS
    """Pressure lasts this long before a level rises, so that a burst that the queue holds passes
    without a change."""
    fall_after_s: float = 0.5 * SECONDS
    """And is gone for this long before a level falls; from the worst to normal in two seconds."""
    sheddable_max_tokens: int = 256
    """From level 1 on: most of what chats answer fits, and what runs away does not."""
    default_max_tokens: int = 512
    """From level 3 on."""
    long_prompt_tokens: int = 4096
    """From level 3 on longer prompts below the critical class are refused: one takes the place of
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
    """The last bound, for when predictions are wrong: prompt tokens of accepted requests without a
    first token. There is no limit until first tokens come late. In the simulated fleet of the tests
    goodput without it is 0.85 of that with it when workers slow down to a quarter, and 0.1 to 0.3
    when they announce ten times their speed; when predictions are right it is never reached."""

    is_on: bool = True
    """Off: only the prediction bounds what is taken on."""
    window_s: float = 0.5 * SECONDS
    """How often first tokens are looked at together."""
    late_share: float = 0.1
    """Of a window's first tokens that may come late, before the limit falls: some tenths of the
    prediction's error are meant to be borne."""
    fall: float = 0.7
    """The limit after a bad window / what was owed then: three bad ones bring it to a third."""
    rise: float = 1.05
    """The limit after a good window in which it was reached: doubled within seven seconds."""
    least_tokens: int = 1024
    """Least limit: a step or two of a prefill worker, which keep the workers busy and show how fast
    they are."""


@dataclass(frozen=True, slots=True)
class OverloadConfig:
    """All of it."""

    slo: SloConfig = field(default_factory=SloConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    brownout: BrownoutConfig = field(default_factory=BrownoutConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)


MEMORY: Final = "memory"


AT: Final = "@"
"""Before the path of a file that holds the URL: every user that may list processes sees their
options."""


SCHEMES: Final = ("redis", "rediss", "unix")


@dataclass(frozen=True, slots=True)
class QuotaConfig:
    """What tenants have used, and where the accounts are kept."""

    limits: str = field(default=MEMORY, repr=False)
    """`memory`, or the URL of the Redis or Valkey that several servers share, or `@` and a file
    with that URL in it. Not shown: it may hold a password."""
    spend_file: str | None = None
    """Where a server with its accounts in memory writes down what tenants have spent; None for
    nowhere: a restart then forgets it. Servers on one port may share it."""
    servers: Count = 1
    """That share the limits without Redis: each of them enforces its part. The kernel, not we,
    chooses the server of a connection, so only parts add up to the limit for certain."""
    flush_s: float = 1.0 * SECONDS
    """How often spend is written down: what a killed process may forget."""
    call_timeout_s: Positive = 50 * MILLISECONDS
    """For one round trip to Redis, which takes under a millisecond beside a server. A request that
    asks waits for it before its request is queued."""
    connect_timeout_s: float = 1.0 * SECONDS
    """For a new connection with its handshake. Only the probe waits for it."""
    probe_s: float = 0.5 * SECONDS
    """How often a Redis that failed is tried again."""
    heartbeat_s: float = 1.0 * SECONDS
    """How often a server renews the lease of its reservations."""
    lease_s: float = 10.0 * SECONDS
    """When nothing was heard of a server for so long its reservations are given back. Above the
    longest pause that a living process makes; one that comes back late is charged all the same."""

    def __post_init__(self) -> None:
        is_url = self.limits != MEMORY and not self.limits.startswith(AT)
        if is_url and not _is_place(self.limits):
            raise SettingError(
                f"limits is {shown_url(self.limits)!r}; allowed: {MEMORY}, "
                "redis://HOST[:PORT][/DB], rediss://…, unix:///PATH, without a query, or @FILE "
                "with one of these"
            )

    @property
    def is_shared(self) -> bool:
        """Whether the accounts are kept where other servers find them."""
        return self.limits != MEMORY


def _is_place(url: str) -> bool:
    """Return whether a URL names a Redis, and nothing that is not read, such as a query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    place = parts.path if parts.scheme == "unix" else parts.hostname
    is_whole = not parts.query and not parts.fragment
    return parts.scheme in SCHEMES and bool(place) and is_whole and _is_numbered(parts)


def _is_numbered(parts: SplitResult) -> bool:
    """Return whether port and database of a URL are numbers, where there are any."""
    try:
        port = parts.port
    except ValueError:
        return False
    database = parts.path[1:]
    is_database = not database or (database.isascii() and database.isdigit())
    return parts.scheme == "unix" or (port != 0 and is_database and len(database) < 10)


def shown_url(url: str) -> str:
    """Return where a URL leads, without what it says of who asks: fit for logs."""
    scheme, is_url, rest = url.partition("://")
    if not is_url:
        return "(no URL)"
    place = re.split("[?#]", rest.rpartition("@")[2])[0]
    return f"{scheme.lower()}://{place}"


def has_password(url: str) -> bool:
    """Return whether a URL holds a password, also one that is no URL for another reason."""
    user, is_named, _ = url.partition("://")[2].rpartition("@")
    return bool(is_named) and ":" in user

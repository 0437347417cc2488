"""Bounds of what a server takes on, and of what it gives up first when there is too much.

Knows numbers; what they decide is server/fleet's: admission, prediction, returns, brownout, guard.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .errors import ConfigError
from .service_class import ServiceClass
from .units import SECONDS


@dataclass(frozen=True, slots=True)
class SloConfig:
    """Within which time first tokens are owed, by class; what a prompt takes alone comes on top.

    The right values are the operator's: a small model on a GPU answers within 50 ms, a large one on
    a laptop within 10 s. The defaults are what people wait for before they give up, so that nobody
    is refused on a slow machine whom waiting would have served.
    """

    critical_s: float = 10.0 * SECONDS
    """Whoever was promised something notices ten seconds."""
    default_s: float = 30.0 * SECONDS
    """As long as a browser's user waits, and a restart of workers may take."""
    sheddable_s: float = 20.0 * SECONDS
    """Below the default's: who is refused first should not wait longest for it."""
    batch_s: float | None = None
    """None: batches have hours, and wait as long as their own deadlines allow."""

    def __post_init__(self) -> None:
        for name, value in (
            ("critical_s", self.critical_s),
            ("default_s", self.default_s),
            ("sheddable_s", self.sheddable_s),
            ("batch_s", self.batch_s),
        ):
            if value is not None and value <= 0:
                raise ConfigError(f"the TTFT SLO {name} is {value!r}; allowed: > 0")

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
    """Off: whoever fits into `max_queued_requests` waits for as long as it takes."""
    deadline_share: float = 0.8
    """Of a deadline that a predicted wait may take: predictions are off by some tenths, and what is
    taken on shall be in time."""
    return_share: float = 0.9
    """The same for a request that comes back when it was told to."""
    newcomer_share: float = 0.35
    """The same for newcomers while refused requests are expected back and all of them come, but for
    critical ones and tenants below their share: the difference to `return_share` is kept for those
    that return. Half a full queue is enough for Poisson arrivals at `return_rate_share`."""
    return_rate_share: float = 0.8
    """Of the measured rate, at which refused requests are told to come back, shared by tenants by
    weight: arrivals are random, and a queue that is busy all the time grows with each chance."""
    max_expected_returns: int = 20_000
    """Refused requests that are known again when they come back: 3 MiB, and a scan of 2 ms each 3 s
    for those that do not. One tenant has as many as are left, at most. Beyond, a time is told as
    well, and the request is a newcomer when it comes back."""
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
        if not 0 < self.newcomer_share <= self.deadline_share:
            raise ConfigError(
                f"newcomer_share is {self.newcomer_share!r}; allowed: above 0 and at most "
                f"deadline_share, {self.deadline_share!r}"
            )
        if not 0 < self.return_rate_share <= 1:
            raise ConfigError(
                f"return_rate_share is {self.return_rate_share!r}; allowed: above 0 and at most 1"
            )
        if not 0 < self.retry_jitter_least <= self.retry_jitter_most:
            raise ConfigError(
                f"retry_jitter_least and retry_jitter_most are {self.retry_jitter_least!r} and "
                f"{self.retry_jitter_most!r}; allowed: above 0 and rising"
            )


@dataclass(frozen=True, slots=True)
class BrownoutConfig:
    """Steps by which less is done for those who matter least.

    Pressure is the predicted wait of a newcomer, as a share of what admission lets its class wait:
    1 is where the default class is refused.
    """

    is_on: bool = True
    """Off: nobody's answer is shortened, and only waits decide who is refused."""
    cap_sheddable_at: float = 0.4
    """Level 1. Before anybody is refused: shorter answers are the mildest loss."""
    pause_batch_at: float = 0.6
    """Level 2. Batches have hours; while they run they cost everybody's steps."""
    cap_default_at: float = 0.9
    """Level 3. Just below the point where the default class is refused."""
    critical_only_at: float = 0.5
    """Level 4, of the critical class's own pressure: half of its deadline is gone in waiting, which
    no class below it can be worth."""
    fall_share: float = 0.6
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
            raise ConfigError(
                "brownout levels 1 to 3 begin at "
                f"{self.cap_sheddable_at}, {self.pause_batch_at}, {self.cap_default_at}; allowed: "
                "above 0 and rising"
            )
        if not 0 < self.fall_share < 1:
            raise ConfigError(f"fall_share is {self.fall_share!r}; allowed: above 0 and below 1")


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """The last bound: prompt tokens taken on whose first token is still owed, whatever predictions
    say. It begins without a limit and finds one when first tokens come late."""

    is_on: bool = True
    """Off: only the prediction bounds what is taken on."""
    window_s: float = 0.5 * SECONDS
    """How often first tokens are looked at together."""
    late_share: float = 0.1
    """Of a window's first tokens that may come late, before the limit falls: some tenths of the
    prediction's error are meant to be borne."""
    fall: float = 0.7
    """The limit after a bad window, of what was owed then: three bad ones bring it to a third."""
    rise: float = 1.05
    """The limit after a good window in which it was reached: doubled within seven seconds."""
    least_tokens: int = 1024
    """Lower it never gets: a step or two of a prefill worker, with which the fleet keeps busy and
    shows how fast it is."""


@dataclass(frozen=True, slots=True)
class OverloadConfig:
    """All of it."""

    slo: SloConfig = field(default_factory=SloConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    brownout: BrownoutConfig = field(default_factory=BrownoutConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)

"""What servers and control tell each other about rollouts of model versions: parts of the messages
in `control_protocol`.

Servers report ended requests, incidents of workers, answers to golden prompts, and how shadow
copies compare. Control says which rollouts exist and what servers do for each.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
from msgspec.structs import astuple


class RolloutPhase(StrEnum):
    """The phase of a rollout."""

    PREPARING = "preparing"
    """The candidate is loaded, and answers the golden prompts for the first time."""
    SHADOW = "shadow"
    """The candidate gets copies of requests; clients see nothing of it."""
    CANARY = "canary"
    """The candidate answers the share of its step."""
    PAUSED = "paused"
    """As CANARY, but the step only ends by an operator's order, or by a rollback."""
    PROMOTED = "promoted"
    """The candidate is the stable version now."""
    ROLLED_BACK = "rolled_back"
    """The candidate gets no new request any more."""


ENDED_PHASES = frozenset({RolloutPhase.PROMOTED, RolloutPhase.ROLLED_BACK})


class FinishedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request to a model with a rollout that has ended.

    Requests of excluded tenants, those that a cap moved to the stable version, and those with a
    version named by an operator are left out.

    Attributes:
      user: the user's `user_hash`.
      version: the version that served it.
      chosen_at: Unix time when its version was chosen; for a session, when that of the session was.
      ended_at: Unix time when it ended.
      missed: objectives without a limit that it missed: "errors" (5xx, broken, past its deadline)
        or "rejected" (4xx).
      seconds: its times by objective with a limit: "ttft", without the wait in the queue, and of a
        stream "itl": twice the limit of the server's objectives if more than 1 % of the times
        between two tokens were longer, else 0.
    """

    user: int
    version: str
    chosen_at: float
    ended_at: float
    missed: frozenset[str]
    seconds: dict[str, float]


class SeenIncident(msgspec.Struct, frozen=True, array_like=True):
    """A worker crashed, hung or computed non-finite numbers.

    Attributes:
      worker: name of the worker.
      at: Unix time.
      version: the worker's version.
    """

    worker: str
    at: float
    version: str


class WorkDone(msgspec.Struct, frozen=True, array_like=True):
    """Work of one version's workers, since they started or in an interval.

    Attributes:
      busy_s: time that devices spent in steps.
      steps: number of decode steps.
      rows: their rows.
      kv_tokens: tokens that these rows attended to; 0 where workers do not count them.
      prompt_tokens: computed prompt tokens.
    """

    busy_s: float = 0.0
    steps: int = 0
    rows: int = 0
    kv_tokens: int = 0
    prompt_tokens: int = 0

    def since(self, before: WorkDone) -> WorkDone:
        """Return the work since then; none if a worker was restarted meanwhile."""
        pairs = zip(astuple(self), astuple(before), strict=True)
        done = WorkDone(*(late - early for late, early in pairs))
        return done if min(astuple(done)) >= 0 else WorkDone()


class ShadowComparison(msgspec.Struct, frozen=True):
    """How shadow copies compare with the requests that they copy: sums over the pairs of one server
    since it first heard of the rollout. Pairs of numbers are of the stable version first.

    Attributes:
      pairs: compared pairs.
      failed: copies that failed; they are not in the other sums.
      skipped: copies that were not begun, or ended early, because a request to the stable version
        waited or enough copies ran.
      rows_while_waiting: times that a copy got tokens while a request to the stable version waited.
      same_finish: pairs with the same finish reason.
      equal_tokens: tokens before the first difference.
      tokens: tokens of both.
      ttft_s: times to the first token.
      itl_s: times between two tokens, averaged over each answer.
    """

    pairs: int = 0
    failed: int = 0
    skipped: int = 0
    rows_while_waiting: int = 0
    same_finish: int = 0
    equal_tokens: int = 0
    tokens: tuple[int, int] = (0, 0)
    ttft_s: tuple[float, float] = (0.0, 0.0)
    itl_s: tuple[float, float] = (0.0, 0.0)

    def __add__(self, other: ShadowComparison) -> ShadowComparison:
        """Return the sums of both."""
        return ShadowComparison(
            self.pairs + other.pairs,
            self.failed + other.failed,
            self.skipped + other.skipped,
            self.rows_while_waiting + other.rows_while_waiting,
            self.same_finish + other.same_finish,
            self.equal_tokens + other.equal_tokens,
            (self.tokens[0] + other.tokens[0], self.tokens[1] + other.tokens[1]),
            (self.ttft_s[0] + other.ttft_s[0], self.ttft_s[1] + other.ttft_s[1]),
            (self.itl_s[0] + other.itl_s[0], self.itl_s[1] + other.itl_s[1]),
        )


class CandidateReport(msgspec.Struct, frozen=True):
    """What a server knows about a rollout's candidate.

    Attributes:
      golden: its latest answers to the golden prompts, as hex digests; empty before the first ones.
      golden_error: why the golden prompts failed before the first answers; empty if they did not.
      shadow: its shadow copies.
    """

    golden: tuple[str, ...] = ()
    golden_error: str = ""
    shadow: ShadowComparison = ShadowComparison()


class RolloutNote(msgspec.Struct, frozen=True):
    """A change of a rollout.

    Attributes:
      at: Unix time.
      phase: phase from then on.
      step: step from then on.
      said: why, for people.
      actor: who ordered it; empty if the judge did.
    """

    at: float
    phase: RolloutPhase
    step: int
    said: str
    actor: str = ""


class RolloutView(msgspec.Struct, frozen=True):
    """A rollout, as servers see it.

    Attributes:
      id: its id.
      model: public name.
      stable: the version that served before.
      candidate: the new version.
      candidate_digest: digest of the candidate; empty outside the store.
      phase: current phase.
      step: current step; 0 before the first.
      shares: the candidate's share in each step.
      began_at: Unix time when the current step began.
      said: the latest verdict, for people.
      golden_every_s: interval of golden prompts; 0 for none.
      shadow_share: share of requests that are copied to the candidate now.
      counts: requests of this step by signal: good and bad ones of the stable version, then of the
        candidate.
      recent: the same for the last minute.
      cost: bounds of the candidate's cost, divided by the stable version's; None while unknown.
      shadow: sums of all servers' comparisons.
      history: its latest changes, oldest first.
      zones: zones that have the candidate, if it goes zone by zone; empty for all.
      excluded_tenants: tenants that the candidate gets nothing of, also no copies.
    """

    id: str
    model: str
    stable: str
    candidate: str
    candidate_digest: str
    phase: RolloutPhase
    step: int
    shares: tuple[float, ...]
    began_at: float
    said: str
    golden_every_s: float = 0.0
    shadow_share: float = 0.0
    counts: dict[str, tuple[int, int, int, int]] = {}
    recent: dict[str, tuple[int, int, int, int]] = {}
    cost: tuple[float, float] | None = None
    shadow: ShadowComparison = ShadowComparison()
    history: tuple[RolloutNote, ...] = ()
    zones: tuple[str, ...] = ()
    excluded_tenants: tuple[str, ...] = ()

    @property
    def is_served(self) -> bool:
        """Whether the candidate gets new requests by a temporary route."""
        return self.step > 0 and self.phase in (RolloutPhase.CANARY, RolloutPhase.PAUSED)

    def has_route(self, zone: str) -> bool:
        """Return whether servers of a zone should have that route."""
        return self.is_served and (not self.zones or zone in self.zones)

    @property
    def share(self) -> float:
        """The candidate's share of new requests now, in the latest of its zones."""
        if self.phase is RolloutPhase.PROMOTED:
            return 1.0
        return self.shares[self.step - 1] if self.is_served else 0.0

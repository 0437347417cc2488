"""The fleet as the API sees it: what it shows of itself, and what it may be asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transport.frames import Capacity, Load
    from triolet.audit import FleetAudit
    from triolet.ids import Role
    from triolet.service_class import Claim

    from .generation import CancelReason, Generation, GenerationRequest


class WorkerView(Protocol):
    """One worker as the server sees it."""

    @property
    def role(self) -> Role:
        """Prefill or decode."""
        ...

    @property
    def name(self) -> str:
        """Its name in the fleet."""
        ...

    @property
    def state(self) -> str:
        """A word for people; `alive` if it takes requests."""
        ...

    @property
    def fingerprint(self) -> str:
        """Of its model; empty until it said so."""
        ...

    @property
    def capacity(self) -> Capacity | None:
        """What it has; None until it said so."""
        ...

    @property
    def address(self) -> str:
        """Where it is reached."""
        ...

    @property
    def trouble(self) -> str:
        """Why it does not answer or is not used; empty if nothing is known."""
        ...

    @property
    def load(self) -> Load:
        """What it last said it does."""
        ...

    @property
    def breaker(self) -> str:
        """Closed, open or half_open; unless closed it is left out, or tried."""
        ...


class OverloadView(Protocol):
    """What admission sees."""

    @property
    def brownout(self) -> int:
        """The level, 0 to 4."""
        ...

    @property
    def pressure(self) -> float:
        """Predicted wait of the default class, of what it may wait."""
        ...

    @property
    def guard_tokens(self) -> float | None:
        """Prompt tokens that may be owed a first token; None for no limit."""
        ...

    @property
    def owed_tokens(self) -> int:
        """Prompt tokens that are owed one."""
        ...

    @property
    def expected_returns(self) -> int:
        """Refused requests that were told when to come back, and are expected."""
        ...

    @property
    def tokens_per_s(self) -> float | None:
        """At which the line moves; None if that is not known."""
        ...

    @property
    def error_s(self) -> float:
        """Mean error of predicted first tokens, of late."""
        ...


class FleetView(Protocol):
    """All workers at one moment."""

    @property
    def workers(self) -> Sequence[WorkerView]:
        """Every worker the server knows."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether a prefill and a decode worker live."""
        ...

    @property
    def queued(self) -> int:
        """Requests that wait for a worker."""
        ...

    @property
    def running(self) -> int:
        """Requests that workers are busy with."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and completion together."""
        ...

    @property
    def retries_left(self) -> float:
        """Attempts after faults that the retry budget can pay for."""
        ...

    @property
    def quarantined(self) -> int:
        """Prompts and grammars that are refused for what they did to workers."""
        ...

    @property
    def overload(self) -> OverloadView:
        """What admission sees."""
        ...

    @property
    def queued_by_class(self) -> Mapping[str, int]:
        """Requests that wait for a worker, by service class."""
        ...

    @property
    def queue_lag_tokens(self) -> float:
        """By how many tokens of weight 1 the tenants that wait are apart."""
        ...


class DoorkeeperPort(Protocol):
    """Refuses early, and says how long answers may get."""

    @property
    def level(self) -> int:
        """Of brownout, 0 to 4."""
        ...

    def refuse_early(
        self, claim: Claim, request_id: bytes, key: int, deadline_s: float, now: float
    ) -> None:
        """Raise the RequestError, 503, for what is refused whatever its prompt is."""
        ...

    def max_tokens(self, claim: Claim, prompt_tokens: int) -> int | None:
        """Return how many tokens an answer may have at the moment; None for no cap."""
        ...


class EmbeddingRun(Protocol):
    """All inputs of one client's request."""

    @property
    def has_begun(self) -> bool:
        """Whether a worker was ever asked to compute one of them."""
        ...

    async def vectors(self) -> Sequence[bytes]:
        """Wait for all of them; in the inputs' order.

        Raises:
          RequestError: one of them failed; the others end.
        """
        ...

    def cancel(self, reason: CancelReason) -> None:
        """End what is not done. Idempotent; waits for nothing."""
        ...


class FleetPort(Protocol):
    """The worker side of the server."""

    @property
    def doorkeeper(self) -> DoorkeeperPort:
        """Whom to ask before anything is spent on a request."""
        ...

    def submit_together(self, requests: Sequence[GenerationRequest]) -> Sequence[Generation]:
        """Begin several generations, all of them or none.

        Raises:
          RequestError: one was refused.
        """
        ...

    def submit(self, request: GenerationRequest) -> Generation:
        """Begin a generation; RequestError if it is refused."""
        ...

    def embed(self, requests: Sequence[GenerationRequest]) -> EmbeddingRun:
        """Begin to make vectors, of all inputs or of none; RequestError if refused."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and completion together; `status` says it too, and takes longer."""
        ...

    def status(self) -> FleetView:
        """Look at the fleet."""
        ...

    async def audit(self, connections: int = 0) -> FleetAudit:
        """Ask every worker for its account; bounded in time."""
        ...

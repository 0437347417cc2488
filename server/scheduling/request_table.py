"""All live requests of one server, and the accounts: received == accepted + rejected, and
accepted == ended + in flight.

A request begins and ends nowhere else, so that the accounts are right by construction.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import structlog

from triolet.errors import LocalProtocolError

from ..contract.charges import NO_CHARGES
from ..contract.generation import Failed, Finished, FinishReason
from .outcome import FINISHED, Outcome
from .output import Relay, window_of
from .request import Request, Step, Times

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transport.frames import TokenRow
    from triolet.config import ServerConfig
    from triolet.errors import RequestError
    from triolet.service_class import Scheduling

    from ..contract.charges import Charges
    from ..contract.generation import GenerationRequest
    from .observer import Observer
    from .outcome import Failure
    from .output import RelayEnd, RelayText

log = structlog.get_logger()

MIN_SWEPT: Final = 128
SWEEP_TURNS: Final = 4
"""A thousand requests, each looked at in every sweep, would take a twentieth of a core."""
MAX_SWEPT: Final = 512
"""Half a millisecond, for which everything else waits. Beyond two thousand requests, nearly all of
which can only wait, turns take longer instead: of ten thousand each is looked at once a second."""


@dataclass(slots=True)
class Accounting:
    """Counters since the server's start.

    Attributes:
      received: submitted.
      accepted: of these, will get a terminal event.
      rejected: of these, were refused at once; by error code.
      ended: terminal events given out; by the outcome's column.
    """

    received: int = 0
    accepted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)

    def check(self, in_flight: int) -> None:
        """Raise unless the sums are right.

        Raises:
          LocalProtocolError: a request was lost or answered twice.
        """
        if self.received != self.accepted + self.rejected.total():
            raise LocalProtocolError(f"requests do not add up: {self}")
        if self.accepted != self.ended.total() + in_flight:
            raise LocalProtocolError(f"terminal events do not add up, {in_flight} run: {self}")


@dataclass(slots=True)
class _Choices:
    """The completions of one prompt.

    Attributes:
      num: in all.
      num_live: without a terminal event.
      longest_tokens: of those that have ended.
    """

    num: int = 0
    num_live: int = 0
    longest_tokens: int = 0


class RequestTable:
    """Live requests, and the accounts.

    Attributes:
      accounting: what came and how it ended.
      text: the model's.
    """

    def __init__(
        self,
        config: ServerConfig,
        text: RelayText,
        observer: Observer,
        charges: Charges = NO_CHARGES,
    ) -> None:
        self.accounting = Accounting()
        self._config = config
        self.text = text
        self._observer = observer
        self._charges = charges
        self._requests: dict[bytes, Request] = {}
        self._unswept: list[Request] = []
        self._by_tenant: Counter[str] = Counter()
        self._choices: dict[bytes, _Choices] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Go through the live requests; they may end meanwhile."""
        return iter(list(self._requests.values()))

    def __contains__(self, request_id: bytes) -> bool:
        return request_id in self._requests

    def next_swept(self) -> list[Request]:
        """Return the requests of this sweep: all where there are few, else a part, so that each
        has had its turn after `SWEEP_TURNS`, or as many as `MAX_SWEPT` makes it."""
        if not self._unswept:
            self._unswept = list(self._requests.values())
        count = min(max(MIN_SWEPT, -(-len(self._requests) // SWEEP_TURNS)), MAX_SWEPT)
        swept, self._unswept = self._unswept[:count], self._unswept[count:]
        return [sequence for sequence in swept if sequence.request.request_id in self._requests]

    @property
    def has_unswept(self) -> bool:
        """Whether some have still to have their turn."""
        return bool(self._unswept)

    def of_attempt(self, request_id: bytes, number: int) -> Request | None:
        """Return the request of a present attempt, or None for any other attempt."""
        sequence = self._requests.get(request_id)
        if sequence is None or sequence.attempt is None or sequence.attempt.key.attempt != number:
            return None
        return sequence

    @property
    def num_tenants(self) -> int:
        """Tenants that have live requests."""
        return len(self._by_tenant)

    def tenant_of(self, row: TokenRow) -> str:
        """Return the tenant of a token; empty without a live request."""
        sequence = self._requests.get(row.request_id)
        return "" if sequence is None else sequence.request.scheduling.tenant

    def origin_of(self, row: TokenRow) -> bytes:
        """Return the request_id of the first choice beside a token's request."""
        sequence = self._requests.get(row.request_id)
        return row.request_id if sequence is None else sequence.request.origin_id or row.request_id

    def receive(self) -> None:
        """Count a request that arrived."""
        self.accounting.received += 1

    def reject(self, scheduling: Scheduling, error: RequestError) -> None:
        """Count a request that was refused, and note in the error that it was counted."""
        error.is_of_queue = True
        self.accounting.rejected[error.code] += 1
        self._observer.request_rejected(error.code, scheduling)

    def accept(self, request: GenerationRequest, now: float, *, turn: int = 0) -> Request:
        """Take a request on.

        Args:
          request: what is asked for.
          now: the time.
          turn: of an input, rises with its place in its client's request.
        """
        is_input = request.form is not None
        self.accounting.accepted += 1
        self._observer.request_accepted(None if is_input else request.sampling.max_tokens)
        self._charges.accepted(request.request_id)
        taken = Request(
            request=request,
            order=self.accounting.accepted,
            relay=Relay(request, self.text),
            deadline=now + request.deadline_s,
            times=Times(submitted_at=now),
            allowed=window_of(request, self._config.token_window),
            origin=self._requests.get(request.origin_id),
            turn=turn,
            input_share=self._config.embedding.credit_share if is_input else 0.0,
        )
        self._requests[request.request_id] = taken
        self._by_tenant[request.scheduling.tenant] += 1
        if not is_input:
            first_id = request.origin_id or request.request_id
            choices = self._choices.setdefault(first_id, _Choices())
            choices.num += 1
            choices.num_live += 1
        return taken

    def finish(self, request: Request, end: RelayEnd, now: float) -> None:
        """Give out the good end of a completion."""
        terminal = Finished(
            end.reason,
            request.usage(now),
            end.stop_string,
            request.fingerprint,
            end.is_by_stop_token,
        )
        self._close(request, terminal, FINISHED[end.reason], now)

    def embedded(self, request: Request, vector: bytes, now: float) -> None:
        """Give out the good end of an input."""
        request.vector = vector
        terminal = Finished(FinishReason.STOP, request.usage(now))
        self._close(request, terminal, Outcome.EMBEDDED, now)

    def fail(self, request: Request, failure: Failure, now: float) -> None:
        """Give out the bad end."""
        terminal = Failed(failure.error, request.usage(now))
        self._close(request, terminal, failure.outcome, now)

    def _close(
        self, request: Request, terminal: Finished | Failed, outcome: Outcome, now: float
    ) -> None:
        phase = request.phase
        request.step(Step.END)
        del self._requests[request.request.request_id]
        tenant = request.request.scheduling.tenant
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        if not request.is_input:
            self._note_choice(request)
        self.accounting.ended[outcome.account] += 1
        elapsed_s = now - request.times.submitted_at
        usage = terminal.usage
        if request.request.origin_id:  # another completion: the first counts their prompt
            usage = replace(usage, prompt_tokens=0, cached_tokens=0)
        self._observer.request_ended(outcome.account, usage, elapsed_s, request.request.scheduling)
        cost = self._charges.ended(
            request.request.request_id,
            terminal.usage,
            is_begun=request.is_begun,
        )
        log.info(
            "input_ended" if request.is_input else "request_ended",
            request_id=request.request.request_id.hex(),
            client_request_id=request.request.client_request_id,
            outcome=outcome.account,
            phase=phase.name.lower(),
            prompt_tokens=terminal.usage.prompt_tokens,
            completion_tokens=terminal.usage.completion_tokens,
            queue_s=round(terminal.usage.queue_s, 4),
            ttft_s=None if terminal.usage.ttft_s is None else round(terminal.usage.ttft_s, 4),
            elapsed_s=round(elapsed_s, 4),
            **({} if cost is None else {"cost": cost}),
        )
        request.terminal = terminal
        request.relay.mailbox.close(terminal, now)

    def _note_choice(self, sequence: Request) -> None:
        """Count the completions of a prompt when the last of them has ended."""
        first_id = sequence.request.origin_id or sequence.request.request_id
        choices = self._choices[first_id]
        choices.num_live -= 1
        choices.longest_tokens = max(choices.longest_tokens, len(sequence.relay.token_ids))
        if not choices.num_live:
            del self._choices[first_id]
            self._observer.choices_ended(choices.num, choices.longest_tokens)

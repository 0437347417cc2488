"""The requests that this server has taken on, from acceptance to their one terminal event.

The only place where a request begins and ends, so that the accounts are right by construction.
Knows sequences and counters; refuses to know workers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import structlog

from ..contract.charges import NO_CHARGES
from ..contract.generation import Failed, Finished
from .accounting import Accounting, Outcome
from .output import Relay
from .pick_next import window_of
from .request import Request, Step, Times

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transport.frames import TokenRow
    from triolet.config import ServerConfig
    from triolet.errors import RequestError
    from triolet.ids import AttemptKey
    from triolet.service_class import Scheduling

    from ..contract.charges import Charges
    from ..contract.generation import GenerationRequest
    from .observer import FleetObserver
    from .output import RelayEnd, RelayText

log = structlog.get_logger()

MIN_SWEPT: Final = 128
SWEEP_TURNS: Final = 4
"""A thousand streams, each looked at in every sweep, would take a twentieth of a core."""
MAX_SWEPT: Final = 512
"""Half a millisecond, for which everybody else waits. Beyond two thousand sequences, nearly all of
which can only wait, turns take longer instead: of ten thousand each is looked at once a second."""


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
    """Live sequences, and the accounts.

    Attributes:
      accounting: what came and how it ended.
      text: the model's.
    """

    def __init__(
        self,
        config: ServerConfig,
        text: RelayText,
        observer: FleetObserver,
        charges: Charges = NO_CHARGES,
    ) -> None:
        self.accounting = Accounting()
        self._config = config
        self.text = text
        self._observer = observer
        self._charges = charges
        self._sequences: dict[bytes, Request] = {}
        self._unswept: list[Request] = []
        self._by_tenant: Counter[str] = Counter()
        self._choices: dict[bytes, _Choices] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Request]:
        """Go through the live sequences; they may end meanwhile."""
        return iter(list(self._sequences.values()))

    def __contains__(self, request_id: bytes) -> bool:
        return request_id in self._sequences

    def next_swept(self) -> list[Request]:
        """Return whom to look after in this sweep: everybody where there are few, else a part, so
        that all have had their turn after `SWEEP_TURNS`, or as many as `MAX_SWEPT` makes it."""
        if not self._unswept:
            self._unswept = list(self._sequences.values())
        count = min(max(MIN_SWEPT, -(-len(self._sequences) // SWEEP_TURNS)), MAX_SWEPT)
        swept, self._unswept = self._unswept[:count], self._unswept[count:]
        return [sequence for sequence in swept if sequence.request.request_id in self._sequences]

    @property
    def has_unswept(self) -> bool:
        """Whether some have still to have their turn."""
        return bool(self._unswept)

    def running(self, key: AttemptKey) -> Request | None:
        """Return the sequence whose present attempt this is, or None for any other attempt."""
        return self.of_attempt(*key)

    def of_attempt(self, request_id: bytes, number: int) -> Request | None:
        """Return the same, of the key's parts: for every token."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.attempt is None or sequence.attempt.key.attempt != number:
            return None
        return sequence

    @property
    def num_tenants(self) -> int:
        """Tenants that have live sequences."""
        return len(self._by_tenant)

    def tenant_of(self, row: TokenRow) -> str:
        """Return the tenant of a token; that of no live sequence has none."""
        sequence = self._sequences.get(row.request_id)
        return "" if sequence is None else sequence.request.scheduling.tenant

    def origin_of(self, row: TokenRow) -> bytes:
        """Return the first of the choices that a token's sequence is one of."""
        sequence = self._sequences.get(row.request_id)
        return row.request_id if sequence is None else sequence.request.origin_id or row.request_id

    def receive(self) -> None:
        """Count a request that arrived."""
        self.accounting.received += 1
        self._observer.request_received()

    def reject(self, scheduling: Scheduling, error: RequestError) -> None:
        """Count a request that was refused, and note in the error that it was counted."""
        error.is_of_queue = True
        self.accounting.rejected[error.code] += 1
        self._observer.request_rejected(error.code, scheduling)

    def accept(self, request: GenerationRequest, now: float) -> Request:
        """Take a request on."""
        self.accounting.accepted += 1
        self._observer.request_accepted()
        self._charges.accepted(request.request_id)
        sequence = Request(
            request=request,
            order=self.accounting.accepted,
            relay=Relay(request, self.text),
            deadline=now + request.deadline_s,
            times=Times(submitted_at=now, queued_at=now),
            allowed=window_of(request, self._config.token_window),
            origin=self._sequences.get(request.origin_id),
        )
        self._sequences[request.request_id] = sequence
        self._by_tenant[request.scheduling.tenant] += 1
        choices = self._choices.setdefault(request.origin_id or request.request_id, _Choices())
        choices.num += 1
        choices.num_live += 1
        self._observer.work.asked(request.sampling.max_tokens)
        return sequence

    def finish(self, sequence: Request, end: RelayEnd, now: float) -> None:
        """Give out the good end."""
        terminal = Finished(
            end.reason,
            sequence.usage(now),
            end.stop_string,
            sequence.fingerprint,
            end.is_by_stop_token,
        )
        self._close(sequence, terminal, Outcome(end.reason), now)

    def fail(self, sequence: Request, error: RequestError, outcome: Outcome, now: float) -> None:
        """Give out the bad end."""
        self._close(sequence, Failed(error, sequence.usage(now)), outcome, now)

    def _close(
        self, sequence: Request, terminal: Finished | Failed, outcome: Outcome, now: float
    ) -> None:
        phase = sequence.phase
        sequence.step(Step.END)
        del self._sequences[sequence.request.request_id]
        tenant = sequence.request.scheduling.tenant
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        self._note_choice(sequence)
        self.accounting.ended[outcome] += 1
        elapsed_s = now - sequence.times.submitted_at
        usage = terminal.usage
        if sequence.request.origin_id:  # another completion: the first counts their prompt
            usage = replace(usage, prompt_tokens=0, cached_tokens=0)
        self._observer.request_ended(outcome, usage, elapsed_s, sequence.request.scheduling)
        cost = self._charges.ended(
            sequence.request.request_id,
            terminal.usage,
            is_begun=sequence.is_begun,
        )
        log.info(
            "request_ended",
            request_id=sequence.request.request_id.hex(),
            client_request_id=sequence.request.client_request_id,
            outcome=outcome.value,
            phase=phase.name.lower(),
            prompt_tokens=terminal.usage.prompt_tokens,
            completion_tokens=terminal.usage.completion_tokens,
            queue_s=round(terminal.usage.queue_s, 4),
            ttft_s=None if terminal.usage.ttft_s is None else round(terminal.usage.ttft_s, 4),
            elapsed_s=round(elapsed_s, 4),
            **({} if cost is None else {"cost": cost}),
        )
        sequence.relay.mailbox.close(terminal, now)

    def _note_choice(self, sequence: Request) -> None:
        """Count the completions of a prompt when the last of them has ended."""
        first_id = sequence.request.origin_id or sequence.request.request_id
        choices = self._choices[first_id]
        choices.num_live -= 1
        choices.longest_tokens = max(choices.longest_tokens, len(sequence.relay.token_ids))
        if not choices.num_live:
            del self._choices[first_id]
            self._observer.work.answered(choices.num, choices.longest_tokens)

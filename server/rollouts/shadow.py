"""Shadow copies: sends copies of some requests of the stable version to the candidate, and compares
the answers. Clients, accounts, caches and metrics of requests see nothing of them.

A copy begins after its original has ended and only while no request to the stable version waits. As
soon as one waits, all copies end.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import takewhile
from typing import TYPE_CHECKING, Final, Self

import trio

from transport.rollout_protocol import ShadowComparison
from triolet.errors import RequestError
from triolet.ids import REQUEST_ID_BYTES, new_request_id
from triolet.service_class import Scheduling, ServiceClass

from ..contract.generation import CancelReason, Delta, Failed, Finished
from ..contract.output_stage import OutputStage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from types import TracebackType

    from ..contract.generation import Event, Events, GenerationRequest
    from ..contract.output_stream import OutputStream
    from ..scheduling.links import Links

SALT_BYTES: Final = 16
OF_COPIES: Final = b"shadow copies"
"""Key of the salts of copies: users never find the KV of a copy, and copies find each other's."""


class AnswerRecord(OutputStage):
    """Records the tokens and times of one answer.

    Args:
      on_end: called with the record and the last event.

    Attributes:
      token_ids: the tokens so far.
    """

    def __init__(self, on_end: Callable[[AnswerRecord, Finished | Failed], object]) -> None:
        self.token_ids: list[int] = []
        self._times: list[float] = []
        self._on_end = on_end

    def push(self, event: Event) -> Sequence[Event]:
        """Record an event."""
        if not isinstance(event, Delta):
            self._on_end(self, event)
        elif event.token_ids:
            self.token_ids += event.token_ids
            self._times = [*self._times[:1], trio.current_time()]
        return (event,)

    @property
    def itl_s(self) -> float:
        """Average time between two tokens; 0 for fewer than two."""
        span_s = self._times[-1] - self._times[0] if self._times else 0.0
        return span_s / max(len(self.token_ids) - 1, 1)


def copy_of(spec: GenerationRequest) -> GenerationRequest:
    """Return a copy of a request: the same tokens, sampling, ends and zones, in the lowest
    class."""
    salt = blake2b(spec.cache_salt, key=OF_COPIES, digest_size=SALT_BYTES).digest()
    return replace(
        spec,
        request_id=new_request_id(),
        origin_id=b"",
        client_request_id="",
        cache=None,
        cache_salt=salt,
        key=0,
        priority=0,
        scheduling=Scheduling(
            service_class=ServiceClass.BATCH, placement=spec.scheduling.placement
        ),
        is_silent=True,
    )


class ShadowCopies:
    """The shadow copies of one rollout on this server. As a context it watches the stable version's
    requests; on leaving it, all copies end.

    Args:
      stable: the workers of the stable version.
      candidate: the workers of the candidate.
      max_copies: copies that run at once.

    Attributes:
      share: share of requests to copy.
      excluded_tenants: tenants whose requests are not copied.
      sums: the comparisons so far.
    """

    def __init__(self, stable: Links, candidate: Links, max_copies: int) -> None:
        self.share = 0.0
        self.excluded_tenants: Collection[str] = ()
        self.sums = ShadowComparison()
        self._stable = stable
        self._candidate = candidate
        self._max_copies = max_copies
        self._live: set[OutputStream] = set()

    def __enter__(self) -> Self:
        self._stable.witness = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._stable.witness is self:
            self._stable.witness = None
        self._end_copies()

    def submitted(self, stream: OutputStream) -> None:
        """Record the answers of a new stream that are to be copied."""
        for index, generation in enumerate(stream.generations):
            spec = generation.request
            # The candidate need not have the adapter.
            if spec.adapter or spec.scheduling.tenant in self.excluded_tenants:
                continue
            # Ids of requests are random bits.
            if int.from_bytes(spec.request_id) < self.share * (1 << 8 * REQUEST_ID_BYTES):
                stream.add_stage(index, AnswerRecord(partial(self._original_ended, spec)))

    def turn_over(self) -> None:
        """End all copies if a request to the stable version waits."""
        if self._live and self._stable.in_flight(is_waiting=True):
            self._end_copies()

    def _end_copies(self) -> None:
        copies, self._live = self._live, set()
        self.sums += ShadowComparison(skipped=len(copies))
        for stream in copies:
            stream.listen(None)
            stream.cancel(CancelReason.STOPPED)

    def _original_ended(
        self, spec: GenerationRequest, record: AnswerRecord, end: Finished | Failed
    ) -> None:
        if isinstance(end, Finished):
            # The client gets the end of its answer first.
            token = trio.lowlevel.current_trio_token()
            token.run_sync_soon(self._begin, spec, record, end)

    def _begin(self, spec: GenerationRequest, original: AnswerRecord, end: Finished) -> None:
        if self._stable.witness is not self:
            return
        if self._stable.in_flight(is_waiting=True) or len(self._live) >= self._max_copies:
            self.sums += ShadowComparison(skipped=1)
            return
        try:
            stream = self._candidate.submit(copy_of(spec))
        except RequestError:
            self.sums += ShadowComparison(failed=1)
            return
        self._live.add(stream)
        record = AnswerRecord(partial(self._copy_ended, stream, original, end))
        stream.listen(partial(self._take, record))

    def _take(self, record: AnswerRecord, events: Events) -> None:
        if self._stable.in_flight(is_waiting=True):
            self.sums += ShadowComparison(rows_while_waiting=1)
        for _, event in events:
            record.push(event)

    def _copy_ended(
        self,
        stream: OutputStream,
        original: AnswerRecord,
        end: Finished,
        record: AnswerRecord,
        own_end: Finished | Failed,
    ) -> None:
        self._live.remove(stream)
        if isinstance(own_end, Failed):
            self.sums += ShadowComparison(failed=1)
            return
        both = zip(original.token_ids, record.token_ids, strict=False)
        self.sums += ShadowComparison(
            pairs=1,
            same_finish=end.reason is own_end.reason,
            equal_tokens=sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both)),
            tokens=(len(original.token_ids), len(record.token_ids)),
            ttft_s=(ttft_of(end), ttft_of(own_end)),
            itl_s=(original.itl_s, record.itl_s),
        )


def ttft_of(end: Finished) -> float:
    """Return an answer's time to the first token without the wait in the queue; 0 without one."""
    return 0.0 if end.usage.ttft_s is None else end.usage.ttft_s - end.usage.queue_s

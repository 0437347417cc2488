"""A simulated client: it sends a request, reads or cancels it, and checks the answer.

Uses server/contract/generation.py and the reference of simulation/engine.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio

from server.contract.generation import (
    CancelReason,
    Delta,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    input_request,
)
from server.scheduling.delivery import RequestOutput
from triolet.config import SloConfig
from triolet.errors import RequestError
from triolet.pooling import VectorForm
from triolet.service_class import DEFAULT_SCHEDULING, Scheduling
from triolet.units import SECONDS

from .engine import EOS_ID, reference, reference_vector
from .text import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from server.contract.generation import Event
    from server.contract.output_stream import OutputStream
    from server.scheduling.delivery import EmbeddingRun
    from server.scheduling.links import Links
    from triolet.sampling import SamplingParams


SLO: Final = SloConfig()
"""Same value as in servers."""
DEADLINE_S: Final = 120 * SECONDS
"""Longer than every run: a request that reaches its deadline was stuck."""
RETRY_S: Final = 1 * SECONDS
"""A refused client retries after this time."""


@dataclass(frozen=True, slots=True)
class Wish:
    """The plan of one client.

    Attributes:
      number: number of the client.
      prompt_ids: its prompt, unique except for its origin's.
      sampling: number of tokens and seed.
      scheduling: tenant and class.
      origin: number of the wish with the same prompt, or None.
      stop: stop strings.
      priority: priority; lower is more important.
      comes_after_s: time of its request.
      leaves_after_s: time from submission to its cancel or deadline; None for neither.
      has_deadline: whether `leaves_after_s` is the request's deadline, not a cancel.
      stalls_at: number of tokens after which it stops reading; None for never.
      stalls_s: duration of the stall.
    """

    number: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    priority: int = 0
    comes_after_s: float = 0.0
    leaves_after_s: float | None = None
    has_deadline: bool = False
    stalls_at: int | None = None
    stalls_s: float = 0.0
    origin: int | None = None
    scheduling: Scheduling = DEFAULT_SCHEDULING

    @property
    def chosen_by(self) -> tuple[tuple[int, ...], int]:
        """All values that determine its tokens."""
        return self.prompt_ids, self.sampling.seed


class Client:
    """A client with one request.

    Args:
      wish: its plan.
      draw_request_id: returns request ids.
      report: called with a description of each violation.
      others: all clients.

    Attributes:
      ending: how it ended; None while it runs.
      request_id: id of its accepted request; empty before.
      left_at: time of its cancel or deadline, if the request was running then.
      left_in: the request's phase at that time.
      token_ids: tokens read.
      has_stalled: whether it stopped reading for a while.
      is_over: event that is set at its end.
      longest_wait_s: longest wait for a token or the end, once accepted.
    """

    def __init__(
        self,
        wish: Wish,
        draw_request_id: Callable[[], bytes],
        report: Callable[[str], None],
        others: Sequence[Client] = (),
    ) -> None:
        self.wish = wish
        self.ending: str | None = None
        self.request_id: bytes = b""
        self.left_at: float | None = None
        self.left_in = ""
        self.token_ids: list[int] = []
        self.has_stalled = False
        self.is_over = trio.Event()
        self.longest_wait_s = 0.0
        self._draw_request_id = draw_request_id
        self._report = report
        self._others = others
        self._text: list[str] = []
        self._expected = expected_ids(wish)
        self._asked_at = 0.0

    def __str__(self) -> str:
        return f"client {self.wish.number} ({self.request_id.hex()[:8]})"

    async def run(self, fleet: Links) -> None:
        """Retry until accepted, then read to the end. Ends with the server's process."""
        try:
            stream = await self._submit(fleet)
            if stream is None:
                return
            async with trio.open_nursery() as nursery:
                if self.wish.leaves_after_s is not None:
                    nursery.start_soon(self._leave, stream, self.wish.leaves_after_s)
                await self._read(stream)
                nursery.cancel_scope.cancel()
        finally:
            if self.ending is None:
                self.ending = "reset"
            self.is_over.set()

    async def _submit(self, fleet: Links) -> OutputStream | None:
        """Return the accepted request; None if its prompt is in quarantine."""
        while True:
            request_id = self._draw_request_id()
            request = GenerationRequest(
                request_id=request_id,
                prompt_ids=self.wish.prompt_ids,
                sampling=self.wish.sampling,
                deadline_s=self._deadline_s,
                stop=self.wish.stop,
                priority=self.wish.priority,
                origin_id=self._origin_id,
                scheduling=self.wish.scheduling,
            )
            try:
                stream = fleet.submit(request)
            except RequestError as error:
                if error.code == "quarantined" and self._was_asked_before:
                    self.ending = error.code
                    return None
                if error.status < 503:
                    self._report(f"{self} was refused: {error.code} {error.message}")
                await trio.sleep(RETRY_S)
            else:
                self.request_id, self._asked_at = request_id, trio.current_time()
                return stream

    @property
    def _deadline_s(self) -> float:
        own_s = self.wish.leaves_after_s if self.wish.has_deadline else None
        return DEADLINE_S if own_s is None else own_s

    @property
    def _origin_id(self) -> bytes:
        """Return the id of the request with the same prompt; empty if there is none."""
        of_origin = (c.request_id for c in self._others if c.wish.number == self.wish.origin)
        return next(of_origin, b"")

    @property
    def _was_asked_before(self) -> bool:
        """Return whether another client has already brought this prompt to workers."""
        return any(
            other.request_id and other.wish.prompt_ids == self.wish.prompt_ids
            for other in self._others
            if other is not self
        )

    async def _leave(self, stream: OutputStream, after_s: float) -> None:
        await trio.sleep(after_s)
        if self.ending is None:
            self.left_at = trio.current_time()
            (output,) = stream.generations
            assert isinstance(output, RequestOutput)
            self.left_in = output.running.phase.name.lower()
            if not self.wish.has_deadline:
                stream.cancel(CancelReason.CLIENT_GONE)

    async def _read(self, stream: OutputStream) -> None:
        stalls_at = self.wish.stalls_at
        waits_since = trio.current_time()
        async for events in stream:
            self.longest_wait_s = max(self.longest_wait_s, trio.current_time() - waits_since)
            for _, event in events:
                self._take(event)
            if stalls_at is not None and len(self.token_ids) >= stalls_at:
                stalls_at = None
                self.has_stalled = True
                await trio.sleep(self.wish.stalls_s)
            waits_since = trio.current_time()

    def _take(self, event: Event) -> None:
        if self.ending is not None:
            self._report(f"{self}: {event} after its end ({self.ending})")
        match event:
            case Delta():
                self.token_ids += event.token_ids
                self._text.append(event.text)
                if tuple(self.token_ids) != self._expected[: len(self.token_ids)]:
                    self._report(
                        f"{self} got {self.token_ids} where {list(self._expected)} is right"
                    )
            case Finished():
                self.ending = event.reason.value
                self._check_whole(event)
            case Failed(error=error):
                self.ending = error.code
                self._check_failure(error)

    def _check_whole(self, end: Finished) -> None:
        if tuple(self.token_ids) != self._expected:
            self._report(
                f"{self} ended with {self.token_ids} where {list(self._expected)} is right"
            )
        text, reason = expected_text(self.wish, self._expected)
        if "".join(self._text) != text or end.reason is not reason:
            self._report(
                f"{self} read {''.join(self._text)!r} ({end.reason}), not {text!r} ({reason})"
            )
        if end.usage.completion_tokens != len(self._expected):
            self._report(f"{self} is charged for {end.usage.completion_tokens} tokens")

    def _is_late(self) -> bool:
        """Return whether its first token may miss the SLO of its class, which depends on the speed
        of the workers."""
        slo_s = SLO.of(self.wish.scheduling.service_class)
        waited_s = trio.current_time() - self._asked_at
        return slo_s is not None and not self.token_ids and waited_s >= slo_s / 2

    def _check_failure(self, error: RequestError) -> None:
        is_fair = {
            "cancelled": self.left_at is not None,
            "deadline_exceeded": self.wish.has_deadline,  # earlier if it cannot be met
            "request_timeout": self.wish.stalls_at is not None,
            "no_worker": True,
            "quarantined": True,
            "overloaded": self._is_late(),
        }
        if not is_fair.get(error.code, False):
            self._report(f"{self} failed without a reason: {error.code} {error.message}")


def expected_ids(wish: Wish) -> tuple[int, ...]:
    """Return the tokens that a client must receive if it stays to the end."""
    token_ids = reference(wish.prompt_ids, wish.sampling)
    for length in range(1, len(token_ids) + 1):
        text = _shown(wish, token_ids[:length])
        if any(stop in text for stop in wish.stop):
            return token_ids[:length]
    return token_ids


def expected_text(wish: Wish, token_ids: tuple[int, ...]) -> tuple[str, FinishReason]:
    """Return the text of a whole completion and its finish reason."""
    text = _shown(wish, token_ids)
    found = [at for stop in wish.stop if (at := text.find(stop)) >= 0]
    if found:
        return text[: min(found)], FinishReason.STOP
    is_stop = token_ids[-1] == EOS_ID and not wish.sampling.ignore_eos
    return text, FinishReason.STOP if is_stop else FinishReason.LENGTH


def _shown(wish: Wish, token_ids: Sequence[int]) -> str:
    """Return the text of tokens; the end token has none."""
    return "".join(
        text_of(token_id)
        for token_id in token_ids
        if token_id != EOS_ID or wish.sampling.ignore_eos
    )


EMBEDDED = "embedded"


class InputClient(Client):
    """A client that requests vectors of its prompt, forwards and backwards."""

    async def run(self, fleet: Links) -> None:
        """Retry until accepted, then wait. Ends with the server's process."""
        try:
            run = await self._ask(fleet)
            async with trio.open_nursery() as nursery:
                if self.wish.leaves_after_s is not None:
                    nursery.start_soon(self._go, run, self.wish.leaves_after_s)
                await self._wait(run)
                nursery.cancel_scope.cancel()
        finally:
            if self.ending is None:
                self.ending = "reset"
            self.is_over.set()

    @property
    def _inputs(self) -> tuple[tuple[int, ...], ...]:
        return (self.wish.prompt_ids, self.wish.prompt_ids[::-1])

    async def _ask(self, fleet: Links) -> EmbeddingRun:
        while True:
            ids = [self._draw_request_id() for _ in self._inputs]
            requests = [
                input_request(
                    request_id, input_ids, VectorForm(), DEADLINE_S, scheduling=self.wish.scheduling
                )
                for request_id, input_ids in zip(ids, self._inputs, strict=True)
            ]
            try:
                run = fleet.embed(requests)
            except RequestError as error:
                if error.status < 503:
                    self._report(f"{self} was refused: {error.code} {error.message}")
                await trio.sleep(RETRY_S)
            else:
                self.request_id = ids[0]
                return run

    async def _go(self, run: EmbeddingRun, after_s: float) -> None:
        await trio.sleep(after_s)
        if self.ending is None:
            self.left_at = trio.current_time()
            run.cancel(CancelReason.CLIENT_GONE)

    async def _wait(self, run: EmbeddingRun) -> None:
        try:
            vectors = await run.vectors()
        except RequestError as error:
            self.ending = error.code
            self._check_failure(error)
            return
        finally:
            run.cancel(CancelReason.CLIENT_GONE)
        self.ending = EMBEDDED
        if list(vectors) != [reference_vector(input_ids) for input_ids in self._inputs]:
            self._report(f"{self} got other vectors than its inputs have")

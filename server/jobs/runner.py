"""Runs batches: sends each line as an ASGI request to this process's own application.

A line takes the same path as a client's request, with the same checks, limits and results, in a
lower service class.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import structlog
import trio

from triolet.errors import RequestError
from triolet.units import MILLISECONDS

from ..api.body import VERSION_HEADER
from ..api.request_scope import SCOPE_KEY, ClientConnection, RequestScope
from .batches import line_id
from .records import answer_line, error_line
from .storage import time_of_day

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from triolet.config import BatchConfig

    from .records import WaitingLine
    from .storage import Storage


class InnerAnswer(NamedTuple):
    """The response to an inner request.

    Attributes:
      status: HTTP status.
      request_id: the request's id.
      body: the response body.
      retry_after_s: from `Retry-After-Ms`; None without this header.
      is_crowded_out: whether it was refused because other requests wait or run.
      version: digest of the model that answered; empty for a model that is not in a store.
    """

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None = None
    is_crowded_out: bool = False
    version: str = ""


def receiving(body: bytes) -> Callable[[], Awaitable[dict[str, Any]]]:
    """Return an ASGI `receive` that delivers the body in one part and never disconnects."""
    events = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if events:
            return events.pop()
        await trio.sleep_forever()
        raise AssertionError("sleep_forever returned")

    return receive


class InnerRequest:
    """A POST with a JSON body to the application in this process. It can be sent once.

    Args:
      host: host name that the application accepts.
      path: path of the endpoint.
      body: JSON.
      request_id: id for the log and the response. Its tenant is charged once, however many servers
        send a request with this id.
      owner: the request's tenant; empty without tenants.
      within_s: its deadline.
    """

    def __init__(
        self, host: str, path: str, body: bytes, request_id: str, owner: str, within_s: float
    ) -> None:
        self._request_id = request_id
        self._body = body
        headers = {
            "host": host,
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": request_id,
        }
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._request = RequestScope(
            ClientConnection(), encoded, owner=owner, within_s=within_s, once_id=request_id
        )
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": encoded,
            "client": None,
            "server": None,
            "extensions": {},
            "state": {SCOPE_KEY: self._request},
        }

    @property
    def has_begun(self) -> bool:
        """Whether workers may have started to compute it."""
        return self._request.has_begun

    async def ask(self, app: Callable[..., Awaitable[None]]) -> InnerAnswer:
        """Send the request to an ASGI application in this process."""
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            await trio.lowlevel.checkpoint()
            sent.append(message)

        await app(self._scope, receiving(self._body), send)
        start = next(message for message in sent if message["type"] == "http.response.start")
        bodies = [message for message in sent if message["type"] == "http.response.body"]
        content = b"".join(cast("bytes", message.get("body", b"")) for message in bodies)
        headers = dict(start["headers"])
        retry_after_ms = headers.get(b"retry-after-ms")
        return InnerAnswer(
            start["status"],
            self._request_id,
            content,
            None if retry_after_ms is None else int(retry_after_ms) * MILLISECONDS,
            self._request.is_crowded_out,
            headers.get(VERSION_HEADER.encode(), b"").decode(),
        )


log = structlog.get_logger(__name__)

LATER: Final = frozenset({408, 499, 503, 504})
"""Statuses after which the same request may succeed when retried."""
LEAST_WITHIN_S: Final = 1.0
"""Shortest deadline of a line; the end of the batch's window ends it anyway."""
MOST_WAIT_S: Final = 120.0
"""Longest rest of a refused line, whatever `Retry-After` says. A line retried too early receives
the remaining wait, and other requests may have ended by then."""
LIMITED_RETRY_S: Final = 60.0
"""Time that a tenant's lines wait after a limit without a known end, such as its budget."""
LIMIT_MET: Final = 429
"""Status of a valid request that a tenant's limit refused."""
HOLD_POLL_S: Final = 0.02
"""How often to check for waiting interactive requests. A check costs 2% of a heartbeat."""
LEAST_LEASE_PART: Final = 3
"""The lease is renewed after 1/n of its length."""


class BatchRunner:
    """Runs this server's batches.

    Args:
      storage: files and batches.
      config: limits.
      app: the ASGI application.
      host: host name that the application accepts.
      hold_s: returns how long [s] a line is held back for interactive requests.
      on_line: called with the outcome of each line.
      wait_charged: waits until the charges of ended requests are saved outside this process.
    """

    def __init__(
        self,
        storage: Storage,
        config: BatchConfig,
        app: Callable[..., Awaitable[None]],
        host: str,
        hold_s: Callable[[], float],
        on_line: Callable[[str], None],
        wait_charged: Callable[[], Awaitable[None]],
    ) -> None:
        self._storage = storage
        self._config = config
        self._app = app
        self._host = host
        self._hold_s = hold_s
        self._on_line = on_line
        self._wait_charged = wait_charged
        self._running: dict[tuple[str, int], trio.CancelScope] = {}
        self._num_running: Counter[str] = Counter()  # by owner
        self._lease_until = 0.0
        self._resting: dict[str, float] = {}  # owners, until when
        self._resting_lines: dict[tuple[str, int], float] = {}
        self._num_held = 0  # answers that wait to be stored

    async def run(self) -> None:
        """Run batches until cancelled. The next lease holder runs the lines without results."""
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    self._storage.changed = trio.Event()
                    try:
                        await self._look(nursery)
                    except RequestError as error:
                        # Another process takes the lease when ours expires.
                        self._pause(error.message)
                        await trio.sleep(self._config.poll_s)
                    with trio.move_on_after(self._config.poll_s):
                        await self._storage.changed.wait()
        finally:
            with trio.move_on_after(self._config.poll_s, shield=True), suppress(RequestError):
                await self._storage.run(self._storage.batches.give_lease_back)

    async def _look(self, nursery: trio.Nursery) -> None:
        """Start and expire batches that are due, cancel unwanted lines, and start new lines.

        Raises:
          RequestError: the database fails.
        """
        if not await self._holds_lease():
            for scope in self._running.values():
                scope.cancel()  # another process runs these lines
            self._go_on()
            return
        if self._num_held:
            return  # their results first: else their batch could end without them
        await self._storage.run(self._storage.batches.advance, int(time_of_day()))
        await self._drop_unwanted()
        free, least = await self._storage.free_bytes(), self._config.min_free_bytes
        if free < least:
            self._pause("the disk has too little free space", free_bytes=free, min_free_bytes=least)
            return
        if not self._num_held:  # every answer was stored
            self._go_on()
            await self._begin(nursery)

    def _go_on(self) -> None:
        """Resume starting lines; log this once."""
        if self._storage.paused is not None:
            log.info("batches_resumed", was=self._storage.paused)
            self._storage.paused = None

    def _pause(self, reason: str, **figures: int) -> None:
        """Stop starting lines; log this once. Tenants see the reason, the log also the figures."""
        if self._storage.paused is None:
            log.error("batches_paused", reason=reason, **figures)
        self._storage.paused = reason

    async def _holds_lease(self) -> bool:
        now = time_of_day()
        if self._lease_until - now > (1 - 1 / LEAST_LEASE_PART) * self._config.lease_s:
            return True
        is_held = await self._storage.run(self._storage.batches.take_lease, now)
        self._lease_until = now + self._config.lease_s if is_held else 0.0
        return is_held

    async def _begin(self, nursery: trio.Nursery) -> None:
        room = self._config.concurrency - len(self._running)
        if room <= 0:
            return
        # At most `concurrency` lines run, so twice as many lines per owner include idle ones. If
        # all of an owner's lines are refused, that many rest and no more are tried.
        now = trio.current_time()
        self._resting = {owner: until for owner, until in self._resting.items() if until > now}
        lines = await self._storage.run(
            self._storage.batches.waiting, 2 * self._config.concurrency, tuple(self._resting)
        )
        self._resting_lines = {n: until for n, until in self._resting_lines.items() if until > now}
        if self._num_held:
            return
        busy = self._running.keys() | self._resting_lines
        idle = [line for line in lines if (line.batch_id, line.number) not in busy]
        while idle and room > 0:
            # Take the owner with the fewest running lines, and its most urgent line.
            line = min(idle, key=lambda one: self._num_running[one.owner])
            idle.remove(line)
            room -= 1
            scope = self._running[line.batch_id, line.number] = trio.CancelScope()
            self._num_running[line.owner] += 1
            nursery.start_soon(self._run_line, line, scope)

    async def _run_line(self, line: WaitingLine, scope: trio.CancelScope) -> None:
        try:
            with scope:
                answer = await self._answer(line)
                if answer.status == LIMIT_MET or answer.is_crowded_out:
                    self._rest(line, answer)
                    return
                # Wait for the charge first: a stored line is never computed, and charged, again.
                await self._wait_charged()
                await self._keep(line, answer)
        finally:
            del self._running[line.batch_id, line.number]
            self._num_running -= Counter((line.owner,))  # drops owners at zero
            self._storage.changed.set()

    def _rest(self, line: WaitingLine, answer: InnerAnswer) -> None:
        """Set a refused line aside until its retry time; others run in its place. This does not
        count as an attempt. If a tenant's limit refused it, all of the tenant's lines rest."""
        now = trio.current_time()
        if answer.is_crowded_out:
            wait_s = min(answer.retry_after_s or self._config.retry_s, MOST_WAIT_S)
            self._resting_lines[line.batch_id, line.number] = now + wait_s
            self._on_line("refused")
        else:
            self._resting[line.owner] = now + (answer.retry_after_s or LIMITED_RETRY_S)
            self._on_line("limited")

    async def _answer(self, line: WaitingLine) -> InnerAnswer:
        """Send a line's request until its status is not in LATER, up to `max_line_attempts`
        times."""
        attempt = 0
        while True:
            since = trio.current_time()
            # The fleet has no event for this.
            while trio.current_time() - since < self._hold_s():  # noqa: ASYNC110
                await trio.sleep(HOLD_POLL_S)
            answer = await self._ask(line)
            if answer is None:
                self._on_line("taken_back")
                continue
            attempt += 1
            is_later = answer.status in LATER and not answer.is_crowded_out
            if not is_later or attempt >= self._config.max_line_attempts:
                return answer
            await trio.sleep(self._config.retry_s * 2 ** (attempt - 1))

    async def _ask(self, line: WaitingLine) -> InnerAnswer | None:
        """Send a line's request once. Return None if it was cancelled because its class is
        paused."""
        within_s = max(line.expires_at - time_of_day(), LEAST_WITHIN_S)
        own_id = line_id(line.batch_id, line.number)
        request = InnerRequest(self._host, line.endpoint, line.body, own_id, line.owner, within_s)
        answer: InnerAnswer | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._take_back, request, nursery.cancel_scope)
            answer = await request.ask(self._app)
            nursery.cancel_scope.cancel()
        return answer

    async def _take_back(self, request: InnerRequest, scope: trio.CancelScope) -> None:
        """Cancel a request that has not started `paused_s` after its class was paused. While it
        waits it holds a reservation of its tenant's limits, and the pause may last for hours."""
        paused_at = math.inf
        while not request.has_begun:
            now = trio.current_time()
            paused_at = min(paused_at, now) if math.isinf(self._hold_s()) else math.inf
            if now - paused_at >= self._config.paused_s:
                scope.cancel()
                return
            await trio.sleep(self._config.poll_s)

    async def _keep(self, line: WaitingLine, answer: InnerAnswer) -> None:
        """Store an answer. While the database fails, keep it in memory until the batch's window
        ends: it was computed and charged, so it must not be computed again."""
        if await self._is_written(line, answer):
            return
        self._on_line("held")
        self._num_held += 1
        wait_s = self._config.retry_s
        try:
            while time_of_day() < line.expires_at:
                await trio.sleep(wait_s)
                if await self._is_written(line, answer):
                    return
                wait_s = min(2 * wait_s, self._config.max_held_retry_s)
        finally:
            self._num_held -= 1
        self._on_line("dropped")

    async def _is_written(self, line: WaitingLine, answer: InnerAnswer) -> bool:
        """Return whether the database has stored an answer or no longer needs it."""
        try:
            await self._finish(line, answer)
        except RequestError as error:
            self._pause(error.message)
            return False
        return True

    async def _finish(self, line: WaitingLine, answer: InnerAnswer) -> None:
        own_id = line_id(line.batch_id, line.number)
        status, request_id, body = answer.status, answer.request_id, answer.body
        try:
            result = answer_line(own_id, line.custom_id, status, request_id, body, answer.version)
        except ValueError:
            code, message = "server_error", "the answer could not be stored"
            result = error_line(own_id, line.custom_id, code, message)
        is_good = status < 400
        is_done = await self._storage.run(
            self._storage.batches.finish_line, line, result, int(time_of_day()), is_good=is_good
        )
        self._on_line("dropped" if not is_done else "completed" if is_good else "failed")

    async def _drop_unwanted(self) -> None:
        """Cancel lines of batches that were cancelled or have expired."""
        for batch_id in {batch_id for batch_id, _ in self._running}:
            if not await self._storage.run(self._storage.batches.is_wanted, batch_id):
                for (of_batch, _), scope in self._running.items():
                    if of_batch == batch_id:
                        scope.cancel()

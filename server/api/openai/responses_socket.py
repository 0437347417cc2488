"""WebSocket /v1/responses: several answers on one connection.

Messages of one lane (`stream_id`) are answered in order, lanes concurrently. Three kinds of task
cannot block one another: one only receives, so that a client that floods or leaves is noticed at
once; one only sends; and one per lane reads its generation. While a lane waits for space in the
outbox, it gives no credit for more tokens.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio
from quart import websocket

from triolet.config import OF_CONNECTION
from triolet.errors import RequestError, draining, invalid_request
from triolet.units import KIB

from ...cache.store import ResponseStore
from ...tenants.tenancy import current_tenant
from ...text.process import at_once
from ...text.turns import current_line
from ..access import SUBPROTOCOL, check_key
from ..body import begun_conversation, client_request_id, is_quick
from ..door import BodyHold, TokenBucket
from ..errors import echo, http_error, unsupported
from ..json_body import parse_object
from ..limits import rate_headers
from ..request_scope import scope_of
from ..schemas import read_request
from .responses_answer import ResponseAnswer, ResumedAnswer, WsOutbox
from .responses_events import error_frame, notice_frame
from .responses_schema import LANE, ResponseCancel, ResponseCreate, ResponseResume

if TYPE_CHECKING:
    from quart.wrappers import Websocket

    from ...rollouts.conversations import Conversation
    from ..services import Services

    LaneAnswer = ResponseAnswer | ResumedAnswer

CREATE: Final = "response.create"
RESUME: Final = "response.resume"
CANCEL: Final = "response.cancel"
CONTROLS: Final = frozenset({RESUME, CANCEL})
"""Messages that start nothing new, so a tenant without quota may send them."""
ASK_FIRST_BYTES: Final = 4 * KIB
"""If a tenant has no quota left, longer messages are refused before they are parsed. Shorter ones
are refused in their turn, when it may have quota again."""
GOING_AWAY: Final = 1001
POLICY_VIOLATION: Final = 1008


async def responses_socket(services: Services) -> None:
    """Serve one WebSocket until it closes."""
    socket: Websocket = websocket._get_current_object()  # type: ignore[attr-defined]
    has_spoken = SUBPROTOCOL in socket.requested_subprotocols
    await socket.accept(
        headers=rate_headers(services.quotas), subprotocol=SUBPROTOCOL if has_spoken else None
    )
    code = await ResponsesSession(socket, services).run()
    await socket.close(code, "")


class ResponsesSession:
    """One connection.

    Args:
      socket: the accepted WebSocket.
      services: the server's parts.
    """

    def __init__(self, socket: Websocket, services: Services) -> None:
        self._socket = socket
        self._subprotocols = socket.requested_subprotocols
        self._services = services
        self._connection = scope_of(socket.scope).connection
        self._responses = ResponseStore(OF_CONNECTION)
        self._messages = TokenBucket(services.config.ws_max_messages_per_s, trio.current_time())
        self._lanes: dict[str | None, deque[LaneAnswer]] = {}
        self._lane_ended = trio.Event()
        self._conversation: Conversation | None = None
        self._slots = trio.Semaphore(services.config.ws_max_streams)
        self._outbox = WsOutbox(services.config.ws_outbox_bytes, self._connection)
        self._close_code = POLICY_VIOLATION

    async def run(self) -> int:
        """Serve until the client violates the protocol or this process shuts down.

        Returns:
          The close code of the socket. A client that leaves cancels this call.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, nursery.cancel_scope)
                nursery.start_soon(self._close_when_drained)
                await self._receive(nursery)
                nursery.cancel_scope.cancel()
        finally:
            for answers in self._lanes.values():
                for answer in answers:
                    if isinstance(answer, ResponseAnswer):
                        answer.hold.give_back()
        return self._close_code

    async def _receive(self, nursery: trio.Nursery) -> None:
        while True:
            message = await self._socket.receive()
            if not self._messages.take(trio.current_time()):
                return
            if not await self._take(message, nursery):
                # The client does not read error messages, or this process is shutting down.
                return

    async def _take(self, message: str | bytes | None, nursery: trio.Nursery) -> bool:
        """Handle a message; return whether to read further messages."""
        services, peeked = self._services, _Peeked()
        hold = services.bodies.hold(current_line())
        has_cost = is_kept = False
        try:
            text = _text_of(message)
            peeked = _peek(text)
            check_key(services, self._connection, self._socket.headers, self._subprotocols)
            if len(text) > ASK_FIRST_BYTES and peeked.type not in CONTROLS:
                services.quotas.check(current_tenant())
            if not hold.grow_to(len(text)):
                assert hold.refusal is not None, "says why"
                raise hold.refusal
            has_cost = True
            body = await _parse(text, services)
            peeked.stream_id = _lane(body)
            is_kept = self._handle(body, hold, nursery)
        except RequestError as error:
            if has_cost and error.status < 500:
                services.quotas.count_request(current_tenant())
            self._note_refusal(error)
            return self._outbox.put_nowait(error_frame(error, peeked.stream_id))
        finally:
            if not is_kept:
                hold.give_back()
        return True

    def _handle(self, body: dict[str, Any], hold: BodyHold, nursery: trio.Nursery) -> bool:
        """Handle a parsed message; return whether it waits for its answer and keeps its room."""
        kind = body.pop("type", None)
        if kind == CREATE:
            self._services.metrics.http.request("WS response.create")
            if self._services.models.routes:
                self._conversation = begun_conversation(
                    body, self._socket.headers, self._connection, self._conversation
                )
            self._create(read_request(ResponseCreate, body), hold, nursery)
            return True
        if kind == RESUME:
            self._resume(read_request(ResponseResume, body), nursery)
        elif kind == CANCEL:
            self._cancel(read_request(ResponseCancel, body))
        elif kind == "response.steer":
            raise unsupported("type", "steering an answer")
        else:
            raise http_error(400, f"{echo(kind)} is not a message type of this endpoint", "type")
        return False

    def _create(self, create: ResponseCreate, hold: BodyHold, nursery: trio.Nursery) -> None:
        if self._services.state.is_draining:
            raise draining()
        self._check_bound()
        answer = ResponseAnswer(
            create,
            self._services,
            self._responses,
            client_request_id(self._socket.headers),
            self._connection,
            hold,
            self._conversation,
        )
        self._enqueue(answer, nursery)

    def _resume(self, resume: ResponseResume, nursery: trio.Nursery) -> None:
        self._check_bound()
        answer = ResumedAnswer(resume, self._services, self._responses, self._connection)
        self._enqueue(answer, nursery)

    def _check_bound(self) -> None:
        if sum(len(answers) for answers in self._lanes.values()) >= self._bound:
            raise RequestError(
                f"at most {self._bound} answers may run or wait on one connection",
                status=429,
                code="websocket_stream_limit_reached",
            )

    def _enqueue(self, answer: LaneAnswer, nursery: trio.Nursery) -> None:
        answers = self._lanes.get(answer.stream_id)
        if answers is not None:
            answers.append(answer)
            return
        self._lanes[answer.stream_id] = deque([answer])
        nursery.start_soon(self._run_lane, answer.stream_id)

    @property
    def _bound(self) -> int:
        config = self._services.config
        return config.ws_max_streams + config.ws_max_queued

    def _cancel(self, cancel: ResponseCancel) -> None:
        """Cancel answers. One that has already ended is not an error: the messages crossed."""
        if cancel.response_id is None:
            chosen = list(self._lanes.get(cancel.stream_id, ()))
        else:
            chosen = [
                answer
                for answers in self._lanes.values()
                for answer in answers
                if answer.id == cancel.response_id
            ]
        for answer in chosen:
            answer.cancel()

    def _note_refusal(self, error: RequestError) -> None:
        self._services.metrics.http.error(error.status, is_of_queue=error.is_of_queue)
        self._services.refusal_log.tell(
            error,
            trio.current_time(),
            method="WS",
            path=self._socket.path,
            client=self._socket.remote_addr,
            tenant=current_tenant().name,
        )

    async def _run_lane(self, stream_id: str | None) -> None:
        answers = self._lanes[stream_id]
        while answers:
            async with self._slots:
                try:
                    await answers[0].run(self._outbox)
                except RequestError as error:
                    self._note_refusal(error)
                    await self._outbox.put(error_frame(error, stream_id))
            answers.popleft()
        del self._lanes[stream_id]
        self._lane_ended.set()

    async def _write(self, everything: trio.CancelScope) -> None:
        await self._outbox.write(self._socket.send)
        everything.cancel()

    async def _close_when_drained(self) -> None:
        await self._services.state.leaving.wait()
        await self._outbox.put(notice_frame(self._services.config.drain_timeout_s))
        await self._services.state.draining.wait()
        while self._lanes:
            self._lane_ended = trio.Event()
            await self._lane_ended.wait()
        self._close_code = GOING_AWAY
        # The writer sends the rest and ends.
        self._outbox.close()


class _Peeked(msgspec.Struct):
    """Fields read before a message is parsed: its type, and the lane for errors."""

    type: str = ""
    stream_id: str | None = None


_PEEK: Final = msgspec.json.Decoder(_Peeked)


def _text_of(message: str | bytes | None) -> bytes:
    if not isinstance(message, str):
        raise http_error(400, "a message of this WebSocket is binary; send text frames")
    return message.encode("utf-8", "surrogatepass")


def _peek(text: bytes) -> _Peeked:
    """Return a message's type and lane; empty if it is invalid, which its parser will report."""
    try:
        peeked = _PEEK.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return _Peeked()
    if peeked.stream_id is not None and not LANE.fullmatch(peeked.stream_id):
        peeked.stream_id = None
    return peeked


async def _parse(text: bytes, services: Services) -> dict[str, Any]:
    do = at_once if is_quick(text) else services.do
    return await do(parse_object, text)


def _lane(body: dict[str, Any]) -> str | None:
    stream_id = body.get("stream_id")
    if stream_id is not None and not (isinstance(stream_id, str) and LANE.fullmatch(stream_id)):
        raise invalid_request(
            f"{echo(stream_id)} is not a stream_id: use 1 to 64 letters, digits, dots, - and _",
            "stream_id",
            "invalid_stream_id",
        )
    return stream_id

"""Answers on a WebSocket: their events, their outbox, and resuming.

With `resumable`, an answer outlives its connection: `response.resume` on another connection
continues after the last event received. An event's position is its `sequence_number`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from triolet.errors import RequestError
from triolet.ids import new_request_id

from ...contract.generation import CancelReason, Events
from ...tenants.tenancy import current_tenant
from ..body import KEY, LAST_EVENT_ID, longest_s
from ..errors import echo, http_error, params_called
from ..generate import begin, generation_requests
from ..limits import enter_answer, renew_tenant, reserved
from ..request_scope import ClientConnection, RequestScope
from ..resume import Name, ResumableAnswer, ResumingReader
from ..versions import enter_message, note_refused
from .responses import plan_response
from .responses_events import ResponseEvents, message_frame, response_head
from .stored_responses import conversation_of, keep_at_end, keeper_here, remember

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ...cache.store import ResponseStore
    from ...contract.generation import GenerationRequest
    from ...contract.output_stream import OutputStream
    from ...rollouts.conversations import Conversation
    from ..door import BodyHold
    from ..generate import GenerationPlan
    from ..served_models import ServedModel
    from ..services import Services
    from ..stream import Serializer
    from .responses_schema import InputItem, ResponseCreate, ResponseResume


class WsOutbox:
    """Orders and buffers the outgoing messages of one WebSocket.

    Args:
      max_bytes: buffer size above which senders wait.
      connection: the client's connection.
    """

    def __init__(self, max_bytes: int, connection: ClientConnection) -> None:
        self._max_bytes = max_bytes
        self._connection = connection
        self._messages: deque[bytes] = deque()
        self._num_bytes = 0
        self._is_writing = self._is_closed = False
        self._changed = trio.Event()

    def try_send(self, message: bytes) -> bool:
        """Send a message at once if the buffer is empty and the socket is writable; return whether
        it was sent."""
        is_idle = not (self._messages or self._is_writing or self._is_closed)
        return is_idle and self._connection.channel.try_send(message)

    def put_nowait(self, message: bytes) -> bool:
        """Add a message if there is room; return whether it was added."""
        if self._is_closed or self._num_bytes >= self._max_bytes:
            return False
        self._messages.append(message)
        self._num_bytes += len(message)
        self._change()
        return True

    async def put(self, message: bytes) -> None:
        """Add a message as soon as there is room.

        Raises:
          trio.ClosedResourceError: the outbox is closed.
        """
        await trio.lowlevel.checkpoint()
        while not self.put_nowait(message):
            if self._is_closed:
                raise trio.ClosedResourceError
            await self._changed.wait()

    def close(self) -> None:
        """Accept no more messages; buffered ones are still written."""
        self._is_closed = True
        self._change()

    async def write(self, send: Callable[[str], Awaitable[None]]) -> None:
        """Write messages until `close`, and then the rest of the buffer."""
        while self._messages or not self._is_closed:
            if not self._messages:
                await self._changed.wait()
                continue
            message = self._messages.popleft()
            self._is_writing = True
            try:
                await send(message.decode())
            finally:
                self._is_writing = False
            self._num_bytes -= len(message)
            self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


POSITION: Final = "sequence_number"


def response_name(response_id: str) -> Name:
    """Return the key of a response for the running task's tenant; other tenants cannot find it.

    Without tenants, the id's 128 random bits are the only protection.
    """
    tenant = current_tenant().name
    return Name(tenant, f"responses {tenant}".encode(), response_id)


def _remember(store: ResponseStore, serializer: Serializer) -> None:
    """Store a response for continuation on its connection if it ended without an error."""
    if isinstance(serializer, ResponseEvents) and not serializer.have_failed:
        remember(store, keeper_here(), serializer)


async def relay_frames(reader: ResumingReader, outbox: WsOutbox) -> None:
    """Send all events from the reader's position to the end.

    Raises:
      RequestError: 410, the reader fell too far behind.
    """
    while not reader.is_done:
        if reader.is_lost:
            raise reader.answer.forgotten()
        frames = reader.take()
        for frame in frames:
            if not outbox.try_send(frame):
                await outbox.put(frame)
        if not frames:
            await reader.answer.wait_changed()


class ResumedAnswer:
    """An answer that was started on another connection.

    Args:
      resume: the answer's id and the position.
      services: hold the answer.
      responses: the responses of this connection.
      connection: the client's connection.

    Attributes:
      id: the response id.

    Raises:
      RequestError: 404, it does not exist.
    """

    def __init__(
        self,
        resume: ResponseResume,
        services: Services,
        responses: ResponseStore,
        connection: ClientConnection,
    ) -> None:
        self.id = resume.response_id
        self.stream_id = resume.stream_id
        self._services = services
        self._responses = responses
        self._connection = connection
        answer = services.kept.find(response_name(resume.response_id))
        if answer is None:
            raise http_error(
                404,
                f"there is no resumable response {echo(resume.response_id)}, or it has expired",
                "response_id",
            )
        self._answer: ResumableAnswer = answer
        self._position = 0 if resume.sequence_number is None else resume.sequence_number + 1

    def cancel(self) -> None:
        """Cancel the answer for the client. Idempotent."""
        self._answer.stop()

    async def run(self, outbox: WsOutbox) -> None:
        """Send every event from the position on.

        Raises:
          RequestError: 400 or 410, the position is not available.
        """
        with RequestScope(self._connection) as live, params_called({LAST_EVENT_ID: POSITION}):
            reader = self._services.kept.join(self._answer, self._position)
            live.hold(reader)
            await relay_frames(reader, outbox)
        _remember(self._responses, self._answer.serializer)


RESUMABLE: Final = "resumable"


class ResponseAnswer:
    """One answer.

    Args:
      create: the request.
      services: the server's parts.
      responses: the responses of this connection, which it may continue from and is stored in.
      client_request_id: the client's id of the connection.
      connection: the client's connection.
      hold: the room reserved for its message until it is queued.
      conversation: see RequestScope.

    Attributes:
      id: the response id.
      hold: see Args.
    """

    def __init__(
        self,
        create: ResponseCreate,
        services: Services,
        responses: ResponseStore,
        client_request_id: str,
        connection: ClientConnection,
        hold: BodyHold,
        conversation: Conversation | None,
    ) -> None:
        self._request_id = new_request_id()
        self.id = f"resp_{self._request_id.hex()}"
        self.hold = hold
        self._create = create
        self._services = services
        self._responses = responses
        self._client_request_id = client_request_id
        self._connection = connection
        self._conversation = conversation
        self._stream: OutputStream | None = None
        self._events: ResponseEvents | None = None
        self._resumable: ResumableAnswer | None = None
        self._is_cancelled = False

    @property
    def stream_id(self) -> str | None:
        """Its lane."""
        return self._create.stream_id

    def cancel(self) -> None:
        """Cancel the answer for the client. Idempotent."""
        self._is_cancelled = True
        if self._stream is not None and self._events is not None:
            self._events.is_stopped = True
            self._stream.cancel(CancelReason.STOPPED)
        if self._resumable is not None:
            self._resumable.stop()

    async def run(self, outbox: WsOutbox) -> None:
        """Generate the answer and send every event.

        Raises:
          RequestError: it was refused before it started.
        """
        with RequestScope(self._connection) as live:
            live.entry.hold, live.conversation = self.hold, self._conversation
            enter_message(live)
            try:
                events = await self._run(live, outbox)
            except RequestError as error:
                note_refused(live, error, self._services)
                raise
        _remember(self._responses, events)

    async def _run(self, live: RequestScope, outbox: WsOutbox) -> ResponseEvents:
        renew_tenant(self._services.tenancy)
        enter_answer(self._services, live)
        create = self._create
        earlier, own = await conversation_of(create, self._services, self._responses)
        plan = await plan_response(create, [*earlier, *own], self._services)
        request, events = self._prepare(own, plan)
        run = self._run_resumable if create.resumable else self._run_bound
        await run(request, events, plan.model, live, outbox)
        return events

    def _prepare(
        self, own: Sequence[InputItem], plan: GenerationPlan
    ) -> tuple[GenerationRequest, ResponseEvents]:
        (request,) = generation_requests(
            plan,
            self._services,
            within_s=longest_s(plan.model.config),
            client_request_id=self._client_request_id,
        )
        request = replace(request, request_id=self._request_id, is_streamed=True)
        head = response_head(self.id, self._create, request, plan.model.name)
        events = ResponseEvents(
            head, self._create, message_frame, plan.tool_form, plan.thinking, self.stream_id
        )
        events.own_items = own
        keep_at_end(events, self._create, own, self._services)
        return request, events

    async def _run_bound(
        self,
        request: GenerationRequest,
        events: ResponseEvents,
        model: ServedModel,
        live: RequestScope,
        outbox: WsOutbox,
    ) -> None:
        """Send an answer that ends with this connection."""
        stream = await begin([request], model, self._services, live)
        self._events, self._stream = events, stream
        if self._is_cancelled:
            self.cancel()

        def write(arrived: Events) -> list[bytes] | None:
            unsent: list[bytes] = []
            for index, event in arrived:
                for frame in events.event(index, event):
                    if unsent or not outbox.try_send(frame):
                        unsent.append(frame)
            return unsent or None

        for frame in events.begin():
            await outbox.put(frame)
        while not stream.is_over:
            for frame in await stream.pump(write) or ():
                await outbox.put(frame)

    async def _run_resumable(
        self,
        request: GenerationRequest,
        events: ResponseEvents,
        model: ServedModel,
        live: RequestScope,
        outbox: WsOutbox,
    ) -> None:
        """Send an answer that continues if this connection ends."""
        kept, config = self._services.kept, self._services.config.resume
        answer = self._resumable = ResumableAnswer(events, b"", config, model.name)
        with await reserved([request], model, self._services), params_called({KEY: RESUMABLE}):
            kept.begin(response_name(self.id), answer, partial(model.fleet.submit, request))
        if self._is_cancelled:
            answer.stop()
        reader = kept.join(answer, 0)
        live.hold(reader)
        await relay_frames(reader, outbox)

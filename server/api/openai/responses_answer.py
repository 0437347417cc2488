"""Answers of a WebSocket that go on when it is cut: how they are written down and gone on with.

Opt-in: `response.create` with `resumable`. Whoever knows the id of such a response may ask for it
on another connection with `response.resume`, from behind the last event that it has. The position
of an event is its `sequence_number`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from triolet.ids import new_request_id

from ...contract.generation import CancelReason
from ...tenants.tenancy import current_tenant
from ..claims import renew_tenant
from ..errors import echo, http_error, params_called
from ..generate import generation_requests, submit_for
from ..live import LiveRequest
from ..quota import enter_answer, reserved
from ..resume import Name, ResumableAnswer
from ..resuming import KEY, LAST_EVENT_ID
from ..stream import listen_until
from .responses_events import ResponseDocument, ResponseEvents, message_frame
from .responses_plan import answer_of, plan_response, turns_of

if TYPE_CHECKING:
    from ...contract.generation import Event, Generation, GenerationRequest
    from ..conversations import Conversations, Turns
    from ..door import BodyHold
    from ..generate import Plan
    from ..live import Departure
    from ..resume import ResumingReader
    from ..services import Services
    from .responses_schema import ResponseCreate, ResponseResume
    from .ws_outbox import WsOutbox


POSITION: Final = "sequence_number"


def own_name(response_id: str) -> Name:
    """Return what the running task's tenant finds a response by: another one has no such response.

    An id has 128 random bits, so that where there are no tenants, to know it is to own it.
    """
    tenant = current_tenant().name
    return Name(tenant, f"responses {tenant}".encode(), response_id)


class ResponseScript:
    """The events of a response, one by one.

    Args:
      events: writes them.
      document: the response.
      turns: of the conversation, up to the question.
    """

    def __init__(self, events: ResponseEvents, document: ResponseDocument, turns: Turns) -> None:
        self._events = events
        self._document = document
        self._turns = turns

    def begin(self) -> list[bytes]:
        """Return what comes before the text."""
        return self._events.begin()

    def write(self, index: int, event: Event, *, is_stopped: bool) -> list[bytes]:
        """Return what something that happened looks like."""
        return self._events.write(event, is_cancelled=is_stopped)

    def end(self) -> list[bytes]:
        """Return nothing: the terminal event was the end."""
        return []

    def remember(self, response_id: str, conversations: Conversations) -> None:
        """Let a connection go on with the conversation, if the response has come to a good end."""
        if not self._events.have_failed:
            answer = answer_of(self._document.items)
            conversations.remember(response_id, (*self._turns, *answer))


async def relay_frames(reader: ResumingReader, outbox: WsOutbox) -> None:
    """Send all events, from the reader's position to the end.

    Raises:
      RequestError: 410, it fell too far behind.
    """
    while not reader.is_done:
        if reader.is_lost:
            raise reader.lost()
        frames = reader.take()
        for frame in frames:
            if not outbox.try_send(frame):
                await outbox.put(frame)
        if not frames:
            await reader.wait()


class ResumedAnswer:
    """One answer that another connection began.

    Args:
      resume: which, and from where.
      services: where it is kept.
      conversations: of this connection.
      departure: of this connection.

    Attributes:
      id: by which the client knows it.

    Raises:
      RequestError: 404, it is not there.
    """

    def __init__(
        self,
        resume: ResponseResume,
        services: Services,
        conversations: Conversations,
        departure: Departure,
    ) -> None:
        self.id = resume.response_id
        self.stream_id = resume.stream_id
        self._services = services
        self._conversations = conversations
        self._departure = departure
        answer = services.kept.find(own_name(resume.response_id))
        if answer is None:
            raise http_error(
                404,
                f"there is no resumable response {echo(resume.response_id)}, or not any more",
                "response_id",
            )
        self._answer: ResumableAnswer = answer
        self._position = 0 if resume.sequence_number is None else resume.sequence_number + 1

    def cancel(self) -> None:
        """End it, as the client wishes. Idempotent."""
        self._answer.stop()

    async def run(self, outbox: WsOutbox) -> None:
        """Send every event from the position on.

        Raises:
          RequestError: 400 or 410, that position is not there.
        """
        with LiveRequest(self._departure) as live, params_called({LAST_EVENT_ID: POSITION}):
            reader = self._services.kept.join(self._answer, self._position)
            live.hold(reader)
            await relay_frames(reader, outbox)
        script = self._answer.script
        if isinstance(script, ResponseScript):
            script.remember(self.id, self._conversations)


RESUMABLE: Final = "resumable"


class ResponseAnswer:
    """One answer.

    Args:
      create: what was asked for.
      services: what it works with.
      conversations: what it may continue, and where it is remembered.
      client_request_id: what the client called the connection.
      departure: of the connection.
      hold: of the room that its message takes, until it is queued.

    Attributes:
      id: by which the client knows it.
      hold: the same.
    """

    def __init__(
        self,
        create: ResponseCreate,
        services: Services,
        conversations: Conversations,
        client_request_id: str,
        departure: Departure,
        hold: BodyHold,
    ) -> None:
        self._request_id = new_request_id()
        self.id = f"resp_{self._request_id.hex()}"
        self.hold = hold
        self._create = create
        self._services = services
        self._conversations = conversations
        self._client_request_id = client_request_id
        self._departure = departure
        self._generation: Generation | None = None
        self._resumable: ResumableAnswer | None = None
        self._is_cancelled = False

    @property
    def stream_id(self) -> str | None:
        """Its lane."""
        return self._create.stream_id

    def cancel(self) -> None:
        """End it, as the client wishes. Idempotent."""
        self._is_cancelled = True
        if self._generation is not None:
            self._generation.cancel(CancelReason.STOPPED)
        if self._resumable is not None:
            self._resumable.stop()

    async def run(self, outbox: WsOutbox) -> None:
        """Generate, and send every event.

        Raises:
          RequestError: nothing was begun.
        """
        with LiveRequest(self._departure) as live:
            live.entry.hold = self.hold
            renew_tenant(self._services.tenancy)
            enter_answer(self._services, live)
            earlier = self._earlier()
            plan = await plan_response(self._create, earlier, self._services)
            request = self._request(plan)
            document = ResponseDocument(
                self.id,
                self._create,
                request,
                self._services.config,
                plan.tool_form,
                plan.thinking,
            )
            events = ResponseEvents(document, message_frame, self.stream_id)
            script = ResponseScript(events, document, (*earlier, *turns_of(self._create.input)))
            if self._create.resumable:
                await self._run_resumable(script, request, live, outbox)
                return
            with await reserved([request], self._services):
                self._generation = self._services.fleet.submit(request)
                live.hold(self._generation)
            if self._is_cancelled:
                self._generation.cancel(CancelReason.STOPPED)
            for frame in events.begin():
                await outbox.put(frame)
            while not events.are_over:
                for frame in await self._next_frames(events, self._generation, outbox):
                    await outbox.put(frame)
        script.remember(self.id, self._conversations)

    async def _next_frames(
        self, events: ResponseEvents, generation: Generation, outbox: WsOutbox
    ) -> list[bytes]:
        """Send what can be sent at once, until something cannot, and return that."""
        unsent: list[bytes] = []

        def is_blocked() -> bool:
            for event in generation.take_now():
                for frame in events.write(event, is_cancelled=self._is_cancelled):
                    if unsent or not outbox.try_send(frame):
                        unsent.append(frame)
            return bool(unsent) or events.are_over

        await listen_until(generation.listen, is_blocked)
        return unsent

    async def _run_resumable(
        self,
        script: ResponseScript,
        request: GenerationRequest,
        live: LiveRequest,
        outbox: WsOutbox,
    ) -> None:
        """The same, but what is generated stays when this connection goes."""
        kept, config = self._services.kept, self._services.config.resume
        answer = self._resumable = ResumableAnswer(script, b"", config)
        with await reserved([request], self._services), params_called({KEY: RESUMABLE}):
            kept.begin(
                own_name(self.id),
                answer,
                lambda holder: submit_for(holder, [request], self._services),
            )
        if self._is_cancelled:
            answer.stop()
        reader = kept.join(answer, 0)
        live.hold(reader)
        await relay_frames(reader, outbox)
        script.remember(self.id, self._conversations)

    def _earlier(self) -> Turns:
        if self._create.previous_response_id is None:
            return ()
        return self._conversations.up_to(self._create.previous_response_id)

    def _request(self, plan: Plan) -> GenerationRequest:
        (request,) = generation_requests(
            plan,
            self._services,
            within_s=self._services.config.default_deadline_s,
            client_request_id=self._client_request_id,
        )
        return replace(request, request_id=self._request_id)

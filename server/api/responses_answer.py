"""One answer on a WebSocket: from `response.create` to its terminal event.

Knows the steps of an answer and where its frames go; knows nothing of lanes and of other answers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from triolet.ids import new_request_id

from ..generation import CancelReason
from .claims import renew_tenant
from .errors import params_called
from .generate import generation_requests, submit_for
from .listening import listen_until
from .live import LiveRequest
from .quota import enter_answer, reserved
from .responses_document import ResponseDocument
from .responses_events import ResponseEvents, message_frame
from .responses_plan import plan_response, turns_of
from .responses_resume import ResponseScript, own_name, relay_frames
from .resumable import ResumableAnswer
from .resuming import KEY

if TYPE_CHECKING:
    from ..door import BodyHold
    from ..generation import Generation, GenerationRequest
    from .conversations import Conversations, Turns
    from .generate import Plan
    from .live import Departure
    from .ports import Services
    from .responses_schema import ResponseCreate
    from .ws_outbox import WsOutbox

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

"""One answer on a WebSocket: from `response.create` to its terminal event.

Knows the steps of an answer and where its frames go; knows nothing of lanes and of other answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triolet.ids import new_request_id

from ..generation import CancelReason, Delta, Failed, Finished, GenerationRequest
from .chat import template_messages
from .intake import check_model
from .listening import listen_until
from .live import LiveRequest
from .responses_events import ResponseEvents
from .salt import salt_of
from .sampling import check_token_ids, completion_budget, sampling_params

if TYPE_CHECKING:
    from ..generation import Event, Generation
    from .conversations import Conversations, Turns
    from .live import Departure
    from .ports import Services
    from .responses_schema import ResponseCreate
    from .ws_outbox import WsOutbox


class ResponseAnswer:
    """One answer.

    Args:
      create: what was asked for.
      services: what it works with.
      conversations: what it may continue, and where it is remembered.
      client_request_id: what the client called the connection.
      departure: of the connection.

    Attributes:
      id: by which the client knows it.
    """

    def __init__(
        self,
        create: ResponseCreate,
        services: Services,
        conversations: Conversations,
        client_request_id: str,
        departure: Departure,
    ) -> None:
        self._request_id = new_request_id()
        self.id = f"resp_{self._request_id.hex()}"
        self._create = create
        self._services = services
        self._conversations = conversations
        self._client_request_id = client_request_id
        self._departure = departure
        self._generation: Generation | None = None
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

    async def run(self, outbox: WsOutbox) -> None:
        """Generate, and send every event.

        Raises:
          RequestError: nothing was begun.
        """
        turns = self._turns()
        with LiveRequest(self._departure) as live:
            request = await self._generation_request(turns)
            self._generation = self._services.fleet.submit(request)
            live.hold(self._generation)
            if self._is_cancelled:
                self._generation.cancel(CancelReason.STOPPED)
            events = ResponseEvents(self.id, self._create, request, self._services.config)
            for frame in events.begin():
                await outbox.put(frame)
            while not events.are_over:
                for frame in await self._next_frames(events, self._generation, outbox):
                    await outbox.put(frame)
        if not events.have_failed:
            self._conversations.remember(
                self.id, (*turns, {"role": "assistant", "content": events.text})
            )

    async def _next_frames(
        self, events: ResponseEvents, generation: Generation, outbox: WsOutbox
    ) -> list[bytes]:
        """Send what can be sent at once, until something cannot, and return that."""
        unsent: list[bytes] = []

        def is_blocked() -> bool:
            for event in generation.take_now():
                for frame in self._frames(events, event):
                    if unsent or not outbox.try_send(frame):
                        unsent.append(frame)
            return bool(unsent) or events.are_over

        await listen_until(generation.listen, is_blocked)
        return unsent

    def _turns(self) -> Turns:
        create = self._create
        check_model(create.model, self._services.config)
        check_token_ids(create, self._services.text.vocab_size)
        earlier: Turns = ()
        if create.previous_response_id is not None:
            earlier = self._conversations.up_to(create.previous_response_id)
        return (*earlier, *template_messages(create.input))

    async def _generation_request(self, turns: Turns) -> GenerationRequest:
        create, text = self._create, self._services.text
        system = [{"role": "system", "content": create.instructions}] if create.instructions else []
        prompt = await text.render_chat(
            [*system, *turns], template_kwargs=create.chat_template_kwargs
        )
        prompt_ids = tuple(await text.encode(prompt, add_special_tokens=False, param="input"))
        max_tokens = completion_budget(
            len(prompt_ids),
            create.max_output_tokens,
            self._services.defaults.max_new_tokens,
            self._services.fleet.status().max_model_len,
            "input",
        )
        logprobs = (create.top_logprobs or 0) if create.include else None
        sampling = sampling_params(
            create, self._services.defaults, max_tokens=max_tokens, logprobs=logprobs
        )
        return GenerationRequest(
            request_id=self._request_id,
            prompt_ids=prompt_ids,
            sampling=sampling,
            deadline_s=self._services.config.default_deadline_s,
            stop=create.stop,
            priority=create.priority or 0,
            client_request_id=self._client_request_id,
            cache_salt=salt_of(create.cache_salt),
        )

    def _frames(self, events: ResponseEvents, event: Event) -> list[bytes]:
        match event:
            case Delta():
                return events.delta(event)
            case Finished():
                return events.finish(event.reason, event.usage)
            case Failed() if self._is_cancelled:
                return events.cancelled(event.usage)
            case Failed():
                return events.fail(event.error, event.usage)

"""Answers of a WebSocket that go on when it is cut: how they are written down and gone on with.

Opt-in: `response.create` with `resumable`. Whoever knows the id of such a response may ask for it
on another connection with `response.resume`, from behind the last event that it has. The position
of an event is its `sequence_number`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ..tenancy import current_tenant
from .errors import echo, http_error, params_called
from .kept_answers import Name
from .live import LiveRequest
from .responses_plan import answer_of
from .resuming import LAST_EVENT_ID

if TYPE_CHECKING:
    from ..generation import Event
    from .conversations import Conversations, Turns
    from .live import Departure
    from .ports import Services
    from .responses_document import ResponseDocument
    from .responses_events import ResponseEvents
    from .responses_schema import ResponseResume
    from .resumable import ResumableAnswer, ResumingReader
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

"""The server's link to the control process, which loads and unloads models: reports each model's
activity and receives its state."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
import trio

from triolet.control_protocol import (
    Activity,
    LineBuffer,
    ModelActivity,
    Wake,
    decode_told,
    encode_line,
)
from triolet.units import SECONDS

from .presence import ASLEEP

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triolet.control_protocol import ModelNews

    from .links import Links
    from .presence import Presence

log = structlog.get_logger(__name__)

READ_BYTES: Final = 64 * 1024
REPORT_S: Final = 1.0 * SECONDS
"""Interval between reports when nothing changes."""
SEND_TIMEOUT_S: Final = 5.0 * SECONDS
"""Deadline for sending one report; after it the link is closed and dialled again."""
REDIAL_S: Final = 0.1 * SECONDS
"""Delay before redialling, doubled up to `REPORT_S`. Control restarts within a second."""


class _Model:
    """One model's reports to control.

    Args:
      fleet: the model's workers and requests.

    Attributes:
      fleet: the model's workers and requests.
      presence: receives the state that control sends.
    """

    def __init__(self, fleet: Links) -> None:
        self.fleet = fleet
        self.presence: Presence = fleet.admission.presence
        self._received = 0
        self._used_at: float | None = None

    def report(self, name: str, now: float) -> tuple[ModelActivity, bool]:
        """Return the model's activity, and whether control should wake it."""
        status = self.fleet.status()
        in_flight = status.queued + status.running
        if in_flight or status.received != self._received:
            self._received, self._used_at = status.received, now
        used_s_ago = None if self._used_at is None else now - self._used_at
        is_missed = self.presence.is_wanted or (status.queued > 0 and not status.is_ready)
        self.presence.note_report(is_idle=not in_flight)
        held, version = self.fleet.adapters.held, self.fleet.version
        activity = ModelActivity(
            name, in_flight, status.queued, used_s_ago, status.is_ready, held, version
        )
        return activity, is_missed and self.presence.state in ASLEEP


class ControlLink:
    """Keep one server's link to control.

    Args:
      path: control's Unix socket.
      name: this server's name in the fleet.
      fleets: each model's fleet by name; call `refresh` after a change.
      refused: why models could not be added here, by name.
    """

    def __init__(
        self,
        path: str,
        name: str,
        fleets: Mapping[str, Links],
        refused: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._path = path
        self._name = name
        self._fleets = fleets
        self._refused = refused
        self._models: dict[str, _Model] = {}
        self._news: dict[str, ModelNews] = {}
        self._due = trio.Event()
        self.refresh()

    def refresh(self) -> None:
        """Record models that were added, removed or refused, and report them to control."""
        self._models = {
            name: self._models.get(name) or self._known(name, fleet)
            for name, fleet in self._fleets.items()
        }
        self._report_now()

    def _known(self, name: str, fleet: Links) -> _Model:
        model = _Model(fleet)
        model.presence.changed = self._report_now
        if name in self._news:
            model.presence.note(self._news[name], trio.current_time())
        return model

    def _report_now(self) -> None:
        self._due.set()

    async def run(self) -> None:
        """Keep the link until cancelled. While control is away, models keep their last state."""
        delay_s, reason = REDIAL_S, ""
        while True:
            before = reason
            try:
                async with await trio.open_unix_socket(self._path) as stream:
                    log.info("control_found", path=self._path)
                    delay_s, before = REDIAL_S, ""
                    reason = await self._speak(stream)
            except OSError as error:
                reason = str(error)
            if reason != before:
                log.info("control_lost", path=self._path, reason=reason)
            for model in self._models.values():
                model.presence.note_lost(trio.current_time())
            await trio.sleep(delay_s)
            delay_s = min(2 * delay_s, REPORT_S)

    async def _speak(self, stream: trio.SocketStream) -> str:
        """Send and receive until the link ends; return the reason."""
        reason = "control reads no reports"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report, stream, nursery.cancel_scope)
            try:
                await self._hear(stream)
                reason = "control closed the link"
            except (trio.BrokenResourceError, msgspec.MsgspecError) as error:
                reason = str(error)
            nursery.cancel_scope.cancel()
        return reason

    async def _hear(self, stream: trio.SocketStream) -> None:
        lines = LineBuffer()
        while data := await stream.receive_some(READ_BYTES):
            now = trio.current_time()
            for line in lines.feed(data):
                self._news = {news.name: news for news in decode_told(line).models}
                for name, news in self._news.items():
                    if name in self._models:
                        self._models[name].presence.note(news, now)
            # A model may have gone to sleep just as a request arrived.
            self._report_now()

    async def _report(self, stream: trio.SocketStream, link: trio.CancelScope) -> None:
        while True:
            self._due = trio.Event()
            now = trio.current_time()
            reports = [model.report(name, now) for name, model in self._models.items()]
            shown = tuple(activity for activity, _ in reports)
            activity = Activity(self._name, shown, dict(self._refused))
            wakes = [Wake(one.name) for one, is_missed in reports if is_missed]
            lines = encode_line(activity) + b"".join(map(encode_line, wakes))
            with trio.move_on_after(SEND_TIMEOUT_S) as sending:
                try:
                    await stream.send_all(lines)
                except trio.BrokenResourceError:
                    link.cancel()
                    return
            if sending.cancelled_caught:
                link.cancel()
                return
            with trio.move_on_after(REPORT_S):
                await self._due.wait()

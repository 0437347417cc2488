"""The Unix socket between control and the servers of a fleet, with JSON lines in both directions.

Servers report activity and wake requests; control publishes model states.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
import trio
from trio.lowlevel import ParkingLot

from triolet.control_protocol import Activity, LineBuffer, Models, decode_said, encode_line

from .sockets import bind_private

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from triolet.control_protocol import ModelNews, Said

log = structlog.get_logger(__name__)

READ_BYTES: Final = 64 * 1024
SEND_TIMEOUT_S: Final = 5.0
"""A server that reads nothing for this time is disconnected; it connects again."""
AGAIN_S: Final = 1.0
"""Interval of publishing predictions, which change as time passes."""


class ServerChannel:
    """The connections of servers.

    Args:
      hear: called with each message of a server.
      news: returns the states of all models.
    """

    def __init__(
        self, hear: Callable[[Said], None], news: Callable[[], tuple[ModelNews, ...]]
    ) -> None:
        self._hear = hear
        self._news = news
        self._changed = ParkingLot()
        self._num_changes = 0
        self._numbers = count()

    def publish(self) -> None:
        """Send the current states to every server."""
        self._num_changes += 1
        self._changed.unpark_all()

    async def run(
        self, path: Path, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Listen until cancelled.

        Raises:
          ConfigError: the socket cannot be opened.
        """
        listening = bind_private(path)
        task_status.started()
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
        await trio.serve_listeners(self._serve, [listener])

    async def _serve(self, stream: trio.SocketStream) -> None:
        async with stream, trio.open_nursery() as nursery:
            nursery.start_soon(self._tell, stream, nursery.cancel_scope)
            try:
                await self._listen(stream)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                log.debug("server_cut_off")
            except msgspec.MsgspecError as error:
                log.warning("server_not_understood", error=str(error))
            nursery.cancel_scope.cancel()

    async def _listen(self, stream: trio.SocketStream) -> None:
        lines, number = LineBuffer(), next(self._numbers)
        while data := await stream.receive_some(READ_BYTES):
            for line in lines.feed(data):
                said = decode_said(line)
                if isinstance(said, Activity):
                    # During a handover, a server and its successor have the same name.
                    said = msgspec.structs.replace(said, server=f"{said.server}/{number}")
                self._hear(said)

    async def _tell(self, stream: trio.SocketStream, connection: trio.CancelScope) -> None:
        told: tuple[ModelNews, ...] | None = None
        while True:
            num_changes, news = self._num_changes, self._news()
            if news != told:
                with trio.move_on_after(SEND_TIMEOUT_S) as sending:
                    try:
                        await stream.send_all(encode_line(Models(news)))
                    except (trio.BrokenResourceError, trio.ClosedResourceError):
                        connection.cancel()
                        return
                if sending.cancelled_caught:
                    connection.cancel()
                    return
                told = news
            if num_changes == self._num_changes:  # otherwise it changed during the send
                with trio.move_on_after(AGAIN_S):
                    await self._changed.park()

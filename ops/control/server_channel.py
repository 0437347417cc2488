"""The links between control and the servers of a fleet, on its host or on others.

Servers report activity and wake requests; control publishes model states or routes.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
import trio
from trio.lowlevel import ParkingLot

from transport.control_protocol import (
    MAX_FRAME_BYTES,
    Activity,
    Observed,
    decode_said,
    encoded,
)
from transport.frames import Capacity, ControlNews, Goodbye, Hello, ServerReport, Welcome
from transport.handshake import answer_hello, goodbye
from transport.link import PeerBusy, PeerGone
from transport.zmq_curve import Repeats
from triolet.ids import PeerId, Role, new_epoch, shown_identity

if TYPE_CHECKING:
    from collections.abc import Callable

    from transport.control_protocol import Models, Said
    from transport.frames import AnyFrame
    from transport.link import Listener, Network
    from triolet.config import ControlConfig

log = structlog.get_logger(__name__)

NO_CAPACITY: Final = Capacity(0, 1, 0, 0, 0)
"""Control computes nothing."""


class ServerChannel:
    """The links of servers.

    Args:
      config: address, name of the fleet, and bounds.
      hear: called with each message of a server.
      news: returns what servers of a zone should know.
      are_known: returns whether the news are complete. Until then they are held back, for up to
        half of the time after which servers give a silent control up.
    """

    def __init__(
        self,
        config: ControlConfig,
        hear: Callable[[Said], None],
        news: Callable[[str], Models],
        are_known: Callable[[], bool],
    ) -> None:
        self._config = config
        self._hear = hear
        self._news = news
        self._are_known = are_known
        self._me = PeerId(Role.CONTROL, "control", new_epoch())
        self._servers: dict[bytes, str] = {}  # the zone of each
        self._repeats = Repeats()
        self._changed = ParkingLot()
        self._num_changes = 0

    def publish(self) -> None:
        """Send the current news to every server."""
        self._num_changes += 1
        self._changed.unpark_all()

    async def run(
        self, network: Network, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Listen until cancelled.

        Raises:
          ConfigError: the address cannot be used, or it is a tcp address and there are no keys.
        """
        config = self._config
        hwm = config.link.max_peers
        with closing(
            network.listen(config.address, hwm=hwm, max_frame_bytes=MAX_FRAME_BYTES)
        ) as listener:
            task_status.started()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._tell, listener)
                while True:
                    for message in await listener.receive_many():
                        self._take(listener, message.sender, message.frame)

    def _take(self, listener: Listener, sender: bytes, frame: AnyFrame) -> None:
        if isinstance(frame, Hello):
            answer = self._answer(frame)
        elif sender in self._servers and isinstance(frame, ServerReport):
            try:
                said = decode_said(frame.body)
            except msgspec.MsgspecError as error:
                answer = goodbye(f"{shown_identity(sender)} sent an invalid report: {error}")
            else:
                if isinstance(said, Activity):
                    self._servers[sender] = said.zone
                if isinstance(said, Activity | Observed):
                    # Servers of several hosts, or a server and its successor, may have one name.
                    name = f"{said.server}/{shown_identity(sender)}"
                    said = msgspec.structs.replace(said, server=name)
                self._hear(said)
                return
        else:
            self._send(listener, sender, goodbye(f"{self._me} does not know you: send HELLO"))
            return
        if isinstance(answer, Goodbye):
            self._servers.pop(sender, None)
            if self._repeats.due(answer.reason) is not None:
                log.warning("server_refused", reason=answer.reason)
        else:
            self._servers.setdefault(sender, "")
            self.publish()
        self._send(listener, sender, answer)

    def _answer(self, hello: Hello) -> Welcome | Goodbye:
        who, own = hello.peer.peer_id, self._config.fleet
        if who.role is Role.SERVER and hello.fingerprint != own:
            return goodbye(
                f"{who} is of fleet {hello.fingerprint!r}, and {self._me} controls {own!r}: give "
                "the server the address of its own control, or set server.control_fleet"
            )
        if len(self._servers) >= self._config.link.max_peers:
            return goodbye(f"{self._me} has reached its limit of {len(self._servers)} servers")
        return answer_hello(
            hello, me=self._me, expected=(Role.SERVER,), fingerprint="", capacity=NO_CAPACITY
        )

    def _send(self, listener: Listener, sender: bytes, frame: AnyFrame) -> None:
        try:
            listener.send_nowait(sender, frame)
        except (PeerGone, PeerBusy):
            self._servers.pop(sender, None)  # it says HELLO when it reads again

    async def _tell(self, listener: Listener) -> None:
        """Send the news after each change, and at intervals: predictions change as time passes, and
        servers must hear that control is alive."""
        with trio.move_on_after(self._config.link.lease_ttl_s / 2):
            while not self._are_known():  # noqa: ASYNC110 (several rollouts)
                await trio.sleep(self._config.tick_s)
        while True:
            num_changes, zones = self._num_changes, {*self._servers.values()}
            frames = {zone: ControlNews(encoded(self._news(zone))) for zone in zones}
            for sender, zone in tuple(self._servers.items()):
                self._send(listener, sender, frames[zone])
            if num_changes == self._num_changes:  # otherwise it changed meanwhile
                with trio.move_on_after(self._config.link.heartbeat_interval_s):
                    await self._changed.park()

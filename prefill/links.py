"""KV links of a prefill worker: connect when there is KV to send, disconnect when idle.

Moves frames between the core and decode workers, and checks that the right peer answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import structlog
import trio

from transport.frames import Goodbye, KvChunk, SharedRange, Welcome
from transport.handshake import check_welcome, goodbye, make_hello
from transport.link import PeerBusy, PeerGone
from triolet.config import MemorySharing
from triolet.errors import ConfigError
from triolet.ids import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transport.frames import KvTarget, SharedRing
    from transport.link import Connection, Hold, LinkMessage, Network
    from triolet.config import LinkConfig
    from worker.identity import Identity

    from .core import PrefillCore
    from .ring import RingSlot
    from .shipper import KvSend

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Link:
    """The connection to one decode worker.

    Attributes:
      connection: the connection.
      scope: cancels its task.
      used_at: when it was last used.
      shares_ring: whether the target reads chunks from our memory.
    """

    connection: Connection
    scope: trio.CancelScope
    used_at: float
    shares_ring: bool = False

    def shares(self, slot: RingSlot) -> bool:
        """Return whether the target reads this slot from our memory."""
        return self.shares_ring and slot.offset is not None

    def send(self, send: KvSend) -> Hold | None:
        """Send a frame with its bytes, or with their place in shared memory."""
        frame, slot = send.frame, send.slot
        if isinstance(frame, KvChunk) and slot and slot.offset is not None and self.shares(slot):
            where = SharedRange(slot.offset, len(slot.memory))
            return self.connection.send_nowait(msgspec.structs.replace(frame, shared=where))
        return self.connection.send_nowait(frame, send.payload)


class KvLinks:
    """Connections to decode workers, one per target.

    Args:
      core: decides what to send, and takes the answers.
      identity: sent in HELLO.
      network: makes connections.
      link: bounds and deadlines.
      nursery: for the lifetime of all links.
      settle: sends the core's frames after an answer.
      ring: tells others on this host how to find the ring; None to send its bytes.
    """

    def __init__(
        self,
        core: PrefillCore,
        identity: Identity,
        network: Network,
        link: LinkConfig,
        nursery: trio.Nursery,
        settle: Callable[[float], None],
        ring: SharedRing | None = None,
    ) -> None:
        self._core = core
        self._identity = identity
        self._network = network
        self._config = link
        self._wire = link.wire
        self._nursery = nursery
        self._settle = settle
        self._ring = ring
        self._links: dict[KvTarget, _Link] = {}

    def flush(self, now: float) -> None:
        """Send what may be sent; connect to new targets, disconnect from lost and idle ones."""
        self._hang_up_unwanted(now)
        self._dial_missing(now)
        # Only now: connecting to a restarted target ends the transfers to its previous epoch.
        for send in self._core.take_kv_sends(now):
            # A frame that is lost is sent again when its answer is overdue.
            link = self._links[send.target]
            try:
                hold = link.send(send)
            except (PeerGone, PeerBusy) as error:
                log.warning("kv_send_failed", target=send.target.peer.name, error=str(error))
                continue
            if send.slot is not None and hold is not None:
                send.slot.hold(hold)
            if send.slot is not None and link.shares(send.slot):
                self._core.counters.kv_shared_bytes += len(send.slot.memory)

    def _hang_up_unwanted(self, now: float) -> None:
        wanted = set(self._core.shipper.targets)
        for target, link in tuple(self._links.items()):
            if target not in wanted:
                self._hang_up(target, "this transfer is over")
            elif not self._core.shipper.is_idle(target):
                link.used_at = now
            elif now - link.used_at > self._config.kv_idle_s:
                self._core.shipper.close_lane(target)
                self._hang_up(target, "this link was idle")

    def _dial_missing(self, now: float) -> None:
        for target in self._core.shipper.targets:
            if target in self._links:
                continue
            for older in [t for t in self._links if t.address == target.address]:
                # An address has one epoch at a time: a worker that restarted there has ended the
                # old one.
                self._core.on_target_lost(older, f"{target.peer.name} has restarted", now)
                self._hang_up(older, "you have restarted")
            try:
                connection = self._network.connect(
                    target.address,
                    self._identity.me.identity(),
                    hwm=self._config.kv_hwm,
                    max_frame_bytes=self._config.max_kv_frame_bytes,
                )
            except ConfigError as error:
                self._core.on_target_lost(target, str(error), now)
                continue
            link = _Link(connection, trio.CancelScope(), now)
            self._links[target] = link
            self._nursery.start_soon(self._serve, target, link)

    def _hang_up(self, target: KvTarget, reason: str) -> None:
        link = self._links.pop(target)
        try:
            link.connection.send_nowait(goodbye(reason))
        except (PeerGone, PeerBusy):
            log.info("kv_goodbye_unsent", target=target.peer.name)
        link.scope.cancel()

    async def _serve(self, target: KvTarget, link: _Link) -> None:
        """Greet one decode worker and listen to it until the link is no longer wanted."""
        try:
            with link.scope:
                # Without an answer the core gives the target up, which cancels this task.
                hello = make_hello(self._identity.me, self._identity.fingerprint, self._ring)
                await link.connection.send(hello)
                while True:
                    self._take(target, await link.connection.receive_many())
        finally:
            link.connection.close()

    def _take(self, target: KvTarget, messages: Sequence[LinkMessage]) -> None:
        now = trio.current_time()
        self._core.wake(now)
        for message in messages:
            match message.frame:
                case Welcome() as welcome:
                    self._on_welcome(target, welcome, now)
                case Goodbye(reason=reason):
                    self._core.on_target_lost(target, reason, now)
                case frame:
                    self._core.on_kv(target, frame, now)
        self._settle(now)

    def _on_welcome(self, target: KvTarget, welcome: Welcome, now: float) -> None:
        refusal = check_welcome(
            welcome,
            me=self._identity.me,
            expected=Role.DECODE,
            fingerprint=self._identity.fingerprint,
        )
        if refusal is not None:
            self._core.on_target_lost(target, refusal.reason, now)
        elif welcome.peer != target.peer:
            reason = f"{welcome.peer.peer_id} answers, but {target.peer.peer_id} was expected"
            self._core.on_target_lost(target, reason, now)
        elif welcome.capacity.kv_window_bytes == 0:
            self._core.on_target_lost(target, f"{target.peer.name} accepts no KV", now)
        elif self._wire.share_memory is MemorySharing.ON and not welcome.shares_ring:
            reason = f"{target.peer.name} does not read shared memory, but share_kv_memory is on"
            self._core.on_target_lost(target, reason, now)
        else:
            self._note_path(target, welcome)
            self._core.shipper.open_peer(target, welcome.capacity.kv_window_bytes, now)

    def _note_path(self, target: KvTarget, welcome: Welcome) -> None:
        link = self._links.get(target)
        if link is None:
            return
        link.shares_ring = self._ring is not None and welcome.shares_ring
        if link.shares_ring:
            path, why = "memory", "it has mapped our ring"
        elif self._ring is None:
            path, why = "socket", "this worker offers no memory"
        else:
            path, why = "socket", "it does not read our memory: see its log"
        log.info("kv_path", target=target.peer.name, path=path, why=why)

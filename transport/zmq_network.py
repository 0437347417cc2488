"""Links over ZeroMQ: listener, connection, and a log of handshakes that explains why a peer cannot
be reached. memory_network.py has the same interface without sockets.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
import trio
import zmq
from zmq.utils.monitor import parse_monitor_message

from triolet.errors import ConfigError
from triolet.ids import shown_identity

from .address import IpcAddress, TcpAddress, address_in_use, keys_needed, parse_address
from .codec import FrameGate, encode_message
from .gate import BoundGate
from .link import LinkMessage, LinkStatistics, PeerBusy, PeerGone
from .zmq_curve import CurveGuard, KeyDirectory, Repeats
from .zmq_socket import ZmqSocket

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triolet.config import LinkConfig

    from .address import Address
    from .frames import AnyFrame, Goodbye
    from .link import Hold


log = structlog.get_logger()

WATCHED_EVENTS: Final = int(
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)
"""Monitored events of a connection."""


class HandshakeLog:
    """The handshakes of one connection.

    Args:
      place: address of the bound side.
      keys: our keys; None on a link without keys.
      identity: identity of the connecting side.
      repeats: lines that were logged already, so that reconnecting does not repeat them.

    Attributes:
      address: the same address as text.
      is_connected: whether the last handshake succeeded and the connection still holds.
      num_breaks: connections that were lost.
      trouble: why there is no connection, and what to do; empty if there is one or the reason is
        unknown.
    """

    def __init__(
        self, place: Address, keys: KeyDirectory | None, identity: bytes, repeats: Repeats
    ) -> None:
        self.address = str(place)
        self.is_connected = False
        self.num_breaks = 0
        self.trouble = ""
        self._place = place
        self._keys = keys
        self._who = identity.decode(errors="replace").rpartition(":")[0]
        self._repeats = repeats

    def note(self, event: int, value: int) -> None:
        """Process a monitor event."""
        self.num_breaks += self.is_connected
        self.is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self.is_connected:
            self.trouble = ""
        elif event != zmq.EVENT_DISCONNECTED and isinstance(self._place, TcpAddress):
            self.trouble = self._explain(event, value)
            num_kept = self._repeats.due(f"{self.address} {self.trouble}")
            if num_kept is not None:
                log.warning(
                    "handshake_failed",
                    peer=self.address,
                    who=self._who,
                    reason=self.trouble,
                    kept_back=num_kept,
                )

    def _explain(self, event: int, value: int) -> str:
        if self._keys is None:
            return (
                "expects keys, and this side has none for it: set link.wire.plaintext on both "
                "sides of a KV link, or on neither"
            )
        assert isinstance(self._place, TcpAddress), "only tcp links carry keys"
        ours, source = self._keys, self._keys.source_of(self._place)
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return (
                f"refused our key {ours.shown}: copy {ours.path}/key.public into authorized/ of "
                "the key directory there"
            )
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH and (
            event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        ):
            return "has no keys: start it with curve_dir; set link.wire.plaintext on both sides"
        return (
            f"ends the handshake: it may have a key other than {source}, or none. Copy the "
            f"key.public of that process to {ours.bound_file(self._place)}, and check its log"
        )


MAX_SOCKETS: Final = 16_384
"""A connection takes three sockets (its own and two for its monitor); ZeroMQ's default of 1023 is
exhausted at 341 workers."""

USES_PER_LOOK: Final = 64
"""Monitor events that may wait. A lost and remade connection produces two."""
_BOUND_SIDE: Final = b""
"""A connection's name for its one peer."""


class ZmqNetwork:
    """Makes links that share one I/O thread.

    Args:
      config: bounds and deadlines.
      curve_dir: key directory; every tcp link is authenticated and encrypted with its keys.
      is_plain: tcp links have neither. For KV in a trusted network, where each chunk has a MAC.

      Raises:
      ConfigError: the key directory cannot be used.
    """

    def __init__(
        self, config: LinkConfig, curve_dir: str | None = None, *, is_plain: bool = False
    ) -> None:
        self._config = config
        self._is_plain = is_plain
        self._repeats = Repeats()
        self._keys = KeyDirectory.load(Path(curve_dir)) if curve_dir is not None else None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._links: set[ZmqListener | ZmqConnection] = set()
        self._guard = None if self._keys is None else CurveGuard(self._context, self._keys)

    def listen(self, address: str, *, hwm: int, max_frame_bytes: int) -> ZmqListener:
        """Bind.

        Raises:
          ConfigError: the address is malformed, unsafe, in use, or not of this host.
        """
        place = parse_address(address)
        raw = self._new_socket(zmq.ROUTER, place, hwm, max_frame_bytes)
        keys = self._keys_for(place)
        try:
            raw.set(zmq.ROUTER_MANDATORY, 1)
            # The connection's id arrives first and takes a slot; with CURVE and only one slot,
            # nothing else would ever arrive.
            raw.set(zmq.RCVHWM, hwm + 1)
            if isinstance(place, IpcAddress):
                place.require_unused()
            if keys is not None:
                raw.set(zmq.CURVE_SERVER, 1)
            _bind(raw, str(place))
        except ConfigError:
            raw.close(0)
            raise
        if self._guard is not None and isinstance(place, TcpAddress):
            self._guard.watch(raw)
        listener = ZmqListener(
            raw, max_frame_bytes, self._links.discard, is_authenticated=keys is not None
        )
        self._links.add(listener)
        return listener

    def connect(
        self, address: str, identity: bytes, *, hwm: int, max_frame_bytes: int
    ) -> ZmqConnection:
        """Connect, now or once the address is bound, and reconnect after each loss.

        Raises:
          ConfigError: the address is malformed or unsafe.
        """
        place = parse_address(address)
        raw = self._new_socket(zmq.DEALER, place, hwm, max_frame_bytes)
        # Without this, a message waits for a lost peer and reaches it after its restart.
        raw.set(zmq.IMMEDIATE, 1)
        keys = self._keys_for(place)
        if isinstance(place, TcpAddress) and keys is not None:
            raw.set(zmq.CURVE_SERVERKEY, keys.key_of(place))
        handshakes = HandshakeLog(place, keys, identity, self._repeats)
        connection = ZmqConnection(raw, handshakes, max_frame_bytes, self._links.discard)
        self._links.add(connection)
        try:
            raw.connect(str(place))
        except zmq.ZMQError as error:
            connection.close()
            raise ConfigError(f"cannot connect to {place}: {error}; check the address") from error
        return connection

    def close(self) -> None:
        """Close every link and the I/O thread. Idempotent."""
        for link in tuple(self._links):
            link.close()
        if self._guard is not None:
            self._guard.close()
        # Wait until sent messages have reached the kernel, at most as long as the sockets linger.
        self._context.term()

    def _new_socket(
        self, kind: int, place: IpcAddress | TcpAddress, hwm: int, max_frame_bytes: int
    ) -> zmq.Socket[bytes]:
        if isinstance(place, IpcAddress):
            place.require_private_directory()
        elif self._keys is None:
            raise keys_needed(str(place))
        raw = self._context.socket(kind)
        raw.set(zmq.LINGER, round(self._config.linger_s * 1000))
        raw.set(zmq.SNDHWM, hwm)
        raw.set(zmq.RCVHWM, hwm)
        raw.set(zmq.MAXMSGSIZE, max_frame_bytes)
        raw.set(zmq.HANDSHAKE_IVL, round(self._config.handshake_s * 1000))
        if isinstance(place, IpcAddress):
            raw.set(zmq.RECONNECT_IVL, round(self._config.local_reconnect_s * 1000))
        # ZeroMQ's own heartbeats stay off: if a connection breaks while its input waits for us, or
        # after another one has taken it over, their timer aborts the process (libzmq 4.3.5).
        if isinstance(place, TcpAddress):
            raw.set(zmq.IPV6, place.is_ipv6)
            raw.set(zmq.TCP_MAXRT, round(self._config.dead_host_s * 1000))
            raw.set(zmq.TCP_KEEPALIVE, 1)
            raw.set(zmq.TCP_KEEPALIVE_IDLE, 1)
            raw.set(zmq.TCP_KEEPALIVE_INTVL, 1)
            raw.set(zmq.TCP_KEEPALIVE_CNT, round(self._config.dead_host_s))
            keys = self._keys_for(place)
            if keys is not None:
                raw.set(zmq.CURVE_PUBLICKEY, keys.public)
                raw.set(zmq.CURVE_SECRETKEY, keys.secret)
        return raw

    def _keys_for(self, place: IpcAddress | TcpAddress) -> KeyDirectory | None:
        """Return the keys for a link to this address, or None if it carries none."""
        is_plain = self._is_plain or isinstance(place, IpcAddress)
        return None if is_plain else self._keys


def _bind(raw: zmq.Socket[bytes], address: str) -> None:
    try:
        raw.bind(address)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise address_in_use(address) from error
        raise ConfigError(
            f"cannot bind {address}: {error}; give a free address of this host"
        ) from error


class ZmqListener:
    """The bound side. See link.Listener."""

    def __init__(
        self,
        raw: zmq.Socket[bytes],
        max_frame_bytes: int,
        on_close: Callable[[ZmqListener], None],
        *,
        is_authenticated: bool,
    ) -> None:
        self._on_close = on_close
        self._address = raw.getsockopt_string(zmq.LAST_ENDPOINT)
        self._raw = raw
        self._socket = ZmqSocket(raw, copied_parts=2, has_user_ids=is_authenticated)
        self._is_authenticated = is_authenticated
        self._gate = BoundGate(max_frame_bytes, self._refuse)
        self._sent_frames = 0
        self._is_closed = False

    @property
    def address(self) -> str:
        """The address for peers."""
        return self._address

    async def receive_many(self, max_messages: int = 256) -> Sequence[LinkMessage]:
        """Wait for one message, then return all that are there."""
        while True:
            received = await self._socket.receive_many(max_messages)
            messages = [m for parts in received if (m := self._admit(parts)) is not None]
            if messages:
                return messages

    def send_nowait(
        self, to: bytes, frame: AnyFrame, payload: bytes | memoryview | None = None
    ) -> None:
        """Hand a frame to the peer's pipe."""
        parts = encode_message(frame, payload)
        try:
            self._socket.send_nowait([self._gate.connection_of(to), *parts])
        except trio.WouldBlock:
            raise PeerBusy(f"the pipe to {shown_identity(to)} is full") from None
        except trio.BrokenResourceError:
            raise PeerGone(f"{shown_identity(to)} is not connected") from None
        self._sent_frames += 1

    def statistics(self) -> LinkStatistics:
        """Return the counters."""
        return self._gate.statistics(self._sent_frames)

    def close(self) -> None:
        """Close the link and drop everything unsent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._raw.disable_monitor()
        self._socket.close()
        self._on_close(self)

    def _admit(self, parts: list[bytes | memoryview]) -> LinkMessage | None:
        if self._is_authenticated:
            user_id, connection, *rest = parts
            return self._gate.admit(bytes(connection), rest, bytes(user_id))
        connection, *rest = parts
        return self._gate.admit(bytes(connection), rest)

    def _refuse(self, connection: bytes, frame: Goodbye) -> None:
        with suppress(trio.WouldBlock, trio.BrokenResourceError):  # it has left or does not read
            self._socket.send_nowait([connection, *encode_message(frame, None)])


class ZmqConnection:
    """The connecting side. See link.Connection."""

    def __init__(
        self,
        raw: zmq.Socket[bytes],
        handshakes: HandshakeLog,
        max_frame_bytes: int,
        on_close: Callable[[ZmqConnection], None],
    ) -> None:
        self._on_close = on_close
        self._address = handshakes.address
        self._raw = raw
        self._handshakes = handshakes
        self._monitor = raw.get_monitor_socket(WATCHED_EVENTS)
        self._monitor_fd = int(self._monitor.get(zmq.FD))
        self._told_breaks = 0
        self._is_watched = False
        self._socket = ZmqSocket(raw, copied_parts=1)
        self._gate = FrameGate(max_frame_bytes, self._note_events)
        self._sent_frames = 0
        self._uses = 0
        self._is_closed = False

    @property
    def trouble(self) -> str:
        """Why there is no connection, as far as the handshake shows it."""
        self._note_events()
        return self._handshakes.trouble

    async def receive_many(self, max_messages: int = 256) -> Sequence[LinkMessage]:
        """Wait for one message, then return all that are there."""
        while True:
            received = await self._socket.receive_many(max_messages)
            self._note_events_at_times()
            messages = [
                message
                for parts in received
                if (message := self._gate.admit(_BOUND_SIDE, parts)) is not None
            ]
            if messages:
                return messages

    async def send(self, frame: AnyFrame, payload: bytes | memoryview | None = None) -> None:
        """Wait until connected and until the pipe has room, then hand the frame over."""
        parts = encode_message(frame, payload)
        self._note_events()
        self._require_trust()
        await self._socket.send(parts)
        self._sent_frames += 1

    def send_nowait(
        self, frame: AnyFrame, payload: bytes | memoryview | None = None
    ) -> Hold | None:
        """Hand a frame to the pipe."""
        parts = encode_message(frame, payload)
        self._note_events_at_times()
        self._require_trust()
        try:
            hold = self._socket.send_nowait(parts)
        except trio.WouldBlock:
            self._note_events()
            if self._handshakes.is_connected:
                raise PeerBusy(f"the pipe to {self._address} is full") from None
            raise PeerGone(f"{self._address} is not connected") from None
        self._sent_frames += 1
        return None if payload is None else hold

    async def wait_broken(self) -> None:
        """Return once the connection has broken since the last call."""
        await trio.lowlevel.checkpoint()
        self._note_events()
        while self._handshakes.num_breaks == self._told_breaks:
            if self._is_closed:
                raise trio.ClosedResourceError("this connection was closed")
            # The descriptor is edge-triggered: another task that reads the monitor takes the edge
            # and wakes this one instead.
            self._is_watched = True
            try:
                with suppress(trio.ClosedResourceError):
                    await trio.lowlevel.wait_readable(self._monitor_fd)
            finally:
                self._is_watched = False
            self._note_events()
        self._told_breaks = self._handshakes.num_breaks

    def statistics(self) -> LinkStatistics:
        """Return the counters."""
        return LinkStatistics(self._sent_frames, self._gate.received_frames, self._gate.bad_frames)

    def close(self) -> None:
        """Close the link and drop everything unsent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wake_watcher()
        # In this order: without a reader the monitor would block the I/O thread, and an open
        # monitor keeps the context from terminating.
        self._raw.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._on_close(self)

    def _require_trust(self) -> None:
        if self._gate.is_shut_out(_BOUND_SIDE):
            raise PeerGone(f"{self._address} was cut off: it sent invalid frames")

    def _note_events_at_times(self) -> None:
        """Read monitor events before many can queue up, or when a cut-off may have ended. Each
        check costs several times as much as a frame."""
        self._uses += 1
        if self._uses % USES_PER_LOOK == 0 or self._gate.is_shut_out(_BOUND_SIDE):
            self._note_events()

    def _note_events(self) -> None:
        """Read the monitor's events since the last call."""
        if self._is_closed:
            return
        # Check first: this costs a third of a failing read.
        while int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            said = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            self._handshakes.note(said["event"], said["value"])
            if self._handshakes.is_connected:
                self._gate.forgive(_BOUND_SIDE)
        if self._handshakes.num_breaks != self._told_breaks:
            self._wake_watcher()

    def _wake_watcher(self) -> None:
        if self._is_watched:
            trio.lowlevel.notify_closing(self._monitor_fd)

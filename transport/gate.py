"""Access control for the frames of a link: which connection may send as which peer.

The bound side gives each connection an id, so that connections cannot impersonate one another. A
peer claims a name in HELLO, and its latest connection with that name is used. A name belongs to the
CURVE key that claimed it first, and a key may act only in its roles. Links without keys are
protected by a directory of mode 0700. Connections that send bad frames are cut off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Self

import structlog

from triolet.ids import PeerId, Role, shown_identity

from .codec import MAX_REMEMBERED_SENDERS, FrameGate
from .frames import Hello
from .handshake import goodbye
from .link import LinkMessage, LinkStatistics, PeerGone

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triolet.ids import PeerId

    from .frames import Goodbye


STRANGER: Final = b"?"
"""Prefix of a connection's name before its HELLO; no peer's name starts with it."""
MAX_NAMES: Final = 2048
"""Names that one key may claim; beyond this, the key's oldest name is forgotten. Twice `max_peers`,
because a restarted peer has a new name."""


class Credential(NamedTuple):
    """What a connection's handshake proved.

    Attributes:
      key: public key of the other side; empty where links carry no keys.
      roles: roles that it may claim in HELLO.
    """

    key: str
    roles: frozenset[Role]

    @classmethod
    def parse(cls, user_id: bytes) -> Self:
        """Parse a `user_id`; an empty one means that links carry no keys."""
        if not user_id:
            return cls("", frozenset(Role))
        key, _, roles = user_id.decode().partition(" ")
        return cls(key, frozenset(Role(role) for role in roles.split(",")))

    @property
    def user_id(self) -> bytes:
        """The credential as one word, which ZeroMQ attaches to each message."""
        return f"{self.key} {','.join(sorted(self.roles))}".encode()


class _Claim(NamedTuple):
    connection: bytes
    key: str


class PeerNames:
    """The names of one listener's peers."""

    def __init__(self) -> None:
        self._claims: dict[bytes, _Claim] = {}
        self._name_of: dict[bytes, bytes] = {}
        self._names_of_key: dict[str, dict[bytes, None]] = {}

    def sender(self, connection: bytes) -> bytes:
        """Return the name of the peer on a connection."""
        return self._name_of.get(connection) or STRANGER + connection

    def connection(self, sender: bytes) -> bytes | None:
        """Return the connection of a sender, or None."""
        if sender.startswith(STRANGER):
            return sender.removeprefix(STRANGER)
        claim = self._claims.get(sender)
        return None if claim is None else claim.connection

    def claim(self, connection: bytes, peer: PeerId, credential: Credential) -> str:
        """Process a HELLO. Return why it is refused, or an empty text if it is accepted.

        The name moves here from any other connection of the same key.
        """
        name = peer.identity()
        held = self._claims.get(name)
        if peer.role not in credential.roles:
            allowed = ", ".join(sorted(credential.roles))
            return f"the key {credential.key[:8]}… may not act as a {peer.role}, only as: {allowed}"
        if held is not None and held.key != credential.key:
            return f"the name {peer.name} belongs to another key than {credential.key[:8]}…"
        if held is not None:
            self._name_of.pop(held.connection, None)
        earlier = self._name_of.get(connection)
        if earlier is not None:
            self._forget(earlier)
        self._claims[name] = _Claim(connection, credential.key)
        self._name_of[connection] = name
        names = self._names_of_key.setdefault(credential.key, {})
        names[name] = None
        if len(names) > MAX_NAMES:
            self._forget(next(iter(names)))
        return ""

    def _forget(self, name: bytes) -> None:
        claim = self._claims.pop(name)
        self._name_of.pop(claim.connection, None)
        names = self._names_of_key[claim.key]
        del names[name]
        if not names:
            del self._names_of_key[claim.key]


log = structlog.get_logger()


class BoundGate:
    """The gate of a bound side, where peers are known by name.

    Args:
      max_frame_bytes: largest frame allowed.
      answer: sends a frame over a connection.
    """

    def __init__(self, max_frame_bytes: int, answer: Callable[[bytes, Goodbye], None]) -> None:
        self.frames = FrameGate(max_frame_bytes)
        self._answer = answer
        self._names = PeerNames()
        self._refused: dict[bytes, str] = {}

    def admit(
        self, connection: bytes, parts: Sequence[bytes | memoryview], user_id: bytes = b""
    ) -> LinkMessage | None:
        """Return the message with its sender's name, or None if it is dropped.

        Args:
          connection: the connection that it came on.
          parts: parts of the message.
          user_id: what the connection's handshake proved, see `Credential`.
        """
        message = self.frames.admit(connection, parts)
        if message is None:
            return None
        if isinstance(message.frame, Hello):
            peer = message.frame.peer.peer_id
            objection = self._names.claim(connection, peer, Credential.parse(user_id))
            if objection:
                self._refuse(connection, peer, objection)
                return None
            self._refused.pop(peer.identity(), None)
        return LinkMessage(self._names.sender(connection), message.frame, message.payload)

    def _refuse(self, connection: bytes, peer: PeerId, objection: str) -> None:
        self.frames.blame(connection)
        self._answer(connection, goodbye(objection))
        # One line for a peer that is refused repeatedly for the same reason.
        if self._refused.pop(peer.identity(), None) != objection:
            log.warning("hello_refused", name=peer.name, role=peer.role, reason=objection)
        if len(self._refused) >= MAX_REMEMBERED_SENDERS:
            del self._refused[next(iter(self._refused))]
        self._refused[peer.identity()] = objection

    def connection_of(self, sender: bytes) -> bytes:
        """Return the connection of a sender.

        Raises:
          PeerGone: there is none, or it was cut off.
        """
        connection = self._names.connection(sender)
        if connection is None:
            raise PeerGone(f"{shown_identity(sender)} is not connected")
        if self.frames.is_shut_out(connection):
            raise PeerGone(f"{shown_identity(sender)} was cut off: it sent invalid frames")
        return connection

    def statistics(self, sent_frames: int) -> LinkStatistics:
        """Return the counters."""
        return LinkStatistics(sent_frames, self.frames.received_frames, self.frames.bad_frames)

"""The peers of one listener: who has said HELLO, and when each was last heard.

Knows greetings and silence; does not know what peers talk about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from transport.frames import Welcome
from transport.handshake import answer_hello, goodbye

if TYPE_CHECKING:
    from collections.abc import Callable

    from transport.frames import AnyFrame, Goodbye, Hello
    from triolet.ids import PeerId, Role

    from .identity import Identity


class _Known(NamedTuple):
    peer: PeerId
    heard_at: float


class PeerTable:
    """Who may be listened to.

    Args:
      identity: who answers.
      expected: the role that connects here.
      silence_s: a peer that says nothing for this long is forgotten.
      max_peers: at this many a new HELLO is turned away.
      send: takes a routing id and a frame.
      welcome: has the last word on a peer that may come in.
    """

    def __init__(
        self,
        identity: Identity,
        expected: Role,
        *,
        silence_s: float,
        max_peers: int,
        send: Callable[[bytes, AnyFrame], None],
        welcome: Callable[[bytes, Hello, Welcome], Welcome | Goodbye] = lambda _s, _h, plain: plain,
    ) -> None:
        self._identity = identity
        self._expected = expected
        self._silence_s = silence_s
        self._max_peers = max_peers
        self._send = send
        self._welcome = welcome
        self._known: dict[bytes, _Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, sender: bytes) -> bool:
        return sender in self._known

    def known(self) -> list[tuple[bytes, PeerId]]:
        """Return routing id and name of every peer."""
        return [(sender, known.peer) for sender, known in self._known.items()]

    def greet(self, sender: bytes, hello: Hello, now: float) -> bool:
        """Answer a HELLO; return whether the peer was welcomed."""
        answer = answer_hello(
            hello,
            me=self._identity.me,
            expected=(self._expected,),
            fingerprint=self._identity.fingerprint,
            capacity=self._identity.capacity,
            kv_address=self._identity.kv_address,
        )
        if isinstance(answer, Welcome):
            if sender in self._known or len(self._known) < self._max_peers:
                answer = self._welcome(sender, hello, answer)
            else:
                answer = goodbye(f"{self._identity.me} knows {self._max_peers} peers already")
        if isinstance(answer, Welcome):
            self._known[sender] = _Known(hello.peer.peer_id, now)
        self._send(sender, answer)
        return isinstance(answer, Welcome)

    def hear(self, sender: bytes, now: float) -> PeerId | None:
        """Return who sent this, or None after telling a stranger to say HELLO first."""
        known = self._known.get(sender)
        if known is None:
            self._send(sender, goodbye(f"{self._identity.me} does not know you: say HELLO"))
            return None
        self._known[sender] = _Known(known.peer, now)
        return known.peer

    def forget(self, sender: bytes) -> PeerId | None:
        """Drop a peer that said GOODBYE or whose pipe is gone; return who it was if known."""
        known = self._known.pop(sender, None)
        return None if known is None else known.peer

    def excuse(self, absence_s: float) -> None:
        """Take back time in which this worker did not listen."""
        for sender, known in self._known.items():
            self._known[sender] = _Known(known.peer, known.heard_at + absence_s)

    def forget_silent(self, now: float) -> None:
        """Drop peers that were not heard for too long."""
        silent = [s for s, k in self._known.items() if now - k.heard_at > self._silence_s]
        for sender in silent:
            self.forget(sender)

    def dismiss(self, reason: str) -> None:
        """Say GOODBYE to all and forget them."""
        for sender in tuple(self._known):
            self._send(sender, goodbye(reason, is_farewell=True))
            self.forget(sender)

"""What a decode worker makes of a prefill worker's offer to read KV in its memory.

Knows the operator's wish and what came of looking; does not know how memory is found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import structlog

from transport.handshake import goodbye
from transport.shared_ring import NotSharedError
from triolet.config_wire import MemorySharing

if TYPE_CHECKING:
    from collections.abc import Collection

    from transport.frames import Goodbye, Hello, SharedRange, Welcome
    from transport.shared_ring import PeerRings

log = structlog.get_logger()


class Sharing:
    """The rings of senders that are read here.

    Args:
      rings: finds and keeps them; None where there are none.
      mode: whether that is wanted.
    """

    def __init__(self, rings: PeerRings | None, mode: MemorySharing) -> None:
        self._rings = None if mode is MemorySharing.OFF else rings
        self._mode = mode

    def welcome(self, sender: bytes, hello: Hello, welcome: Welcome) -> Welcome | Goodbye:
        """Return the answer to a sender that may come in, with what became of its offer.

        Returns:
          A GOODBYE where only shared memory will do and this is none.
        """
        why = self._attach(sender, hello)
        name = hello.peer.name
        if why is None:
            log.info("kv_path", sender=name, path="memory", why="its ring is mapped here")
            return msgspec.structs.replace(welcome, shares_ring=True)
        if self._mode is MemorySharing.ON:
            me = welcome.peer.peer_id
            return goodbye(f"{me} takes KV out of shared memory only (share_kv_memory), but {why}")
        log.info("kv_path", sender=name, path="socket", why=why)
        return welcome

    def read(self, sender: bytes, where: SharedRange) -> memoryview | None:
        """Return a copy of bytes of a sender's ring. See PeerRings.read."""
        return None if self._rings is None else self._rings.read(sender, where)

    def keep_only(self, senders: Collection[bytes]) -> None:
        """Let go of the rings of everybody else, and of the dead."""
        if self._rings is not None:
            self._rings.keep_only(senders)

    def _attach(self, sender: bytes, hello: Hello) -> str | None:
        """Map what a HELLO offers; return why not, or None."""
        if self._rings is None:
            return "share_kv_memory is off here"
        if hello.ring is None:
            self._rings.detach(sender)
            return "it offers no memory: off there, or its system has none"
        try:
            self._rings.attach(sender, hello.ring)
        except NotSharedError as error:
            return str(error)
        return None

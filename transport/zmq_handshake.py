"""What ZeroMQ says of one connection's handshakes, in words: which peer failed, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
import zmq

from .address import TcpAddress
from .zmq_curve import Repeats

if TYPE_CHECKING:
    from .address import Address
    from .zmq_curve import KeyDirectory

log = structlog.get_logger()

WATCHED_EVENTS: Final = int(
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)
"""Of a connection."""


class HandshakeLog:
    """The handshakes of one connection.

    Args:
      place: where it leads.
      keys: ours; None where the link carries none.
      identity: of the connecting side.

    Attributes:
      address: the same place, for people.
      is_connected: whether the last handshake succeeded and the connection holds.
      trouble: why there is none, and what to do; empty if there is one or nothing is known.
    """

    def __init__(self, place: Address, keys: KeyDirectory | None, identity: bytes) -> None:
        self.address = str(place)
        self.is_connected = False
        self.trouble = ""
        self._place = place
        self._keys = keys
        self._who = identity.decode(errors="replace").rpartition(":")[0]
        self._repeats = Repeats()

    def note(self, event: int, value: int) -> None:
        """Take in what a monitor said."""
        self.is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self.is_connected:
            self.trouble = ""
        elif event != zmq.EVENT_DISCONNECTED and isinstance(self._place, TcpAddress):
            self.trouble = self._explain(event, value)
            num_kept = self._repeats.due(self.trouble)
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
                "expects keys, and this side has none for it: --kv-plaintext belongs to both sides "
                "of a KV link, or to neither"
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
            return "has no keys: start it with --curve; --kv-plaintext belongs to both sides"
        return (
            f"ends the handshake: it may have another key than {source}, or none. Copy the "
            f"key.public of that process to {ours.bound_file(self._place)}, and see its log"
        )

"""Flow-control windows: how much may be under way before the other side has to say yes.

Small counters without I/O. ByteWindow bounds KV bytes between prefill and decode, TokenWindow how
far a stream may run ahead of its reader.
"""

from __future__ import annotations

from triolet.errors import LocalProtocolError, RemoteProtocolError


class ByteWindow:
    """Bytes under way to one receiver.

    The sender keeps one to know what it may send; a receiver may keep its twin to catch a sender
    that takes more than it was given. What is larger than the whole window may go when nothing else
    is under way: one block of a large model must not wait for ever.
    """

    def __init__(self, size_bytes: int) -> None:
        if size_bytes < 1:
            raise LocalProtocolError(f"a window of {size_bytes} bytes lets nothing through")
        self._size_bytes = size_bytes
        self._used_bytes = 0

    @property
    def size_bytes(self) -> int:
        """What may be under way in all."""
        return self._size_bytes

    @property
    def used_bytes(self) -> int:
        """Sent and not yet given back."""
        return self._used_bytes

    @property
    def available_bytes(self) -> int:
        """What may still be sent; 0 also while one oversized message is under way."""
        return max(0, self._size_bytes - self._used_bytes)

    def has_room(self, num_bytes: int) -> bool:
        """Return whether `try_consume` would take that much."""
        return not self._used_bytes or self._used_bytes + num_bytes <= self._size_bytes

    def try_consume(self, num_bytes: int) -> bool:
        """Take room for a message if there is room.

        Raises:
          LocalProtocolError: a negative size.
        """
        if num_bytes < 0:
            raise LocalProtocolError(f"cannot send {num_bytes} bytes")
        if not self.has_room(num_bytes):
            return False
        self._used_bytes += num_bytes
        return True

    def release(self, num_bytes: int) -> None:
        """Give room back.

        Raises:
          RemoteProtocolError: more than is under way. Nothing has changed.
        """
        if not 0 <= num_bytes <= self._used_bytes:
            raise RemoteProtocolError(
                f"credit for {num_bytes} bytes while {self._used_bytes} are under way"
            )
        self._used_bytes -= num_bytes


class TokenWindow:
    """How many completion tokens a stream may have. Absolute and only ever rising, so that a lost,
    repeated or reordered grant does no harm."""

    def __init__(self, allowed: int) -> None:
        if allowed < 0:
            raise RemoteProtocolError(f"a stream cannot be allowed {allowed} tokens")
        self._allowed = allowed

    @property
    def allowed(self) -> int:
        """Positions below this one may be produced."""
        return self._allowed

    def grant(self, allowed: int) -> bool:
        """Take in a grant; return whether it raised the bound."""
        is_raised = allowed > self._allowed
        self._allowed = max(self._allowed, allowed)
        return is_raised

    def may_produce(self, position: int) -> bool:
        """Whether the token at this completion position may be produced now."""
        return position < self._allowed

"""Flow-control windows: counters that limit unacknowledged data in flight. No I/O.

ByteWindow limits KV bytes between prefill and decode. TokenWindow limits how far a stream may run
ahead of its reader.
"""

from __future__ import annotations

from triolet.errors import LocalProtocolError, RemoteProtocolError


class ByteWindow:
    """Bytes under way to one receiver.

    The sender uses it to know what it may send; a receiver may keep a twin to catch a sender that
    exceeds its window. A message larger than the whole window may go when nothing else is under
    way: otherwise one block of a large model would wait forever.
    """

    def __init__(self, size_bytes: int) -> None:
        if size_bytes < 1:
            raise LocalProtocolError(f"a window of {size_bytes} bytes lets nothing through")
        self._size_bytes = size_bytes
        self._used_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Size of the whole window."""
        return self._size_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes sent and not yet given back."""
        return self._used_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes that may be sent now; 0 while an oversized message is under way."""
        return max(0, self._size_bytes - self._used_bytes)

    def has_room(self, num_bytes: int) -> bool:
        """Return whether `try_consume` would succeed."""
        return not self._used_bytes or self._used_bytes + num_bytes <= self._size_bytes

    def try_consume(self, num_bytes: int) -> bool:
        """Reserve room for a message if there is enough.

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
          RemoteProtocolError: the amount is more than is under way. Nothing changes.
        """
        if not 0 <= num_bytes <= self._used_bytes:
            raise RemoteProtocolError(
                f"credit for {num_bytes} bytes while {self._used_bytes} are under way"
            )
        self._used_bytes -= num_bytes


class TokenWindow:
    """How many completion tokens a stream may have. Absolute and only rising, so a lost, repeated
    or reordered grant does no harm."""

    def __init__(self, allowed: int) -> None:
        if allowed < 0:
            raise RemoteProtocolError(f"a stream cannot be granted {allowed} tokens")
        self._allowed = allowed

    @property
    def allowed(self) -> int:
        """Positions below this may be generated."""
        return self._allowed

    def grant(self, allowed: int) -> bool:
        """Apply a grant; return whether it raised the limit."""
        is_raised = allowed > self._allowed
        self._allowed = max(self._allowed, allowed)
        return is_raised

    def may_produce(self, position: int) -> bool:
        """Return whether the token at this completion position may be generated now."""
        return position < self._allowed

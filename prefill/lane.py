"""Everything under way to one decode worker, within the byte window that it granted.

Knows chunks, the window and time; does not know pools or connections. What the receiver does not
answer is sent again; what it answers twice counts once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from transport.window import ByteWindow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transport.frames import KvChunk, KvManifest
    from triolet.config import LinkConfig
    from triolet.ids import AttemptKey

    from .transfer import Chunk, Transfer

Outgoing: TypeAlias = "tuple[KvChunk | KvManifest, bytes | memoryview | None]"


class InFlight(NamedTuple):
    """Window that a sent chunk holds until it is answered."""

    num_bytes: int
    sent_at: float


class Lane:
    """One target's transfers and window.

    Attributes:
      transfers: in the order in which they began.
      window: what the receiver lets be under way; None until it has said so.
    """

    def __init__(self, link: LinkConfig, ring: ByteWindow, now: float) -> None:
        self.transfers: dict[AttemptKey, Transfer] = {}
        self.window: ByteWindow | None = None
        self._link = link
        self._ring = ring
        self._last_heard = now
        # An attempt that ended keeps its entries until they are answered: its bytes are on the
        # wire all the same.
        self._in_flight: dict[tuple[AttemptKey, int], InFlight] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way or to come."""
        return not self.transfers and not self._in_flight

    def begin(self, transfer: Transfer, now: float) -> None:
        """Add a transfer."""
        if self.is_idle:
            self._last_heard = now
        self.transfers[transfer.key] = transfer

    def open(self, window_bytes: int, now: float) -> None:
        """Note the receiver's window: it may be sent to."""
        if self.window is None:
            self.window = ByteWindow(window_bytes)
        self._last_heard = now

    def send_ready(self, now: float) -> Iterator[Outgoing]:
        """Yield what may be sent now: new chunks, unanswered ones again, manifests."""
        if self.window is None:
            return
        is_blocked = False
        for transfer in self.transfers.values():
            for chunk in transfer.chunks.values():
                if chunk.sent_at is None:
                    # In order: a small chunk that overtook a large one could do so for ever.
                    is_blocked = is_blocked or not self.window.try_consume(len(chunk.payload))
                    if is_blocked:
                        continue
                elif not self._is_overdue(chunk.sent_at, now):
                    continue
                self._note_sent(transfer.key, chunk, now)
                yield chunk.frame, chunk.payload
            sent_at = transfer.manifest_sent_at
            if transfer.is_all_sent and (sent_at is None or self._is_overdue(sent_at, now)):
                self._note_busy(now)
                transfer.manifest_sent_at = now
                yield transfer.manifest(), None

    def on_credit(self, key: AttemptKey, index: int, now: float) -> None:
        """A chunk was taken. Idempotent: what is not under way gives nothing back."""
        self._last_heard = now
        self._settle(key, index)

    def on_resend(self, key: AttemptKey, indices: tuple[int, ...], now: float) -> None:
        """Chunks came damaged: they are not under way any more and go out again."""
        self._last_heard = now
        for index in indices:
            self._settle(key, index, send_again=True)

    def on_done(self, key: AttemptKey, now: float) -> None:
        """The receiver wants nothing more of this attempt."""
        self._last_heard = now
        self.forget(key)
        self._settle_all(key)

    def forget(self, key: AttemptKey) -> None:
        """End a transfer from this side. What is on the wire counts until it is answered."""
        transfer = self.transfers.pop(key, None)
        if transfer is not None:
            unsent = (c for c in transfer.chunks.values() if c.sent_at is None)
            self._ring.release(sum(len(chunk.payload) for chunk in unsent))

    def close(self) -> None:
        """Give everything back: the link is gone."""
        for key in tuple(self.transfers):
            self.forget(key)
        for key, index in tuple(self._in_flight):
            self._settle(key, index)

    def write_off(self, now: float) -> None:
        """Take back the window of ended attempts whose answer is overdue: the frame or its credit
        was lost, and nobody will send it again."""
        for (key, index), item in tuple(self._in_flight.items()):
            if key not in self.transfers and now - item.sent_at > self._link.kv_stall_s:
                self._settle(key, index)

    def excuse(self, absence_s: float) -> None:
        """Take back time in which nobody listened for answers."""
        self._last_heard += absence_s

    def is_stalled(self, now: float) -> bool:
        """Return whether the receiver owes an answer for too long."""
        is_dialling = self.window is None and bool(self.transfers)
        is_waiting = is_dialling or self._is_unanswered()
        return is_waiting and now - self._last_heard > self._link.kv_stall_s

    def check_invariants(self) -> int:
        """Assert that counts agree with contents; return the ring bytes that this lane uses."""
        in_flight_bytes = sum(item.num_bytes for item in self._in_flight.values())
        used_bytes = 0 if self.window is None else self.window.used_bytes
        assert in_flight_bytes == used_bytes, "the window's count drifted"
        unsent = 0
        for transfer in self.transfers.values():
            for index, chunk in transfer.chunks.items():
                is_in_flight = (transfer.key, index) in self._in_flight
                assert is_in_flight == (chunk.sent_at is not None), "a chunk is half sent"
                unsent += 0 if is_in_flight else len(chunk.payload)
        return unsent + in_flight_bytes

    def _is_overdue(self, sent_at: float, now: float) -> bool:
        return now - sent_at > self._link.kv_retry_s

    def _is_unanswered(self) -> bool:
        return bool(self._in_flight) or any(
            transfer.manifest_sent_at is not None for transfer in self.transfers.values()
        )

    def _note_busy(self, now: float) -> None:
        if not self._is_unanswered():
            self._last_heard = now

    def _note_sent(self, key: AttemptKey, chunk: Chunk, now: float) -> None:
        self._note_busy(now)
        num_bytes = len(chunk.payload)
        self._in_flight[key, chunk.frame.index] = InFlight(num_bytes, now)
        chunk.sent_at = now

    def _settle(self, key: AttemptKey, index: int, *, send_again: bool = False) -> None:
        item = self._in_flight.pop((key, index), None)
        if item is None or self.window is None:
            return
        self.window.release(item.num_bytes)
        transfer = self.transfers.get(key)
        if transfer is not None and send_again:
            transfer.chunks[index].sent_at = None
            return
        self._ring.release(item.num_bytes)
        if transfer is not None:
            del transfer.chunks[index]

    def _settle_all(self, key: AttemptKey) -> None:
        for owner, index in tuple(self._in_flight):
            if owner == key:
                self._settle(owner, index)

"""Everything under way to one decode worker, within the byte window that it granted.

Knows chunks, the window and time; does not know pools or connections. What the receiver does not
answer is sent again; what it answers twice counts once.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from transport.window import ByteWindow

from .under_way import UnderWay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transport.frames import KvChunk, KvManifest
    from triolet.config import LinkConfig
    from triolet.ids import AttemptKey

    from .ring import Ring, Slot
    from .transfer import Chunk, Transfer

Outgoing: TypeAlias = "tuple[KvChunk | KvManifest, Slot | None]"


class Lane:
    """One target's transfers and window.

    Attributes:
      transfers: in the order in which they began.
      under_way: what the receiver has not answered yet.
    """

    def __init__(self, link: LinkConfig, ring: Ring, now: float) -> None:
        self.transfers: dict[AttemptKey, Transfer] = {}
        self._link = link
        self._ring = ring
        self._last_heard = now
        self.under_way = UnderWay()
        # In the order in which they go; those of ended attempts are passed over.
        self._unsent: deque[tuple[Transfer, Chunk]] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way or to come."""
        return not self.transfers and not self.under_way

    def begin(self, transfer: Transfer, now: float) -> None:
        """Add a transfer."""
        if self.is_idle:
            self._last_heard = now
        self.transfers[transfer.key] = transfer

    def open(self, window_bytes: int, now: float) -> None:
        """Note the receiver's window: it may be sent to."""
        if self.under_way.window is None:
            self.under_way.window = ByteWindow(window_bytes)
        self._last_heard = now

    def send(
        self, now: float, export: Callable[[], tuple[Transfer, Chunk] | None]
    ) -> Iterator[Outgoing]:
        """Yield everything that may be sent now.

        Args:
          now: the time.
          export: makes the next chunk of this lane, if there is one and room for it. Exports run
            ahead of the window, so that the pool's blocks are free early.
        """
        yield from self._overdue(now)
        yield from self._ready(now)
        while (exported := export()) is not None:
            self._unsent.append(exported)
            yield from self._ready(now)
        yield from self._manifests(now)

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
        for index in self.under_way.of(key):
            self._settle(key, index)

    def forget(self, key: AttemptKey) -> None:
        """End a transfer from this side. What is on the wire counts until it is answered."""
        transfer = self.transfers.pop(key, None)
        if transfer is not None:
            for chunk in transfer.chunks.values():
                if chunk.sent_at is None:
                    self._ring.give_back(chunk.slot)

    def close(self) -> None:
        """Give everything back: the link is gone."""
        for key in tuple(self.transfers):
            self.forget(key)
        for key, index in self.under_way.all():
            self._settle(key, index)

    def write_off(self, now: float) -> None:
        """Take back the window of ended attempts whose answer is overdue: the frame or its credit
        was lost, and nobody will send it again."""
        for key, index in self.under_way.unanswered(now, self._link.kv_stall_s):
            if key not in self.transfers:
                self._settle(key, index)

    def excuse(self, absence_s: float) -> None:
        """Take back time in which nobody listened for answers."""
        self._last_heard += absence_s

    def is_stalled(self, now: float) -> bool:
        """Return whether the receiver owes an answer for too long."""
        is_dialling = self.under_way.window is None and bool(self.transfers)
        is_waiting = is_dialling or self._is_unanswered()
        return is_waiting and now - self._last_heard > self._link.kv_stall_s

    def check_invariants(self) -> int:
        """Assert that counts agree with contents; return the ring bytes that this lane uses."""
        under_way_bytes = self.under_way.num_bytes
        window = self.under_way.window
        used_bytes = 0 if window is None else window.used_bytes
        assert under_way_bytes == used_bytes, "the window's count drifted"
        unsent_bytes = 0
        for transfer in self.transfers.values():
            unsent = [chunk for chunk in transfer.chunks.values() if chunk.sent_at is None]
            assert len(unsent) == transfer.num_unsent, "the count of unsent chunks drifted"
            unsent_bytes += sum(chunk.num_bytes for chunk in unsent)
            for index, chunk in transfer.chunks.items():
                is_under_way = (transfer.key, index) in self.under_way
                assert is_under_way == (chunk.sent_at is not None), "a chunk is half sent"
        return unsent_bytes + under_way_bytes

    def _overdue(self, now: float) -> Iterator[Outgoing]:
        """Send again what should have been answered by now."""
        for key, index in self.under_way.unanswered(now, self._link.kv_retry_s):
            transfer = self.transfers.get(key)
            if transfer is not None:
                chunk = transfer.chunks[index]
                self.under_way.note_sent(key, chunk, now)
                yield chunk.frame, chunk.slot

    def _ready(self, now: float) -> Iterator[Outgoing]:
        """Send in order: a small chunk that overtook a large one could do so for ever."""
        while self._unsent:
            transfer, chunk = self._unsent[0]
            is_wanted = self.transfers.get(transfer.key) is transfer
            if is_wanted:
                if not self.under_way.has_room(chunk.num_bytes):
                    return
                self._note_busy(now)
                self.under_way.send(transfer.key, chunk, now)
                transfer.num_unsent -= 1
            self._unsent.popleft()
            if is_wanted:
                yield chunk.frame, chunk.slot

    def _manifests(self, now: float) -> Iterator[Outgoing]:
        """Say behind the last chunk that nothing follows, and again when that is overdue."""
        if self.under_way.window is None:
            return
        for transfer in self.transfers.values():
            sent_at = transfer.manifest_sent_at
            is_due = sent_at is None or now - sent_at > self._link.kv_retry_s
            if is_due and transfer.is_all_sent:
                self._note_busy(now)
                transfer.manifest_sent_at = now
                yield transfer.manifest(), None

    def _is_unanswered(self) -> bool:
        return bool(self.under_way) or any(
            transfer.manifest_sent_at is not None for transfer in self.transfers.values()
        )

    def _note_busy(self, now: float) -> None:
        if not self._is_unanswered():
            self._last_heard = now

    def _settle(self, key: AttemptKey, index: int, *, send_again: bool = False) -> None:
        slot = self.under_way.settle(key, index)
        if slot is None:
            return
        transfer = self.transfers.get(key)
        if transfer is None:
            self._ring.give_back(slot)
        elif send_again:
            chunk = transfer.chunks[index]
            chunk.sent_at = None
            transfer.num_unsent += 1
            self._unsent.appendleft((transfer, chunk))
        else:
            self._ring.give_back(slot)
            del transfer.chunks[index]

"""All KV transfers of one prefill worker: which chunk to send next to which decode worker within
its window, and what to do when a chunk is acknowledged, lost or late. No sockets.

Open it when KV does not arrive. transfer.py has the state of one transfer, links.py the
connections.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from transport.digest import RunningDigest
from transport.window import ByteWindow
from triolet.audit import WindowsAudit
from worker.account import verdict_of

from .ring import SlotRing
from .transfer import Frames, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transport.frames import KvChunk, KvCredit, KvManifest, KvResend, KvTarget, TokenRow
    from triolet.config import LinkConfig
    from triolet.ids import AttemptKey

    from .ring import RingSlot
    from .transfer import TransferChunk


class Sent(NamedTuple):
    """A chunk that is not acknowledged yet."""

    slot: RingSlot
    sent_at: float


class InFlightWindow:
    """Chunks on the wire to one receiver.

    Attributes:
      window: the receiver's window; None until it has announced it.
    """

    def __init__(self) -> None:
        self.window: ByteWindow | None = None
        # Entries of an ended attempt stay until they are acknowledged: its bytes are still on the
        # wire.
        self._sent: dict[tuple[AttemptKey, int], Sent] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def __contains__(self, chunk: tuple[AttemptKey, int]) -> bool:
        return chunk in self._sent

    @property
    def num_bytes(self) -> int:
        """Bytes of all payloads."""
        return sum(len(sent.slot.memory) for sent in self._sent.values())

    def has_room(self, num_bytes: int) -> bool:
        """Return whether this many bytes may be sent now."""
        return self.window is not None and self.window.has_room(num_bytes)

    def send(self, key: AttemptKey, chunk: TransferChunk, now: float) -> None:
        """Record that a chunk is sent, for which the window has room."""
        assert self.window is not None, "sent before the receiver said WELCOME"
        is_taken = self.window.try_consume(chunk.num_bytes)
        assert is_taken, "sent beyond the window"
        self.note_sent(key, chunk, now)

    def note_sent(self, key: AttemptKey, chunk: TransferChunk, now: float) -> None:
        """Record that a chunk is sent, maybe again."""
        self._sent[key, chunk.frame.index] = Sent(chunk.slot, now)
        chunk.sent_at = now

    def settle(self, key: AttemptKey, index: int) -> RingSlot | None:
        """Give a chunk's window back and return its slot; None if it is not on the wire."""
        sent = self._sent.pop((key, index), None)
        if sent is None:
            return None
        if self.window is not None:
            self.window.release(len(sent.slot.memory))
        return sent.slot

    def of(self, key: AttemptKey) -> list[int]:
        """Return the indices of one attempt's chunks."""
        return [index for owner, index in self._sent if owner == key]

    def unanswered(self, now: float, longer_than_s: float) -> list[tuple[AttemptKey, int]]:
        """Return chunks that were sent longer ago than this."""
        return [c for c, sent in self._sent.items() if now - sent.sent_at > longer_than_s]

    def all(self) -> list[tuple[AttemptKey, int]]:
        """Return all chunks on the wire."""
        return list(self._sent)


Outgoing: TypeAlias = "tuple[KvChunk | KvManifest, RingSlot | None]"


class PeerSender:
    """Transfers and window of one target.

    Attributes:
      transfers: transfers in order of their start.
      in_flight: chunks not acknowledged yet.
    """

    def __init__(self, link: LinkConfig, ring: SlotRing, now: float) -> None:
        self.transfers: dict[AttemptKey, Transfer] = {}
        self._link = link
        self._ring = ring
        self._last_heard = now
        self.in_flight = InFlightWindow()
        # In sending order; chunks of ended attempts are skipped.
        self._unsent: deque[tuple[Transfer, TransferChunk]] = deque()

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is under way or waiting."""
        return not self.transfers and not self.in_flight

    def begin(self, transfer: Transfer, now: float) -> None:
        """Add a transfer."""
        if self.is_idle:
            self._last_heard = now
        self.transfers[transfer.key] = transfer

    def open(self, window_bytes: int, now: float) -> None:
        """Record the receiver's window, so that sending may begin."""
        if self.in_flight.window is None:
            self.in_flight.window = ByteWindow(window_bytes)
        self._last_heard = now

    def send(
        self, now: float, export: Callable[[], tuple[Transfer, TransferChunk] | None]
    ) -> Iterator[Outgoing]:
        """Yield everything that may be sent now.

        Args:
          now: current time.
          export: exports the next chunk for this peer, if there is one and room for it. Exports run
            ahead of the window, so that the pool's blocks are freed early.
        """
        yield from self._overdue(now)
        yield from self._ready(now)
        while (exported := export()) is not None:
            self._unsent.append(exported)
            yield from self._ready(now)
        yield from self._manifests(now)

    def on_credit(self, key: AttemptKey, index: int, now: float) -> None:
        """Handle a credit for a chunk. Idempotent: unknown chunks give nothing back."""
        self._last_heard = now
        self._settle(key, index)

    def on_resend(self, key: AttemptKey, indices: tuple[int, ...], now: float) -> None:
        """Handle damaged chunks: they go out again."""
        self._last_heard = now
        for index in indices:
            self._settle(key, index, send_again=True)

    def on_done(self, key: AttemptKey, now: float) -> None:
        """Handle that the receiver wants nothing more of this attempt."""
        self._last_heard = now
        self.forget(key)
        for index in self.in_flight.of(key):
            self._settle(key, index)

    def forget(self, key: AttemptKey) -> None:
        """End a transfer from this side. Chunks on the wire count until they are acknowledged."""
        transfer = self.transfers.pop(key, None)
        if transfer is not None:
            for chunk in transfer.chunks.values():
                if chunk.sent_at is None:
                    self._ring.give_back(chunk.slot)

    def close(self) -> None:
        """Give everything back because the link is gone."""
        for key in tuple(self.transfers):
            self.forget(key)
        for key, index in self.in_flight.all():
            self._settle(key, index)

    def write_off(self, now: float) -> None:
        """Take back the window of ended attempts whose answer is overdue: the frame or its credit
        was lost and will not be sent again."""
        for key, index in self.in_flight.unanswered(now, self._link.kv_stall_s):
            if key not in self.transfers:
                self._settle(key, index)

    def excuse(self, absence_s: float) -> None:
        """Do not count time in which no answer could be received."""
        self._last_heard += absence_s

    def is_stalled(self, now: float) -> bool:
        """Return whether an answer of the receiver has been overdue for too long."""
        is_dialling = self.in_flight.window is None and bool(self.transfers)
        is_waiting = is_dialling or self._is_unanswered()
        return is_waiting and now - self._last_heard > self._link.kv_stall_s

    def check_invariants(self) -> int:
        """Assert that counters agree with contents; return the ring bytes in use."""
        in_flight_bytes = self.in_flight.num_bytes
        window = self.in_flight.window
        used_bytes = 0 if window is None else window.used_bytes
        assert in_flight_bytes == used_bytes, "the window's count drifted"
        unsent_bytes = 0
        for transfer in self.transfers.values():
            unsent = [chunk for chunk in transfer.chunks.values() if chunk.sent_at is None]
            assert len(unsent) == transfer.num_unsent, "the count of unsent chunks drifted"
            unsent_bytes += sum(chunk.num_bytes for chunk in unsent)
            for index, chunk in transfer.chunks.items():
                is_under_way = (transfer.key, index) in self.in_flight
                assert is_under_way == (chunk.sent_at is not None), "a chunk is half sent"
        return unsent_bytes + in_flight_bytes

    def _overdue(self, now: float) -> Iterator[Outgoing]:
        """Send overdue chunks again."""
        for key, index in self.in_flight.unanswered(now, self._link.kv_retry_s):
            transfer = self.transfers.get(key)
            if transfer is not None:
                chunk = transfer.chunks[index]
                self.in_flight.note_sent(key, chunk, now)
                yield chunk.frame, chunk.slot

    def _ready(self, now: float) -> Iterator[Outgoing]:
        """Send in order: otherwise small chunks could overtake a large one forever."""
        while self._unsent:
            transfer, chunk = self._unsent[0]
            is_wanted = self.transfers.get(transfer.key) is transfer
            if is_wanted:
                if not self.in_flight.has_room(chunk.num_bytes):
                    return
                self._note_busy(now)
                self.in_flight.send(transfer.key, chunk, now)
                transfer.num_unsent -= 1
            self._unsent.popleft()
            if is_wanted:
                yield chunk.frame, chunk.slot

    def _manifests(self, now: float) -> Iterator[Outgoing]:
        """Send the manifest after the last chunk, and again when its answer is overdue."""
        if self.in_flight.window is None:
            return
        for transfer in self.transfers.values():
            sent_at = transfer.manifest_sent_at
            is_due = sent_at is None or now - sent_at > self._link.kv_retry_s
            if is_due and transfer.is_all_sent:
                self._note_busy(now)
                transfer.manifest_sent_at = now
                yield transfer.manifest(), None

    def _is_unanswered(self) -> bool:
        return bool(self.in_flight) or any(
            transfer.manifest_sent_at is not None for transfer in self.transfers.values()
        )

    def _note_busy(self, now: float) -> None:
        if not self._is_unanswered():
            self._last_heard = now

    def _settle(self, key: AttemptKey, index: int, *, send_again: bool = False) -> None:
        slot = self.in_flight.settle(key, index)
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


class KvSend(NamedTuple):
    """A frame for one target's kv link."""

    target: KvTarget
    frame: KvChunk | KvManifest
    slot: RingSlot | None

    @property
    def payload(self) -> memoryview | None:
        """The frame's KV bytes."""
        return None if self.slot is None else self.slot.memory


class Shipper:
    """All transfers of one prefill worker.

    Args:
      link: chunk size and deadlines.
      memory: memory of the ring.
      bytes_per_block: on the wire.
      export: copies blocks of an attempt's sequence from the pool into a slot.

    Attributes:
      sent_bytes: payload bytes sent since the start, including repeats.
    """

    def __init__(
        self,
        link: LinkConfig,
        memory: memoryview,
        bytes_per_block: int,
        export: Callable[[AttemptKey, range, memoryview], None],
    ) -> None:
        self.sent_bytes = 0
        self._link = link
        self._export = export
        self._frames = Frames(link.kv_chunk_bytes, bytes_per_block)
        self._ring = SlotRing(memory)
        self._peer_senders: dict[KvTarget, PeerSender] = {}
        self._targets: dict[AttemptKey, KvTarget] = {}

    @property
    def is_full(self) -> bool:
        """Return whether the ring has no room for another chunk: compute nothing more until it
        drains."""
        return not self._ring.has_room(self._frames.bytes_of(range(self._frames.blocks_per_chunk)))

    @property
    def ring_bytes(self) -> int:
        """Exported bytes that have not been taken yet."""
        return self._ring.used_bytes

    @property
    def targets(self) -> tuple[KvTarget, ...]:
        """Targets with present or recent transfers."""
        return tuple(self._peer_senders)

    def is_idle(self, target: KvTarget) -> bool:
        """Return whether nothing is under way or waiting for a target."""
        peer_sender = self._peer_senders.get(target)
        return peer_sender is None or peer_sender.is_idle

    def begin(
        self,
        key: AttemptKey,
        target: KvTarget,
        *,
        num_blocks: int,
        num_tokens: int,
        held_blocks: int,
        now: float,
        kv_key: bytes = b"",
    ) -> None:
        """Open a transfer; nothing is sent before `open_peer`."""
        peer_sender = self._peer_senders.setdefault(target, PeerSender(self._link, self._ring, now))
        transfer = Transfer(
            key,
            target.peer.epoch,
            num_blocks,
            num_tokens,
            held_blocks,
            kv_key=kv_key if self._link.wire.plaintext else b"",
        )
        peer_sender.begin(transfer, now)
        self._targets[key] = target

    def computed(self, key: AttemptKey, num_blocks: int, first: TokenRow | None) -> None:
        """Record that the leading `num_blocks` of the sequence are final.

        Args:
          key: the attempt.
          num_blocks: counted from the start of the sequence.
          first: the first completion token, with the last blocks.
        """
        transfer = self._peer_senders[self._targets[key]].transfers[key]
        transfer.num_computed = num_blocks
        transfer.first = first

    def pump(self, now: float) -> Iterator[KvSend]:
        """Export and send what ring and windows allow.

        Yields:
          Frames for the links, in order; each as soon as it is ready, so that one chunk is on the
          wire while the next is exported.
        """
        for target, peer_sender in tuple(self._peer_senders.items()):
            for frame, slot in peer_sender.send(now, partial(self._export_next, peer_sender)):
                if slot is not None:
                    self.sent_bytes += len(slot.memory)
                yield KvSend(target, frame, slot)

    def exported(self) -> list[AttemptKey]:
        """Return the attempts whose blocks in the pool have become unnecessary since the last
        call."""
        keys = []
        for peer_sender in self._peer_senders.values():
            for key, transfer in peer_sender.transfers.items():
                if transfer.is_exported and not transfer.is_released:
                    transfer.is_released = True
                    keys.append(key)
        return keys

    def open_peer(self, target: KvTarget, window_bytes: int, now: float) -> None:
        """Handle WELCOME: the receiver may be sent to."""
        peer_sender = self._peer_senders.get(target)
        if peer_sender is not None:
            peer_sender.open(window_bytes, now)

    def close_lane(self, target: KvTarget) -> tuple[AttemptKey, ...]:
        """Forget a target; return the attempts that lost their receiver."""
        peer_sender = self._peer_senders.pop(target, None)
        if peer_sender is None:
            return ()
        lost = tuple(peer_sender.transfers)
        peer_sender.close()
        for key in lost:
            del self._targets[key]
        return lost

    def on_credit(self, target: KvTarget, frame: KvCredit, now: float) -> None:
        """Handle a credit: a chunk was taken, or dropped as stale."""
        peer_sender = self._peer_senders.get(target)
        if peer_sender is not None:
            peer_sender.on_credit(frame.key, frame.index, now)

    def on_resend(self, target: KvTarget, frame: KvResend, now: float) -> None:
        """Handle damaged chunks."""
        peer_sender = self._peer_senders.get(target)
        if peer_sender is not None:
            peer_sender.on_resend(frame.key, frame.indices, now)

    def on_done(self, target: KvTarget, key: AttemptKey, now: float) -> bool | None:
        """Handle that the receiver wants nothing more of an attempt.

        Returns:
          Whether the manifest had been sent, so that the receiver has everything; None if the
          attempt was not under way to it.
        """
        peer_sender = self._peer_senders.get(target)
        if peer_sender is None:
            return None
        transfer = peer_sender.transfers.get(key)
        peer_sender.on_done(key, now)
        if transfer is None:
            return None
        del self._targets[key]
        return transfer.manifest_sent_at is not None

    def forget(self, key: AttemptKey) -> None:
        """End a transfer from this side. Idempotent."""
        target = self._targets.pop(key, None)
        if target is not None:
            self._peer_senders[target].forget(key)

    def excuse(self, absence_s: float) -> None:
        """Do not count time in which this worker did not listen for answers."""
        for peer_sender in self._peer_senders.values():
            peer_sender.excuse(absence_s)

    def stalled(self, now: float) -> list[KvTarget]:
        """Write off forgotten chunks, and return the receivers whose answers are overdue for too
        long."""
        for peer_sender in self._peer_senders.values():
            peer_sender.write_off(now)
        return [
            target
            for target, peer_sender in self._peer_senders.items()
            if peer_sender.is_stalled(now)
        ]

    def windows(self) -> WindowsAudit:
        """Return how much is under way, and the limits."""
        windows = [
            w
            for peer_sender in self._peer_senders.values()
            if (w := peer_sender.in_flight.window) is not None
        ]
        return WindowsAudit(
            kv_under_way_bytes=sum(window.used_bytes for window in windows),
            kv_granted_bytes=sum(window.size_bytes for window in windows),
            ring_bytes=self._ring.used_bytes,
            ring_size_bytes=self._ring.size_bytes,
            verdict=verdict_of(self.check_invariants),
        )

    def check_invariants(self) -> None:
        """Assert that the ring holds exactly the chunks that are kept or on the wire."""
        self._ring.check_invariants()
        used = sum(peer_sender.check_invariants() for peer_sender in self._peer_senders.values())
        used += self._ring.returned_bytes
        assert used == self._ring.used_bytes, "the ring's count drifted"

    def _export_next(self, peer_sender: PeerSender) -> tuple[Transfer, TransferChunk] | None:
        """Export one chunk, if there is one and room for it."""
        for transfer in peer_sender.transfers.values():
            if transfer.is_exported:
                continue  # the usual case: it only waits for answers
            blocks = transfer.next_export(self._frames)
            if blocks is None:
                continue
            slot = self._ring.take(self._frames.bytes_of(blocks))
            if slot is None:
                return None
            digest, begin = RunningDigest(), 0
            for part in self._frames.parts_of(blocks):
                into = slot.memory[begin : begin + self._frames.bytes_of(part)]
                self._export(transfer.key, part, into)
                digest.update(into)
                begin += len(into)
            return transfer, transfer.add_chunk(blocks, slot, digest.digest())
        return None

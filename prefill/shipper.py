"""How computed KV leaves: exported into a bounded ring, sent within each receiver's window, kept
until taken.

Knows transfers and their lanes; does not know pools (it is handed a function that copies blocks
out), connections (it is told when a target opens or is lost) nor servers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from transport.digest import RunningDigest
from triolet.audit import WindowsAudit
from worker.account import verdict_of

from .lane import Lane
from .ring import Ring
from .transfer import Frames, Piece, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transport.frames import KvChunk, KvCredit, KvManifest, KvResend, KvTarget, TokenRow
    from triolet.config import LinkConfig
    from triolet.ids import AttemptKey

    from .ring import Slot
    from .transfer import Chunk


class KvSend(NamedTuple):
    """A frame for one target's kv link."""

    target: KvTarget
    frame: KvChunk | KvManifest
    slot: Slot | None

    @property
    def payload(self) -> memoryview | None:
        """The bytes that belong to the frame."""
        return None if self.slot is None else self.slot.memory


class Shipper:
    """All transfers of one prefill worker.

    Args:
      link: chunk and stall bounds.
      memory: the ring's.
      bytes_per_block: on the wire.
      num_layers: of a block.
      export: copies a piece of an attempt's sequence out of the pool, into a slot.

    Attributes:
      sent_bytes: payload handed to links since the start, repeats included.
    """

    def __init__(
        self,
        link: LinkConfig,
        memory: memoryview,
        bytes_per_block: int,
        num_layers: int,
        export: Callable[[AttemptKey, Piece, memoryview], None],
    ) -> None:
        self.sent_bytes = 0
        self._link = link
        self._export = export
        self._frames = Frames(link.kv_chunk_bytes, num_layers, bytes_per_block // num_layers)
        self._ring = Ring(memory)
        self._lanes: dict[KvTarget, Lane] = {}
        self._targets: dict[AttemptKey, KvTarget] = {}

    @property
    def is_full(self) -> bool:
        """Whether the ring has no room for another chunk: compute nothing more until it drains."""
        layers = range(self._frames.num_layers)
        chunk = Piece(range(self._frames.blocks_of(len(layers))), layers)
        return not self._ring.has_room(self._frames.bytes_of(chunk))

    @property
    def ring_bytes(self) -> int:
        """Bytes that are exported and not yet taken."""
        return self._ring.used_bytes

    @property
    def targets(self) -> tuple[KvTarget, ...]:
        """The targets that have, or recently had, something to receive."""
        return tuple(self._lanes)

    def is_idle(self, target: KvTarget) -> bool:
        """Return whether nothing is under way to a target, or to come."""
        lane = self._lanes.get(target)
        return lane is None or lane.is_idle

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
        """Open a transfer; its lane sends nothing before `open_lane`."""
        lane = self._lanes.setdefault(target, Lane(self._link, self._ring, now))
        transfer = Transfer(
            key,
            target.peer.epoch,
            num_blocks,
            num_tokens,
            held_blocks,
            kv_key=kv_key if self._link.wire.plaintext else b"",
        )
        lane.begin(transfer, now)
        self._targets[key] = target

    def computed(
        self,
        key: AttemptKey,
        num_blocks: int,
        first: TokenRow | None,
        num_layers: int | None = None,
    ) -> None:
        """Note that the leading `num_blocks` of the sequence are final.

        Args:
          key: the attempt.
          num_blocks: counted from the start of the sequence.
          first: the first completion token, with the last blocks.
          num_layers: only so many leading layers are, of blocks that the running step completes.
        """
        transfer = self._lanes[self._targets[key]].transfers[key]
        if num_layers is not None:
            transfer.note_layers(num_blocks, num_layers, self._frames)
            return
        transfer.note_blocks(num_blocks, self._frames.num_layers)
        transfer.first = first

    def pump(self, now: float) -> Iterator[KvSend]:
        """Export and send what ring and windows let go.

        Yields:
          Frames to hand to the links, in order; each as soon as it is there, so that the wire is
          busy with one chunk while the next is exported.
        """
        for target, lane in tuple(self._lanes.items()):
            for frame, slot in lane.send(now, partial(self._export_next, lane)):
                if slot is not None:
                    self.sent_bytes += len(slot.memory)
                yield KvSend(target, frame, slot)

    def exported(self) -> list[AttemptKey]:
        """Return the attempts whose blocks in the pool are not needed any more since the last
        call."""
        keys = []
        for lane in self._lanes.values():
            for key, transfer in lane.transfers.items():
                if transfer.is_exported and not transfer.is_released:
                    transfer.is_released = True
                    keys.append(key)
        return keys

    def open_lane(self, target: KvTarget, window_bytes: int, now: float) -> None:
        """The receiver said WELCOME: it may be sent to."""
        lane = self._lanes.get(target)
        if lane is not None:
            lane.open(window_bytes, now)

    def close_lane(self, target: KvTarget) -> tuple[AttemptKey, ...]:
        """Forget a target; return the attempts that lost their receiver."""
        lane = self._lanes.pop(target, None)
        if lane is None:
            return ()
        lost = tuple(lane.transfers)
        lane.close()
        for key in lost:
            del self._targets[key]
        return lost

    def on_credit(self, target: KvTarget, frame: KvCredit, now: float) -> None:
        """A chunk was taken, or dropped as stale."""
        lane = self._lanes.get(target)
        if lane is not None:
            lane.on_credit(frame.key, frame.index, now)

    def on_resend(self, target: KvTarget, frame: KvResend, now: float) -> None:
        """Chunks came damaged."""
        lane = self._lanes.get(target)
        if lane is not None:
            lane.on_resend(frame.key, frame.indices, now)

    def on_done(self, target: KvTarget, key: AttemptKey, now: float) -> bool | None:
        """The receiver wants nothing more of an attempt.

        Returns:
          Whether it had been told that everything was sent: then it has everything. None if the
          attempt was not under way to it.
        """
        lane = self._lanes.get(target)
        if lane is None:
            return None
        transfer = lane.transfers.get(key)
        lane.on_done(key, now)
        if transfer is None:
            return None
        del self._targets[key]
        return transfer.manifest_sent_at is not None

    def forget(self, key: AttemptKey) -> None:
        """End a transfer from this side. Idempotent."""
        target = self._targets.pop(key, None)
        if target is not None:
            self._lanes[target].forget(key)

    def excuse(self, absence_s: float) -> None:
        """Take back time in which this worker did not listen for answers."""
        for lane in self._lanes.values():
            lane.excuse(absence_s)

    def stalled(self, now: float) -> list[KvTarget]:
        """Write off what was forgotten, and return the receivers that owe an answer too long."""
        for lane in self._lanes.values():
            lane.write_off(now)
        return [target for target, lane in self._lanes.items() if lane.is_stalled(now)]

    def windows(self) -> WindowsAudit:
        """Return how much is under way, of how much that may be."""
        windows = [w for lane in self._lanes.values() if (w := lane.under_way.window) is not None]
        return WindowsAudit(
            kv_under_way_bytes=sum(window.used_bytes for window in windows),
            kv_granted_bytes=sum(window.size_bytes for window in windows),
            ring_bytes=self._ring.used_bytes,
            ring_size_bytes=self._ring.size_bytes,
            verdict=verdict_of(self.check_invariants),
        )

    def check_invariants(self) -> None:
        """Assert that the ring is the bytes of all chunks that are kept or on the wire."""
        self._ring.check_invariants()
        used = sum(lane.check_invariants() for lane in self._lanes.values())
        used += self._ring.returned_bytes
        assert used == self._ring.used_bytes, "the ring's count drifted"

    def _export_next(self, lane: Lane) -> tuple[Transfer, Chunk] | None:
        """Export one chunk, if there is one and room for it."""
        for transfer in lane.transfers.values():
            if transfer.is_exported:
                continue  # the usual case: it only waits for answers
            piece = transfer.next_export(self._frames)
            if piece is None:
                continue
            slot = self._ring.take(self._frames.bytes_of(piece))
            if slot is None:
                return None
            digest, begin = RunningDigest(), 0
            for part in self._frames.parts_of(piece):
                into = slot.memory[begin : begin + self._frames.bytes_of(part)]
                self._export(transfer.key, part, into)
                digest.update(into)
                begin += len(into)
            return transfer, transfer.add_chunk(piece, slot, digest.digest(), self._frames)
        return None

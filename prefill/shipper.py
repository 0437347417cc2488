"""How computed KV leaves: exported into a bounded ring, sent within each receiver's window, kept
until taken.

Knows transfers and their lanes; does not know pools (it is handed a function that copies blocks
out), connections (it is told when a target opens or is lost) nor servers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from transport.window import ByteWindow
from triolet.audit import WindowsAudit
from worker.account import verdict_of

from .lane import Lane
from .transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from transport.frames import KvChunk, KvCredit, KvManifest, KvResend, KvTarget, TokenRow
    from triolet.config import LinkConfig
    from triolet.ids import AttemptKey


class KvSend(NamedTuple):
    """A frame for one target's kv link."""

    target: KvTarget
    frame: KvChunk | KvManifest
    payload: bytes | memoryview | None


class Shipper:
    """All transfers of one prefill worker.

    Args:
      link: ring, chunk and stall bounds.
      bytes_per_block: of the pool.
      export: copies some blocks of an attempt's sequence out of the pool.

    Attributes:
      sent_bytes: payload handed to links since the start, repeats included.
    """

    def __init__(
        self,
        link: LinkConfig,
        bytes_per_block: int,
        export: Callable[[AttemptKey, range], bytes | memoryview],
    ) -> None:
        self.sent_bytes = 0
        self._link = link
        self._export = export
        self._bytes_per_block = bytes_per_block
        self._blocks_per_chunk = max(1, link.kv_chunk_bytes // bytes_per_block)
        self._ring = ByteWindow(link.kv_ring_bytes)
        self._lanes: dict[KvTarget, Lane] = {}
        self._targets: dict[AttemptKey, KvTarget] = {}

    @property
    def is_full(self) -> bool:
        """Whether the ring has no room for another chunk: compute nothing more until it drains."""
        # Anything fits into an empty ring: one block may be larger than all of it.
        next_chunk_bytes = self._blocks_per_chunk * self._bytes_per_block
        return bool(self._ring.used_bytes) and self._ring.available_bytes < next_chunk_bytes

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
    ) -> None:
        """Open a transfer; its lane sends nothing before `open_lane`."""
        lane = self._lanes.setdefault(target, Lane(self._link, self._ring, now))
        lane.begin(Transfer(key, target.peer.epoch, num_blocks, num_tokens, held_blocks), now)
        self._targets[key] = target

    def computed(self, key: AttemptKey, num_blocks: int, first: TokenRow | None) -> None:
        """Note that the leading `num_blocks` of the sequence are final.

        Args:
          key: the attempt.
          num_blocks: counted from the start of the sequence.
          first: the first completion token, with the last blocks.
        """
        transfer = self._lanes[self._targets[key]].transfers[key]
        transfer.num_computed = num_blocks
        transfer.first = first

    def pump(self, now: float) -> list[KvSend]:
        """Export and send what ring and windows let go.

        Returns:
          Frames to hand to the links, in order.
        """
        sends = []
        for target, lane in self._lanes.items():
            # Exports run ahead of the window, so that the pool's blocks are free early.
            for transfer in lane.transfers.values():
                self._export_ready(transfer)
            sends += [KvSend(target, *outgoing) for outgoing in lane.send_ready(now)]
        self.sent_bytes += sum(len(s.payload) for s in sends if s.payload is not None)
        return sends

    def exported(self) -> list[AttemptKey]:
        """Return the attempts whose blocks in the pool are not needed any more."""
        return [
            key
            for lane in self._lanes.values()
            for key, transfer in lane.transfers.items()
            if transfer.is_exported
        ]

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
        windows = [lane.window for lane in self._lanes.values() if lane.window is not None]
        return WindowsAudit(
            kv_under_way_bytes=sum(window.used_bytes for window in windows),
            kv_granted_bytes=sum(window.size_bytes for window in windows),
            ring_bytes=self._ring.used_bytes,
            ring_size_bytes=self._ring.size_bytes,
            verdict=verdict_of(self.check_invariants),
        )

    def check_invariants(self) -> None:
        """Assert that the ring is the bytes of all chunks that are kept or on the wire."""
        used = sum(lane.check_invariants() for lane in self._lanes.values())
        assert used == self._ring.used_bytes, "the ring's count drifted"

    def _export_ready(self, transfer: Transfer) -> None:
        while blocks := transfer.next_export(self._blocks_per_chunk):
            if not self._ring.try_consume(len(blocks) * self._bytes_per_block):
                return
            transfer.add_chunk(blocks, self._export(transfer.key, blocks))

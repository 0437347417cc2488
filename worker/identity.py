"""The worker's identity in its current epoch, and its answer to HELLO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.frames import Capacity
from transport.handshake import versioned
from triolet.ids import PeerId, new_epoch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from triolet.ids import Role

    from .engine_port import EnginePort


class Identity:
    """Name, epoch, model and capacity of one worker.

    Args:
      role: prefill or decode.
      name: name in the fleet.
      engine: source of its capacity and fingerprint.
      max_num_seqs: rows of a step.
      max_waiting_tokens: prompt tokens that may wait here; prefill only.
      kv_window_bytes: bytes that one sender may have under way to it; decode only.
      kv_address: address for KV; decode only.
      compute_digest: compute digest of the version; empty for a directory outside the store.
      labels: labels with its place and costs.
      draw_epoch: returns its first epoch; replaced by a simulator.

    Attributes:
      me: role, name and present epoch.
      fingerprint: fingerprint of the loaded model, with its compute digest.
      capacity: its total capacity.
      labels: labels with its place and costs.
    """

    def __init__(
        self,
        role: Role,
        name: str,
        engine: EnginePort,
        *,
        max_num_seqs: int,
        max_waiting_tokens: int = 0,
        kv_window_bytes: int = 0,
        kv_address: str = "",
        compute_digest: str = "",
        labels: Mapping[str, str] | None = None,
        draw_epoch: Callable[[], int] = new_epoch,
    ) -> None:
        self.me = PeerId(role, name, draw_epoch())
        self.fingerprint = versioned(engine.fingerprint, compute_digest)
        self.kv_address = kv_address
        self.labels = labels
        total_blocks = engine.ledger.total_blocks
        self.capacity = Capacity(
            num_blocks=total_blocks,
            block_size=engine.block_size,
            bytes_per_block=engine.bytes_per_block,
            max_num_seqs=max_num_seqs,
            # The longest sequence fills the whole pool.
            max_model_len=min(engine.max_model_len, total_blocks * engine.block_size),
            max_waiting_tokens=max_waiting_tokens,
            kv_window_bytes=kv_window_bytes,
            step_s=engine.pace.step_s,
        )

    def begin_new_life(self) -> None:
        """Take a new epoch: all promises of the old one are void."""
        self.me = self.me._replace(epoch=self.me.epoch + 1)

"""This worker's identity in its present life, and what it tells a peer that says HELLO."""

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
      name: in the fleet.
      engine: its blocks and model are offered.
      max_num_seqs: rows of a step.
      max_waiting_tokens: prompt tokens that may wait here; prefill only.
      kv_window_bytes: what one sender may have under way to here; decode only.
      kv_address: where KV is taken; decode only.
      compute_digest: of the model's version; empty for a directory that is in no store.
      labels: where it runs and what it costs.
      draw_epoch: where its first epoch comes from; a simulator brings its own.

    Attributes:
      me: role, name and present epoch.
      fingerprint: of the model that is loaded, with its compute digest.
      capacity: what there is in all.
      labels: as given.
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
            # A sequence that fills the pool is the longest that can be held.
            max_model_len=min(engine.max_model_len, total_blocks * engine.block_size),
            max_waiting_tokens=max_waiting_tokens,
            kv_window_bytes=kv_window_bytes,
            step_s=engine.pace.step_s,
        )

    def begin_new_life(self) -> None:
        """Take a new epoch: whatever was promised under the old one is void."""
        self.me = self.me._replace(epoch=self.me.epoch + 1)

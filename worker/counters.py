"""What a worker has done since its epoch began. Only rises; read by heartbeats and tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Named as in `transport.frames.Load`, which carries them."""

    steps: int = 0
    computed_tokens: int = 0
    kv_bytes: int = 0
    stale_frames: int = 0
    bad_digests: int = 0
    preemptions: int = 0

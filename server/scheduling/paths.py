"""Which prefill and decode workers lost one another, though both of them answer this server.

A partition between two workers shows as a transfer that is given up; neither of them is at fault,
so no breaker counts it. Knows lives and times; who is paired instead is dispatch.py's to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triolet.config import RecoveryConfig
    from triolet.ids import PeerId

    from .workers import Worker


class BrokenPaths:
    """Pairs of lives, each for a while. As many as there are pairs, at most."""

    def __init__(self, config: RecoveryConfig) -> None:
        self._avoid_s = config.path_avoid_s
        self._until: dict[tuple[PeerId | None, PeerId | None], float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def broke(self, prefill: Worker, decode: Worker, now: float) -> None:
        """Note that KV does not get from one to the other."""
        self._until[prefill.peer_id, decode.peer_id] = now + self._avoid_s

    def is_broken(self, prefill: Worker, decode: Worker, now: float) -> bool:
        """Return whether others should be paired instead."""
        until = self._until.get((prefill.peer_id, decode.peer_id))
        return until is not None and now < until

    def forget(self, now: float) -> None:
        """Drop what is long ago."""
        for path in [path for path, until in self._until.items() if until <= now]:
            del self._until[path]

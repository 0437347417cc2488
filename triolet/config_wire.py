"""How KV travels from prefill to decode, beyond what every link has: each with its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WireConfig:
    """Ways to ship that are chosen, not needed."""

    share_memory: bool = False
    """Let decode workers on the same host read chunks out of prefill's ring instead of sending
    their bytes through a socket; elsewhere bytes travel as ever. Three times as fast, and no part
    of a prompt's time where shipping hides behind computing: so it has to be asked for."""

"""Deadlines for real workers in tests that are about something else.

A busy machine may let a process stand still for longer than the product waits; what that costs is
shown where time is virtual.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triolet.config import LinkConfig

SILENCE_S = 60.0


def unhurried(link: LinkConfig) -> LinkConfig:
    """Return the same, but a peer may be silent for a minute."""
    return replace(
        link,
        peer_timeout_s=SILENCE_S,
        progress_timeout_s=SILENCE_S,
        lease_ttl_s=2 * SILENCE_S,
        kv_stall_s=SILENCE_S,
    )

"""Long deadlines for tests that run real workers but do not test deadlines.

A busy machine may stop a process for longer than the product waits; the effects of that are tested
in virtual time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triolet.config import LinkConfig

SILENCE_S = 60.0


def unhurried(link: LinkConfig) -> LinkConfig:
    """Return the same config, but with a peer timeout of a minute."""
    return replace(
        link,
        peer_timeout_s=SILENCE_S,
        progress_timeout_s=SILENCE_S,
        lease_ttl_s=2 * SILENCE_S,
        kv_stall_s=SILENCE_S,
    )

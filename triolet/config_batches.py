"""Bounds of stored files and of the batches that run over them.

Knows numbers and where the database is; what they mean is server/jobs' business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .errors import ConfigError
from .units import MIB, SECONDS

BACKGROUND_WINDOW: Final = 4
"""Tokens that a line may run ahead: so soon it stands still when an interactive request comes."""
BACKGROUND_HOLD_S: Final = 0.5 * SECONDS
"""For which it stands still at most: it holds a row and blocks, which may be what the interactive
request waits for. Under a flood a line so goes on by a window in each of these, and one that has
not begun joins the queue after it."""


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Files and batches."""

    directory: str | None = None
    """Where the database is; None for none: files and batches are then not served. Off by default,
    because what outlives a process shall be where its operator wants it."""
    max_total_bytes: int = 1024 * MIB
    """Of all files, results included. Beyond it nothing more is taken; a batch under way ends its
    lines with errors."""
    max_files: int = 1000
    """That are kept at once."""
    max_open_batches: int = 100
    """That have not ended."""
    owner_share: float = 0.25
    """Of each of the three: the most that one tenant may have, so that none of a few shuts all
    others out. Without tenants there is nobody to share with."""
    max_lines: int = 50_000
    """Of one batch: as many as the API's own."""
    concurrency: int = 4
    """Lines at once. More would fill rows that interactive requests want, and a line that is held
    back holds its blocks."""
    lease_s: float = 5.0 * SECONDS
    """Of several servers one runs batches; when nothing is heard of it for this long, another
    does. It says so every third of that: whoever stands still for longer computes lines again."""
    poll_s: float = 0.5 * SECONDS
    """How often somebody looks for work where nothing happens."""
    max_line_attempts: int = 8
    """For answers that say "later" (503, 504). A fleet that restarts takes seconds."""
    limited_retry_s: float = 60.0 * SECONDS
    """When lines of a tenant are tried again that has met a limit of which nobody knows when it
    will not be met any more, such as its budget."""
    paused_s: float = 5.0 * SECONDS
    """For which a line that has not begun stays in the queue while batches are paused. It holds
    part of its tenant's limits there, of which the tenant's own requests may be in want; a
    brownout that ends sooner costs it nothing."""
    retry_s: float = 1.0 * SECONDS
    """Before the second attempt; doubled for each further one."""
    min_free_bytes: int = 64 * MIB
    """On the disk with the database: below it no line begins. The lines under way and the renewals
    of the lease have room to be written then, and other writers of that disk some time."""
    max_held_retry_s: float = 5.0 * SECONDS
    """How often at least it is tried to write an answer that the database has refused, from
    `retry_s` on. Until then it is held in memory, with the place of its line, so that never more
    than `concurrency` are."""

    def most_of(self, owner: str, most: int) -> int:
        """Return what one owner may have of a bound."""
        return max(1, int(most * self.owner_share)) if owner else most

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError(f"batch concurrency is {self.concurrency}; allowed: >= 1")

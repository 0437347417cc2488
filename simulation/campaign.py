"""Many seeds in several processes, and what came of them in all."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog

from .faults import Tally
from .scenario import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .faults import Fault
    from .scenario import Report

BATCH: Final = 10
"""Seeds that a process takes at once."""
ENOUGH_SEEDS: Final = 20
"""A kind of fault that so many seeds had switched on and that never came is an error."""
MAX_SHOWN: Final = 20
CRITICAL: Final = 50


@dataclass(slots=True)
class Campaign:
    """Results of many seeds.

    Attributes:
      num_seeds: runs so far.
      failed: those with a violation.
      tally: faults.
      endings: how requests ended.
      virtual_s: simulated seconds.
      elapsed_s: real ones.
    """

    num_seeds: int = 0
    failed: list[Report] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    endings: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    elapsed_s: float = 0.0

    @property
    def missing(self) -> list[Fault]:
        """Kinds of faults that were asked for often enough and never happened."""
        return [f for f in self.tally.never_happened() if self.tally.asked[f] >= ENOUGH_SEEDS]

    @property
    def is_good(self) -> bool:
        """Whether nothing was violated and everything was tried."""
        return not self.failed and not self.missing

    def add(self, report: Report) -> None:
        """Add one run."""
        self.num_seeds += 1
        self.tally.add(report.tally)
        self.endings += report.endings
        self.virtual_s += report.virtual_s
        if report.violations:
            self.failed.append(report)


def keep_quiet() -> None:
    """Let the product log nothing: a campaign would be a hundred thousand lines."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(CRITICAL))


def run_campaign(
    seeds: Sequence[int], num_processes: int, on_progress: Callable[[Campaign], None]
) -> Campaign:
    """Run seeds and add them up.

    Args:
      seeds: which.
      num_processes: how many at once; with 1 it is this one.
      on_progress: told after every batch.
    """
    campaign = Campaign()
    began_at = time.monotonic()
    if num_processes == 1:
        for seed in seeds:
            campaign.add(simulate(seed))
            campaign.elapsed_s = time.monotonic() - began_at
            on_progress(campaign)
        return campaign
    batches = [seeds[at : at + BATCH] for at in range(0, len(seeds), BATCH)]
    context = multiprocessing.get_context("spawn")
    with context.Pool(num_processes, initializer=keep_quiet) as pool:
        for reports in pool.imap_unordered(_run_batch, batches):
            for report in reports:
                campaign.add(report)
            campaign.elapsed_s = time.monotonic() - began_at
            on_progress(campaign)
    campaign.failed.sort(key=lambda report: report.seed)
    return campaign


def _run_batch(seeds: Sequence[int]) -> list[Report]:
    return [simulate(seed) for seed in seeds]

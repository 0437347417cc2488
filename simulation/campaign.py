"""Run many seeds in several processes, and sum up the results."""

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
"""Seeds per batch of a process."""
ENOUGH_SEEDS: Final = 20
"""A kind of fault that is enabled in this many seeds must occur."""
MAX_SHOWN: Final = 20
CRITICAL: Final = 50


@dataclass(slots=True)
class Campaign:
    """Results of many seeds.

    Attributes:
      num_seeds: number of runs so far.
      failed: runs with a violation.
      tally: counts of faults.
      endings: counts of the endings of requests.
      virtual_s: simulated seconds.
      elapsed_s: real seconds.
    """

    num_seeds: int = 0
    failed: list[Report] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    endings: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    elapsed_s: float = 0.0

    @property
    def missing(self) -> list[Fault]:
        """Kinds of faults that were enabled often enough but never occurred."""
        return [f for f in self.tally.never_happened() if self.tally.asked[f] >= ENOUGH_SEEDS]

    @property
    def is_good(self) -> bool:
        """Return whether nothing was violated and every kind of fault occurred."""
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
    """Disable the product's logs, because a campaign would write a hundred thousand lines."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(CRITICAL))


def run_campaign(
    seeds: Sequence[int], num_processes: int, on_progress: Callable[[Campaign], None]
) -> Campaign:
    """Run seeds and sum up their results.

    Args:
      seeds: seeds to run.
      num_processes: number of processes; 1 uses this one.
      on_progress: called after every batch.
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

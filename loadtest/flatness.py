"""Whether processes hold more and more: memory, open files and threads, stage after stage. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .campaign.processes import Cost

MIB = 1024 * 1024
MAX_GROWTH_BYTES = 16 * MIB
"""Between the first stage and the last: what allocators move by. 4,000 leaked requests of 5 KiB
would be more."""
MAX_GROWTH_COUNT = 2
"""Open files and threads: the very connection and thread that serve whoever looks."""


def growth(stages: Sequence[tuple[str, Mapping[str, Cost]]]) -> list[str]:
    """Return what grew between the first stage and the last beyond its bound."""
    (_, first), (_, last) = stages[0], stages[-1]
    wrongs = []
    for name in sorted(first):
        before, after = first[name], last.get(name)
        if after is None:
            wrongs.append(f"{name} is gone")
            continue
        grown_bytes = after.rss_bytes - before.rss_bytes
        if grown_bytes > MAX_GROWTH_BYTES:
            wrongs.append(f"{name} grew by {grown_bytes / MIB:.0f} MiB")
        for what, grown in (
            ("open files", after.num_fds - before.num_fds),
            ("threads", after.num_threads - before.num_threads),
        ):
            if grown > MAX_GROWTH_COUNT:
                wrongs.append(f"{name} has {grown} more {what}")
    return wrongs


def costs_table(stages: Sequence[tuple[str, Mapping[str, Cost]]]) -> Table:
    """Return one row per process, one column per stage."""
    table = Table(title="memory in MiB · open files · threads")
    table.add_column("process")
    for stage, _ in stages:
        table.add_column(stage, justify="right")
    for name in sorted(stages[0][1]):
        table.add_row(name, *(_shown(costs.get(name)) for _, costs in stages))
    return table


def _shown(cost: Cost | None) -> str:
    if cost is None:
        return "gone"
    return f"{cost.rss_bytes / MIB:.0f} · {cost.num_fds} · {cost.num_threads}"

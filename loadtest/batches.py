"""`python -m loadtest.batches`: kill every process of a fleet during one batch of the API.

Every process is killed once, including the supervisor, for each number of servers. Exit code 0 if
every line was answered exactly once, with the same answer as a direct request, and no block was
left behind; 1 if not; 2 if nothing could run.
"""

from __future__ import annotations

import sys
from shutil import rmtree
from typing import TYPE_CHECKING

import trio

from .campaign.batches import run_batch
from .harness.campaign import as_table, campaign_parser, run_campaign
from .harness.progress import progress

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.console import Console

    from .campaign.batches import BatchVerdict

COLUMNS = ("servers", "victim", "lines done", "ready again, s", "proof")


def campaign(options: argparse.Namespace, console: Console) -> list[str]:
    """Run a batch for each number of servers, print the kills and return what was wrong."""
    wrongs = []
    rmtree(options.out)
    options.out.mkdir()
    for num_servers in options.servers:
        progress(f"{options.lines} lines, {num_servers} server(s); each process is killed once")
        args = (options.lines, options.max_tokens, num_servers, options.seed)
        verdict = trio.run(run_batch, *args, options.out, options.serve)
        wrongs += [f"{num_servers} server(s): {wrong}" for wrong in verdict.wrongs]
        console.print(as_table(title_of(verdict), COLUMNS, rows_of(verdict)), soft_wrap=True)
    return wrongs


def title_of(verdict: BatchVerdict) -> str:
    """Return the result of a batch in one line."""
    return (
        f"{verdict.num_lines} lines in {verdict.elapsed_s:.0f} s, {verdict.num_computed} computed, "
        f"{len(verdict.wrongs)} wrong"
    )


def rows_of(verdict: BatchVerdict) -> list[list[str]]:
    """Return a row for each kill."""
    servers = str(verdict.num_servers)
    return [
        [servers, one.fault.victim, str(one.num_done), f"{one.back_s:.1f}", one.fault.proof]
        for one in verdict.deaths
    ]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = campaign_parser("batches", "Kill every process of a fleet during a batch.")
    parser.add_argument("--lines", type=int, default=500, help="lines of the batch (500)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of each answer (96)")
    parser.add_argument(
        "--servers", type=int, nargs="*", default=[1, 2], help="servers of each fleet (1 2)"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run and return the exit code."""
    return run_campaign(parse(arguments), __doc__, campaign)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

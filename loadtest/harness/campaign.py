"""Command line, tables and exit codes of the campaigns in `loadtest`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from .progress import announce
from .servers import HasNotHappenedError, ServerDidNotStartError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

ROOT = Path(__file__).parents[2]
MAX_SHOWN = 40


def campaign_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser for `python -m loadtest.NAME` with the options of all campaigns."""
    parser = argparse.ArgumentParser(
        prog=f"python -m loadtest.{name}",
        description=description,
        epilog="Options after -- go to `triolet serve`, for example: -- --threads 2 path/to/model",
    )
    parser.add_argument("--seed", type=int, default=1, help="random seed (1)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / name)
    parser.add_argument("serve", nargs="*", metavar="SERVE-OPTION", help=argparse.SUPPRESS)
    return parser


def as_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], num_texts: int = 1
) -> Table:
    """Return a table with text in the first columns and numbers in the others.

    Args:
      title: title of the table.
      columns: headings of the columns; empty for none.
      rows: texts of the cells.
      num_texts: number of columns that are aligned to the left.
    """
    table = Table(title=title, show_header=any(columns))
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < num_texts else "right")
    for row in rows:
        table.add_row(*row)
    return table


def run_campaign(
    options: argparse.Namespace,
    description: str | None,
    campaign: Callable[[argparse.Namespace, Console], Sequence[str]],
) -> int:
    """Announce a campaign, run it and print what was wrong.

    Args:
      options: options of `campaign_parser`; the folder `out` is created.
      description: description of the program.
      campaign: prints its results and returns what was wrong.

    Returns:
      0 if nothing is wrong, 1 if something is, 2 if nothing could run.
    """
    announce(description)
    console = Console(highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        wrongs = campaign(options, console)
    except (ServerDidNotStartError, HasNotHappenedError) as error:
        console.print(f"error: {error}", style="red", soft_wrap=True, markup=False)
        return 2
    for wrong in wrongs[:MAX_SHOWN]:
        console.print(f"WRONG {wrong}", style="red", soft_wrap=True, markup=False)
    return 1 if wrongs else 0

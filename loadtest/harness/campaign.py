"""What campaigns against servers share: their command line, and how they end."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from .servers import HasNotHappenedError, ServerDidNotStartError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).parents[2]
MAX_SHOWN = 40


def campaign_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of `python -m loadtest.NAME`, for its own options."""
    parser = argparse.ArgumentParser(
        prog=f"python -m loadtest.{name}",
        description=description,
        epilog="Options after -- go to `triolet serve`, for example: -- --threads 2 path/to/model",
    )
    parser.add_argument("--seed", type=int, default=1, help="of all that is random (1)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / name)
    parser.add_argument("serve", nargs="*", metavar="SERVE-OPTION", help=argparse.SUPPRESS)
    return parser


def exit_code(out: Path, campaign: Callable[[Console], Sequence[str]]) -> int:
    """Run a campaign; print what it found wrong.

    Args:
      out: made before it runs.
      campaign: prints its results; returns what is wrong.

    Returns:
      0 if nothing is wrong, 1 if something is, 2 if nothing could run.
    """
    console = Console(highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    try:
        wrongs = campaign(console)
    except (ServerDidNotStartError, HasNotHappenedError) as error:
        console.print(f"error: {error}", style="red", soft_wrap=True, markup=False)
        return 2
    for wrong in wrongs[:MAX_SHOWN]:
        console.print(f"WRONG {wrong}", style="red", soft_wrap=True, markup=False)
    return 1 if wrongs else 0

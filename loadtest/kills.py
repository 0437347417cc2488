"""`python -m loadtest.kills`: break processes under load; see that clients only notice a pause.

The same requests are asked once undisturbed and then once per fault, each time of a fresh fleet of
two prefill and two decode workers. Faults come at random moments: SIGKILL of a decode worker, of a
prefill worker, of the server, and SIGSTOP of a decode worker with SIGCONT 3 s later. Exit code 0 if
every request was answered with the very tokens of the undisturbed run, every fault hit something
and no block was left behind; 1 if not; 2 if nothing could run.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import trio
from rich.console import Console
from rich.table import Table

from .campaign.asks import draw_asks
from .campaign.disturbed import ask_under_faults, wait_whole
from .campaign.leftovers import blocks_when_settled, violations_now
from .campaign.processes import FleetLog, HasNotHappenedError
from .campaign.verdicts import (
    CALM,
    REFERENCE,
    SERVER_KILL,
    UNDISTURBED,
    Verdict,
    judge,
    shown_ms,
)
from .server_process import ServerDidNotStartError, running_server

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .campaign.answers import Answer
    from .campaign.asks import Ask

ROOT = Path(__file__).parents[1]
SERVE_OPTIONS = ("--prefill", "2", "--decode", "2", "--log-level", "info")
FAULTS = (CALM, "decode-kill", "prefill-kill", "decode-stop", SERVER_KILL)
DTYPES = ("float32", "bfloat16")
COLUMNS = (
    *("dtype", "fault", "times", "requests", "failed", "inexact", "hit"),
    *("pause p50", "p99", "max", "others p99", "logprob", "free", "seconds"),
)
HOW_TO_READ = """\
failed     requests without an answer; inexact: with another one than the undisturbed run gave
           (token ids, text, end and usage; over WebSocket all but the ids)
reference  the undisturbed run; calm: the same once more, what differs there differs without faults
hit        requests that had to begin again: a new attempt on other workers or, where the server
           died, a new connection; a run whose faults hit nothing does not pass
pause      longest silence of each stream that was hit, ms, the wait for its first word included;
           where the server died: from the broken connection to the first word of the next try
others     the same of all streams that were not hit
logprob    largest difference of a logprob from the undisturbed run; 0: the same bits
free       from the server's death until the last block that it held was free, ms (bound: 2500)"""


async def one_run(
    url: str,
    log: FleetLog,
    asks: Sequence[Ask],
    options: argparse.Namespace,
    reference: Mapping[int, Answer],
    verdict: Verdict,
) -> dict[int, Answer]:
    """Ask everything while faults of one kind happen; return the answers, fill in the verdict."""
    await wait_whole(url, log)
    fault = verdict.fault
    run = await ask_under_faults(
        url,
        log,
        asks,
        options.clients,
        [] if fault in UNDISTURBED else [fault] * options.times,
        Random(f"{options.seed} {fault}"),
        retries_broken=fault == SERVER_KILL,
    )
    verdict.injected, verdict.elapsed_s = run.injected, run.elapsed_s
    verdict.leased_blocks = (await blocks_when_settled(url)).leased
    verdict.violations = await violations_now(url)
    judge(verdict, run.stories, reference, log.entries())
    return {story.ask.number: story.answer for story in run.stories if story.answer is not None}


def campaign(console: Console, options: argparse.Namespace) -> list[Verdict]:
    """Do all runs and return what came of each.

    Raises:
      ServerDidNotStartError: a fleet did not start.
    """
    asks = draw_asks(options.requests, options.seed)
    verdicts: list[Verdict] = []
    for dtype in options.dtype:
        reference: dict[int, Answer] = {}
        for fault in (REFERENCE, *options.faults):
            verdict = Verdict(dtype, fault, [], len(asks))
            path = options.out / f"{dtype}-{fault}.log"
            serve = [*SERVE_OPTIONS, "--dtype", dtype, *options.serve]
            with running_server(serve, path) as url:
                log = FleetLog(path)
                answers: dict[int, Answer] = {}
                try:
                    answers = trio.run(one_run, url, log, asks, options, reference, verdict)
                except* HasNotHappenedError as group:
                    verdict.failed += [str(error) for error in group.exceptions]
            if fault == REFERENCE:
                reference = answers
            verdicts.append(verdict)
            console.print(summary_of(verdict), soft_wrap=True, markup=False)
    return verdicts


def summary_of(verdict: Verdict) -> str:
    """Say in a line, and more if something was wrong, what came of a run."""
    lines = [
        f"{verdict.dtype} {verdict.fault}: {verdict.requests} requests in "
        f"{verdict.elapsed_s:.0f} s, {len(verdict.wrongs)} wrong",
        *(f"  {fault.victim}: {fault.proof}" for fault in verdict.injected),
        *(f"  WRONG {wrong}" for wrong in verdict.wrongs[:20]),
    ]
    return "\n".join(lines)


def table_of(verdicts: Sequence[Verdict]) -> Table:
    """Return one row per run."""
    table = Table(title="processes that die under load; times in ms")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in {"dtype", "fault"} else "right")
    for verdict in verdicts:
        table.add_row(
            verdict.dtype,
            verdict.fault,
            *map(str, (len(verdict.injected), verdict.requests)),
            *map(str, (len(verdict.failed), len(verdict.inexact), verdict.hit)),
            *(shown_ms(verdict.pauses_s, percent) for percent in (50, 99, 100)),
            shown_ms(verdict.calm_pauses_s, 99),
            f"{verdict.logprob_distance:.0e}" if verdict.logprob_distance else "0",
            shown_ms(verdict.freed_s, 100),
            f"{verdict.elapsed_s:.0f}",
        )
    return table


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.kills",
        description="Break processes of a fleet under load and compare every answer.",
        epilog="Options after -- go to `triolet serve`, for example: -- --threads 2 path/to/model",
    )
    parser.add_argument("--requests", type=int, default=800, help="in each run (800)")
    parser.add_argument("--clients", type=int, default=8, help="that ask side by side (8)")
    parser.add_argument("--times", type=int, default=4, help="each fault in its run (4)")
    parser.add_argument("--seed", type=int, default=1, help="of requests and moments (1)")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "kills")
    parser.add_argument("serve", nargs="*", metavar="SERVE-OPTION", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run and return the exit code."""
    options = parse(arguments)
    console = Console(highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        verdicts = campaign(console, options)
    except ServerDidNotStartError as error:
        console.print(f"error: {error}", style="red", soft_wrap=True, markup=False)
        return 2
    figures = [asdict(verdict) | {"wrongs": verdict.wrongs} for verdict in verdicts]
    (options.out / "verdicts.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    Console(highlight=False, width=max(console.width, 140)).print(table_of(verdicts))
    console.print(HOW_TO_READ, soft_wrap=True)
    wrong = sum(bool(verdict.wrongs) for verdict in verdicts)
    console.print(f"{wrong} of {len(verdicts)} runs did not pass" if wrong else "all runs passed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

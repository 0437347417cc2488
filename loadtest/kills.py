"""`python -m loadtest.kills`: break processes under load; check that clients notice only a pause.

The same requests run once undisturbed and then once per fault, each time on a new fleet of two
prefill and two decode workers. Faults occur at random moments: SIGKILL of a decode worker, of a
prefill worker, of the server, and SIGSTOP of a decode worker with SIGCONT 3 s later. Exit code 0 if
every request got exactly the tokens of the undisturbed run, every fault affected a request and no
block was left behind; 1 if not; 2 if nothing could run.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import trio
from rich.console import Console

from .campaign.answers import draw_asks
from .campaign.faults import ask_under_faults, blocks_when_settled, violations_now, wait_whole
from .harness.campaign import as_table, campaign_parser, run_campaign
from .harness.servers import (
    FleetLog,
    HasNotHappenedError,
    attempts_of,
    running_server,
    seconds_of,
)
from .harness.statistics import milliseconds

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from rich.table import Table

    from .campaign.answers import Answer, Ask
    from .campaign.client import Story
    from .campaign.faults import Injected


FREE_BOUND_S = 2.5
"""A lease expires after 2 s without its owner, and the next sweep comes within half a second."""
SERVER_KILL = "server-kill"
LEASE_EXPIRED = "lease_expired"
"""End reason of attempts that no server claims."""
CALM = "calm"
REFERENCE = "reference"
UNDISTURBED = (REFERENCE, CALM)


@dataclass(slots=True)
class Verdict:
    """Result of one run.

    Attributes:
      dtype: dtype of the workers.
      fault: kind of faults, or the name of a run without faults.
      injected: each fault that happened.
      requests: number of requests.
      failed: requests without an answer, with the reason.
      inexact: requests with an answer that differs from the reference, with the place.
      hit: requests that needed more than one attempt or, after the server died, connection.
      pauses_s: the longest silence of each stream that was hit; after a broken connection, from its
        detection to the first word of the next try.
      calm_pauses_s: the longest silence of each other stream.
      freed_s: for each attempt of a dead server, time from its death until its blocks were free.
      noticed_s: for each broken connection, time from the death until the client noticed.
      logprob_distance: largest difference of a logprob from the reference.
      leased_blocks: blocks that were still leased afterwards.
      violations: violations of the audit afterwards.
      elapsed_s: duration of the run.
    """

    dtype: str
    fault: str
    injected: list[Injected]
    requests: int
    failed: list[str] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)
    hit: int = 0
    pauses_s: list[float] = field(default_factory=list)
    calm_pauses_s: list[float] = field(default_factory=list)
    freed_s: list[float] = field(default_factory=list)
    noticed_s: list[float] = field(default_factory=list)
    logprob_distance: float = 0.0
    leased_blocks: int = 0
    violations: list[str] = field(default_factory=list)
    elapsed_s: float = 0.0

    @property
    def wrongs(self) -> list[str]:
        """Return descriptions of all failed checks."""
        wrongs = [*self.failed, *self.inexact, *self.violations]
        if self.fault not in UNDISTURBED and not self.hit:
            wrongs.append("the faults hit no request, so the run proves nothing")
        if self.leased_blocks:
            wrongs.append(f"{self.leased_blocks} blocks are still leased")
        if self.freed_s and max(self.freed_s) > FREE_BOUND_S:
            wrongs.append(f"a dead server's blocks were leased for {max(self.freed_s):.2f} s")
        if self.fault == SERVER_KILL and not self.freed_s:
            wrongs.append("no worker held blocks of the dead server, so the run proves nothing")
        return wrongs


def judge(
    verdict: Verdict,
    stories: Sequence[Story],
    reference: Mapping[int, Answer],
    entries: Iterable[Mapping[str, Any]],
) -> None:
    """Fill in the verdict from the stories and the log."""
    entries = list(entries)
    attempts = attempts_of(entries)
    for story in stories:
        name = story.ask.name
        _compare(verdict, story, reference.get(story.ask.number))
        is_hit = attempts.get(name, 1) > 1 or bool(story.broken)
        verdict.hit += is_hit
        if story.ask.surface == "plain" or not story.arrivals:
            continue
        if not is_hit:
            verdict.calm_pauses_s.append(story.longest_silence_s)
        elif story.broken:
            verdict.pauses_s.append(story.arrivals[0] - story.broken[0].at)
        else:
            verdict.pauses_s.append(story.longest_silence_s)
    if verdict.fault == SERVER_KILL:
        verdict.freed_s = _times_to_free(verdict.injected, entries)
        verdict.noticed_s = _times_to_notice(verdict.injected, stories)


def _compare(verdict: Verdict, story: Story, expected: Answer | None) -> None:
    name = f"{story.ask.name} ({story.ask.surface})"
    if story.answer is None:
        verdict.failed.append(f"{name} failed: {story.failure}")
        return
    if expected is None:
        return
    if difference := story.answer.differs_from(expected):
        verdict.inexact.append(f"{name} differs in {difference}")
        return
    distance = story.answer.logprob_distance(expected)
    verdict.logprob_distance = max(verdict.logprob_distance, distance)
    for broken in story.broken:
        told = len(broken.token_ids)
        if broken.token_ids != expected.token_ids[:told] or not expected.text.startswith(
            broken.text
        ):
            verdict.inexact.append(f"{name} was wrong before its connection broke")


def _times_to_free(
    injected: Sequence[Injected], entries: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Return how long workers kept the blocks of a server after its death.

    Counts attempts that ended before the next server was ready, and those that no server claimed.
    """
    returns = [
        seconds_of(e)
        for e in entries
        if e.get("event") == "process_ready" and e.get("name") == "server"
    ]
    times = []
    for entry in entries:
        if entry.get("event") != "attempt_ended":
            continue
        ended_at = seconds_of(entry)
        deaths = [fault.epoch_s for fault in injected if fault.epoch_s <= ended_at]
        if not deaths:
            continue
        is_back = any(deaths[-1] <= returned_at <= ended_at for returned_at in returns)
        if entry["reason"] == LEASE_EXPIRED or not is_back:
            times.append(ended_at - deaths[-1])
    return times


def _times_to_notice(injected: Sequence[Injected], stories: Sequence[Story]) -> list[float]:
    """Return how long clients took to notice that the server had died during their answer."""
    times = []
    for story in stories:
        for broken in story.broken:
            deaths = [fault.at for fault in injected if fault.at <= broken.at]
            if deaths and broken.had_begun:
                times.append(broken.at - deaths[-1])
    return times


SERVE_OPTIONS = ("--prefill", "2", "--decode", "2", "--log-level", "info")
FAULTS = (CALM, "decode-kill", "prefill-kill", "decode-stop", SERVER_KILL)
DTYPES = ("float32", "bfloat16")
COLUMNS = (
    *("dtype", "fault", "times", "requests", "failed", "inexact", "hit"),
    *("pause p50", "p99", "max", "others p99", "logprob", "free", "seconds"),
)
HOW_TO_READ = """\
failed     requests without an answer; inexact: answers that differ from the undisturbed run
           (token ids, text, end and usage; over WebSocket all but the ids)
reference  the undisturbed run; calm: a second run without faults, for comparison
hit        requests that had to restart: a new attempt on other workers or, after the server
           died, a new connection; a run without hits does not pass
pause      longest silence of each stream that was hit, ms, including the wait for its first word;
           after the server died: from the broken connection to the first word of the next try
others     the same for all streams that were not hit
logprob    largest difference of a logprob from the undisturbed run; 0: the same bits
free       from the server's death until its last block was free, ms (limit: 2500)"""


async def one_run(
    url: str,
    log: FleetLog,
    asks: Sequence[Ask],
    options: argparse.Namespace,
    reference: Mapping[int, Answer],
    verdict: Verdict,
) -> dict[int, Answer]:
    """Send all requests during faults of one kind. Fill in the verdict and return the answers."""
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


def run_all(console: Console, options: argparse.Namespace) -> list[Verdict]:
    """Do all runs and return the verdicts.

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
            write(verdicts, options.out)
            console.print(summary_of(verdict), soft_wrap=True, markup=False)
    return verdicts


def write(verdicts: Sequence[Verdict], out: Path) -> None:
    """Write the verdicts so far, because the campaign takes long and may be stopped."""
    figures = [asdict(verdict) | {"wrongs": verdict.wrongs} for verdict in verdicts]
    (out / "verdicts.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")


def summary_of(verdict: Verdict) -> str:
    """Return the result of a run in a line, and further lines if something was wrong."""
    lines = [
        f"{verdict.dtype} {verdict.fault}: {verdict.requests} requests in "
        f"{verdict.elapsed_s:.0f} s, {len(verdict.wrongs)} wrong",
        *(f"  {fault.victim}: {fault.proof}" for fault in verdict.injected),
        *(f"  WRONG {wrong}" for wrong in verdict.wrongs[:20]),
    ]
    return "\n".join(lines)


def table_of(verdicts: Sequence[Verdict]) -> Table:
    """Return one row per run."""
    rows = [
        [
            *(verdict.dtype, verdict.fault),
            *map(str, (len(verdict.injected), verdict.requests)),
            *map(str, (len(verdict.failed), len(verdict.inexact), verdict.hit)),
            *milliseconds(verdict.pauses_s, 50, 99, 100),
            *milliseconds(verdict.calm_pauses_s, 99),
            f"{verdict.logprob_distance:.0e}" if verdict.logprob_distance else "0",
            *milliseconds(verdict.freed_s, 100),
            f"{verdict.elapsed_s:.0f}",
        ]
        for verdict in verdicts
    ]
    return as_table("processes killed under load; times in ms", COLUMNS, rows, num_texts=2)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = campaign_parser("kills", "Break processes under load and compare every answer.")
    parser.add_argument("--requests", type=int, default=800, help="requests of each run (800)")
    parser.add_argument("--clients", type=int, default=8, help="concurrent clients (8)")
    parser.add_argument("--times", type=int, default=4, help="faults per run (4)")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    return parser.parse_args(arguments)


def campaign(options: argparse.Namespace, console: Console) -> list[str]:
    """Do all runs, print a row for each and return those that did not pass."""
    verdicts = run_all(console, options)
    Console(highlight=False, width=max(console.width, 140)).print(table_of(verdicts))
    console.print(HOW_TO_READ, soft_wrap=True)
    return [f"{v.dtype} {v.fault} did not pass" for v in verdicts if v.wrongs]


def main(arguments: Sequence[str]) -> int:
    """Run and return the exit code."""
    return run_campaign(parse(arguments), __doc__, campaign)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

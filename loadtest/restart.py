"""`python -m loadtest.restart`: restart every process of a fleet under live streams.

A fleet of one server, one prefill and one decode worker answers the same requests repeatedly, over
SSE and WebSocket, while `triolet restart` replaces every process. Exit code 0 if every stream ended
properly with exactly the tokens of the undisturbed run, every process is a new one, streams were
live at each step and no block was left behind; 1 if not; 2 if nothing could run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import trio

from .campaign.answers import draw_asks, lengthened
from .campaign.client import Story, ask_all, tell
from .campaign.faults import blocks_when_settled, violations_now, wait_whole
from .harness.campaign import as_table, campaign_parser, run_campaign
from .harness.progress import progress
from .harness.servers import (
    FleetLog,
    attempts_of,
    is_gone,
    running_server,
    seconds_of,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from rich.console import Console
    from rich.table import Table

    from .campaign.answers import Answer, Ask

SERVE_OPTIONS = (
    *("--prefill", "1", "--decode", "1", "--log-level", "info"),
    # Workers do not wait for their streams, which must therefore move. The old server waits.
    *("--set", "worker.drain_timeout_s=0.5", "--set", "server.drain_timeout_s=120"),
)
RESTART_DEADLINE_S = 400.0
"""Five processes restart one after the other while the streams keep the machine busy."""
TOLD_TO_COME_AGAIN = "draining"
"""Error code of a draining server for a new request. The client retries on the next server."""
HOW_TO_READ = """\
live       streams that were running when the step began
moved      attempts that a drained worker handed over
silence    longest time without a new token in a stream that ran during the step, s"""


class Step(NamedTuple):
    """A step of the restart, from the supervisor's log.

    Attributes:
      name: name of the process.
      move: action on it.
      at: time on Trio's clock.
    """

    name: str
    move: str
    at: float


@dataclass(slots=True)
class Outcome:
    """Result of a run.

    Attributes:
      stories: stories of all requests during the restart.
      told_to_come_again: requests that a draining server refused and the next one answered.
      steps: steps of the restart.
      moved: times at which drained workers handed over attempts, on Trio's clock.
      several_attempts: requests with more than one attempt.
      wrongs: descriptions of all failed checks.
      took_s: duration of the restart.
    """

    stories: list[Story] = field(default_factory=list)
    told_to_come_again: int = 0
    steps: list[Step] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    several_attempts: int = 0
    wrongs: list[str] = field(default_factory=list)
    took_s: float = 0.0


def long_asks(number: int, max_tokens: int, seed: int) -> list[Ask]:
    """Return streams of known lengths, over SSE and WebSocket in turn.

    The longest has `max_tokens`, and the shortest more than half of that. Streams of equal length
    would end together, and none would have to move from a worker that drains at that time.
    """
    streams = [ask for ask in draw_asks(20 * number, seed) if ask.surface != "plain"]
    sse = [ask for ask in streams if ask.surface == "sse"][: number - number // 2]
    ws = [ask for ask in streams if ask.surface == "ws"][: number // 2]
    return [
        lengthened(ask, max_tokens - n * max_tokens // (2 * number))
        for n, ask in enumerate((*sse, *ws))
    ]


async def restart_under_load(url: str, log: FleetLog, options: argparse.Namespace) -> Outcome:
    """Send all requests once undisturbed, then repeatedly while the fleet is restarted."""
    await wait_whole(url, log)
    asks = long_asks(options.streams, options.max_tokens, options.seed)
    calm = await ask_all(url, asks, options.streams, lambda _: None)
    reference = {story.ask.number: story.answer for story in calm if story.answer is not None}
    outcome = Outcome()
    outcome.wrongs += [f"undisturbed, {s.ask.name}: {s.failure}" for s in calm if s.failure]
    before = log.pids()
    epoch_s = time.time() - trio.current_time()

    is_done = trio.Event()
    numbers = count()

    async def client(own: Sequence[Ask]) -> None:
        for ask in own:
            if is_done.is_set():
                return
            name = f"{ask.name}-{next(numbers)}"
            await _tell_until_begun(url, Story(replace(ask, name=name)), outcome)

    async with trio.open_nursery() as nursery:
        for first in range(options.streams):
            own = asks[first:] + asks[:first]
            nursery.start_soon(client, own * 1000)
        progress(f"{len(calm)} streams finished undisturbed; now the fleet is restarted")
        await trio.sleep(options.lead_s)
        began = trio.current_time()
        outcome.wrongs += await _restart(url)
        outcome.took_s = trio.current_time() - began
        is_done.set()
    _judge(outcome, reference, log, before, epoch_s)
    if (left := await blocks_when_settled(url)).leased:
        outcome.wrongs.append(f"blocks are still leased: {left}")
    outcome.wrongs += await violations_now(url) or []
    return outcome


async def _tell_until_begun(url: str, story: Story, outcome: Outcome) -> None:
    while True:
        await tell(url, story, retries_broken=False)
        if story.arrivals or TOLD_TO_COME_AGAIN not in (story.failure or ""):
            break
        outcome.told_to_come_again += 1
    outcome.stories.append(story)


async def _restart(url: str) -> list[str]:
    """Run `triolet restart`; return what went wrong."""
    program = str(Path(sys.executable).with_name("triolet"))
    with trio.move_on_after(RESTART_DEADLINE_S):
        done = await trio.run_process(
            [program, "restart", "--port", str(urlsplit(url).port)],
            check=False,
            capture_stdout=True,
            stderr=subprocess.STDOUT,
        )
        if done.returncode == 0:
            return []
        said = done.stdout.decode(errors="replace").strip().splitlines()[-1:]
        return [f"the restart exited with code {done.returncode}: {''.join(said)}"]
    return [f"the restart did not end within {RESTART_DEADLINE_S:.0f} s"]


def _judge(
    outcome: Outcome,
    reference: Mapping[int, Answer],
    log: FleetLog,
    before: Mapping[str, int],
    epoch_s: float,
) -> None:
    wrongs = outcome.wrongs
    for story in outcome.stories:
        name = f"{story.ask.name} ({story.ask.surface})"
        if story.answer is None:
            wrongs.append(f"{name} failed: {story.failure}")
        elif difference := story.answer.differs_from(reference[story.ask.number]):
            wrongs.append(f"{name} differs in {difference}")
    after = log.pids()
    wrongs += [
        f"{name} is the same process as before"
        for name, pid in before.items()
        if after[name] == pid or not is_gone(pid)
    ]
    outcome.steps = [
        Step(entry["name"], entry["move"], seconds_of(entry) - epoch_s)
        for entry in log.of("restart_step")
    ]
    outcome.moved = [
        seconds_of(entry) - epoch_s for entry in log.of("attempt_ended", reason="drain")
    ]
    attempts = attempts_of(log.entries())
    outcome.several_attempts = sum(attempts.get(s.ask.name, 1) > 1 for s in outcome.stories)
    if not outcome.several_attempts:
        wrongs.append("no stream had to move, so the run proves nothing")
    wrongs += [
        f"no stream was live when {step.name} began to {step.move}, so the run proves nothing"
        for step in outcome.steps
        if not any(story.was_alive_at(step.at) for story in outcome.stories)
    ]


def table_of(outcome: Outcome) -> Table:
    """Return one row per step."""
    ends = [step.at for step in outcome.steps[1:]]
    if outcome.steps:
        ends.append(outcome.steps[0].at + outcome.took_s)
    rows = []
    for step, end in zip(outcome.steps, ends, strict=True):
        live = [story for story in outcome.stories if story.was_alive_at(step.at)]
        through = [s for s in outcome.stories if s.arrivals and s.arrivals[-1] > step.at > 0]
        through = [s for s in through if s.sent_at < end]
        silence_s = max((_silence_s(story, step.at, end) for story in through), default=0.0)
        moved = sum(step.at <= at < end for at in outcome.moved)
        row = [step.name, step.move.replace("_", " "), f"{end - step.at:.1f}"]
        rows.append([*row, str(len(live)), str(moved), f"{silence_s:.2f}"])
    columns = ("process", "step", "seconds", "live", "moved", "silence")
    return as_table("a restart of every process under live streams", columns, rows, num_texts=2)


def _silence_s(story: Story, begin: float, end: float) -> float:
    """Return the longest time between two arrivals that overlaps a step."""
    pairs = zip(story.arrivals, story.arrivals[1:], strict=False)
    return max((b - a for a, b in pairs if b > begin and a < end), default=0.0)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = campaign_parser("restart", "Restart every process of a fleet under live streams.")
    parser.add_argument("--streams", type=int, default=20, help="concurrent streams (20)")
    parser.add_argument("--max-tokens", type=int, default=400, help="tokens of each stream (400)")
    parser.add_argument("--lead-s", type=float, default=2.0, help="seconds before the restart (2)")
    return parser.parse_args(arguments)


def campaign(options: argparse.Namespace, console: Console) -> list[str]:
    """Restart a fleet, print each step and return what was wrong."""
    log = FleetLog(options.out / "server.log")
    with running_server([*SERVE_OPTIONS, *options.serve], log.path) as url:
        outcome = trio.run(restart_under_load, url, log, options)
    console.print(table_of(outcome))
    console.print(HOW_TO_READ, soft_wrap=True)
    console.print(
        f"{len(outcome.stories)} streams in {outcome.took_s:.0f} s of restart, "
        f"{outcome.several_attempts} of them moved; {outcome.told_to_come_again} requests "
        f"were told to retry; {len(outcome.wrongs)} wrong"
    )
    return outcome.wrongs


def main(arguments: Sequence[str]) -> int:
    """Run and return the exit code."""
    return run_campaign(parse(arguments), __doc__, campaign)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

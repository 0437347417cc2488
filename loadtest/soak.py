"""`python -m loadtest.soak`: run all kinds of clients and faults concurrently, for minutes.

Some clients read streams over SSE and WebSocket and plain answers, others disconnect early, and
others stop reading. At intervals a worker is killed, stopped or drained. The fleet is audited
throughout, and every complete answer is compared with that of an undisturbed run. Exit code 0 if
nothing was wrong, 1 if something was, 2 if nothing could run.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import count, cycle
from random import Random
from typing import TYPE_CHECKING

import trio

from .campaign.answers import draw_asks
from .campaign.client import Story, ask_all, tell
from .campaign.faults import blocks_when_settled, inject, violations_now, wait_whole
from .campaign.misbehaving import cut_one, stall
from .harness.campaign import as_table, campaign_parser, run_campaign
from .harness.servers import (
    FleetLog,
    HasNotHappenedError,
    attempts_of,
    running_server,
    wait_until,
)
from .harness.statistics import milliseconds

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from rich.console import Console
    from rich.table import Table

    from .campaign.answers import Answer
    from .campaign.faults import Injected


FAULTS = ("decode-kill", "prefill-kill", "decode-stop", "decode-drain", "prefill-drain")
CUTTERS = 2
CUT_PAUSE_S = 0.2
STALL_EVERY_S = 5.0
STALL_MAX_TOKENS = 900
"""Tokens that exceed the kernel's buffers: with 20 alternatives a token takes two kilobytes."""
STALL_GRACE_S = 30.0
"""Time in addition to the stall timeout, for the stream's start and end on a busy machine."""
AUDIT_EVERY_S = 1.0
JITTER = 0.25
"""Random share of the time between two faults, so that faults are not in step with heartbeats."""


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """Size of a soak.

    Attributes:
      seconds: duration of load with faults.
      fault_every_s: time between two faults.
      readers: number of clients that read to the end.
      asks: number of different requests.
      seed: random seed.
      stall_timeout_s: the server's stall timeout.
    """

    seconds: float
    fault_every_s: float
    readers: int
    asks: int
    seed: int
    stall_timeout_s: float


class Soak:
    """A soak.

    Args:
      url: address of the server.
      log: log of the fleet.
      plan: size of the soak.
      say: called with a line for each fault.

    Attributes:
      done: counts of actions by name.
      injected: the injected faults.
      wrongs: descriptions of what was wrong.
      silences_s: the longest silence of each stream.
    """

    def __init__(self, url: str, log: FleetLog, plan: SoakPlan, say: Callable[[str], None]) -> None:
        self.done: Counter[str] = Counter()
        self.injected: list[Injected] = []
        self.wrongs: list[str] = []
        self.silences_s: list[float] = []
        self._url = url
        self._log = log
        self._plan = plan
        self._say = say
        self._asks = draw_asks(plan.asks, plan.seed)
        self._reference: dict[int, Answer] = {}
        self._over = trio.Event()

    async def run(self) -> None:
        """Run the soak."""
        await wait_whole(self._url, self._log)
        stories = await ask_all(self._url, self._asks, self._plan.readers, lambda _: None)
        self.wrongs += [f"in peace: {s.ask.name}: {s.failure}" for s in stories if not s.answer]
        self._reference = {s.ask.number: s.answer for s in stories if s.answer}
        async with trio.open_nursery() as nursery:
            for number in range(self._plan.readers):
                nursery.start_soon(self._read, number)
            for number in range(CUTTERS):
                nursery.start_soon(self._leave, number)
            nursery.start_soon(self._stall)
            nursery.start_soon(self._break_things)
            nursery.start_soon(self._audit)
            await trio.sleep(self._plan.seconds)
            self._over.set()
        await self._look_at_rest()

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not beyond the end of the soak."""
        with trio.move_on_after(seconds):
            await self._over.wait()

    async def _read(self, number: int) -> None:
        """Send one request after the other and compare each answer."""
        rng = Random(f"{self._plan.seed} reader {number}")
        for turn in count():
            if self._over.is_set():
                return
            # The log identifies requests by their names, so each needs a new one.
            story = Story(replace(rng.choice(self._asks), name=f"read-{number}-{turn}"))
            await tell(self._url, story, retries_broken=False)
            self._judge(story)

    def _judge(self, story: Story) -> None:
        ask = story.ask
        self.done[f"answers read: {ask.surface}"] += 1
        expected = self._reference.get(ask.number)
        if story.answer is None:
            self.wrongs.append(f"{ask.name} ({ask.surface}) failed: {story.failure}")
        elif expected and (difference := story.answer.differs_from(expected)):
            self.wrongs.append(f"{ask.name} ({ask.surface}) differs in {difference}")
        if ask.surface != "plain":
            self.silences_s.append(story.longest_silence_s)

    async def _leave(self, number: int) -> None:
        """Start requests and close their sockets."""
        rng = Random(f"{self._plan.seed} cutter {number}")
        for turn in count():
            if self._over.is_set():
                return
            await cut_one(self._url, f"cut-{number}-{turn}", rng)
            self.done["requests cut by the client"] += 1
            await self._pause(CUT_PAUSE_S)

    async def _stall(self) -> None:
        """Stop reading. The server must close the connection, also during faults."""
        async with trio.open_nursery() as nursery:
            for number in count():
                if self._over.is_set():
                    return
                nursery.start_soon(self._stall_once, number)
                await self._pause(STALL_EVERY_S)

    async def _stall_once(self, number: int) -> None:
        client = await stall(self._url, number, STALL_MAX_TOKENS)
        self.done["clients that stopped reading"] += 1
        name = f"stalled-{number}"

        def ends() -> list[str]:
            lines = self._log.of("request_ended", client_request_id=name)
            return [line["outcome"] for line in lines]

        try:
            timeout_s = self._plan.stall_timeout_s + STALL_GRACE_S
            await wait_until(lambda: bool(ends()), timeout_s, f"{name} is disconnected")
        except HasNotHappenedError as error:
            self.wrongs.append(f"{error} ({client.kind})")
        else:
            if ends() != ["stalled"]:
                self.wrongs.append(f"{name} ({client.kind}) ended as {ends()}")
        await trio.aclose_forcefully(client.stream)

    async def _break_things(self) -> None:
        """Inject one fault after the other, each to its end."""
        rng = Random(f"{self._plan.seed} faults")
        for fault in cycle(FAULTS):
            stretch = rng.uniform(1 - JITTER, 1 + JITTER)
            await self._pause(self._plan.fault_every_s * stretch)
            if self._over.is_set():
                return
            try:
                injected = await inject(self._log, fault, rng)
                await wait_whole(self._url, self._log)
            except HasNotHappenedError as error:
                self.wrongs.append(f"{fault}: {error}")
                continue
            self.injected.append(injected)
            self._say(f"{fault}: {injected.victim}, {injected.proof}; whole again")

    async def _audit(self) -> None:
        """Audit the fleet repeatedly."""
        while not self._over.is_set():
            await self._note_audit("under load")
            await self._pause(AUDIT_EVERY_S)

    async def _note_audit(self, when: str) -> None:
        violations = await violations_now(self._url)
        self.done["audits"] += 1
        self.wrongs += [f"audit {when}: {violation}" for violation in violations]

    async def _look_at_rest(self) -> None:
        blocks = await blocks_when_settled(self._url)
        if not blocks.is_all_free:
            self.wrongs.append(f"blocks are still leased at the end: {blocks}")
        await self._note_audit("at rest")
        attempts = attempts_of(self._log.entries())
        self.done["requests with more than one attempt"] = sum(
            times > 1 for times in attempts.values()
        )
        if not self.injected and self._plan.seconds > 2 * self._plan.fault_every_s:
            self.wrongs.append("no fault happened, so the run proves nothing")


STALL_TIMEOUT_S = 3.0
"""Shorter than the default, so that many clients are disconnected."""
SERVE_OPTIONS = (
    *("--prefill", "2", "--decode", "2", "--max-num-seqs", "8", "--kv-pool", "64MiB"),
    *("--set", f"server.stall_timeout_s={STALL_TIMEOUT_S}", "--log-level", "info"),
)


def table_of(soak: Soak) -> Table:
    """Return a table with a row per kind of action."""
    rows = [[what, str(times)] for what, times in soak.done.items()]
    faults = Counter(injected.fault for injected in soak.injected)
    rows += [[f"faults: {fault}", str(times)] for fault, times in sorted(faults.items())]
    if soak.silences_s:
        shown = milliseconds(soak.silences_s, 50, 99, 100)
        rows.append(["longest silence of a stream, ms: p50, p99, max", ", ".join(shown)])
    return as_table("what the soak did", ("", ""), rows)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = campaign_parser("soak", "Run all kinds of traffic while workers are killed.")
    parser.add_argument("--minutes", type=float, default=5, help="minutes of load with faults (5)")
    parser.add_argument("--every", type=float, default=20, help="seconds between faults (20)")
    parser.add_argument("--readers", type=int, default=6, help="clients that read to the end (6)")
    parser.add_argument("--asks", type=int, default=60, help="different requests (60)")
    return parser.parse_args(arguments)


def campaign(options: argparse.Namespace, console: Console) -> list[str]:
    """Soak a fleet, print what was done and return what was wrong."""
    plan = SoakPlan(
        seconds=options.minutes * 60,
        fault_every_s=options.every,
        readers=options.readers,
        asks=options.asks,
        seed=options.seed,
        stall_timeout_s=STALL_TIMEOUT_S,
    )
    log = FleetLog(options.out / "server.log")
    with running_server([*SERVE_OPTIONS, *options.serve], log.path) as url:
        soak = Soak(url, log, plan, lambda line: console.print(line, soft_wrap=True))
        trio.run(soak.run)
    faults = [*map(asdict, soak.injected)]
    report = {"done": soak.done, "wrongs": soak.wrongs, "injected": faults}
    (options.out / "soak.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    console.print(table_of(soak))
    return soak.wrongs


def main(arguments: Sequence[str]) -> int:
    """Run and return the exit code."""
    return run_campaign(parse(arguments), __doc__, campaign)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

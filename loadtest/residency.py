"""`python -m loadtest.residency`: four models with memory for two, random traffic, and kills.

Clients send requests to random models, and at intervals a worker or control is killed. Every answer
is compared with that of an undisturbed run. The memory of the models and their residency times are
checked throughout. Exit code 0 if nothing was wrong, 1 if something was, 2 if nothing could run.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import count, pairwise
from random import Random
from typing import TYPE_CHECKING, Any, Final

import trio
from safetensors.torch import load_file, save_file

from .campaign.answers import draw_asks
from .campaign.client import Story, tell
from .campaign.faults import blocks_when_settled, violations_now
from .harness.campaign import ROOT, as_table, campaign_parser, run_campaign
from .harness.control import admin_of
from .harness.servers import FleetLog, bytes_beside_templates, is_gone, running_server, wait_until
from .harness.statistics import milliseconds

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table

    from .campaign.answers import Answer, Ask

MIB: Final = 1024 * 1024
DEMO: Final = ROOT / "triolet" / "demo"
NAMES: Final = ("a", "b", "c", "d")
NUM_RESIDENT: Final = 2
"""Number of models that fit into memory at the same time."""
ROOM: Final = 1.2
"""Factor on the measured memory of that many models: their buffers grow with load."""
SCALE: Final = 1.01
"""Factor between the last norms of two models, which makes their tokens differ."""
MIN_RESIDENCY_S: Final = 2.0
"""Minimum residency, shorter than the default of a minute, for many changes within minutes."""
WATCH_S: Final = 0.25
UNSEEN: Final = -math.inf
"""Assumed load time of a model if its loading was not observed."""
GONE_S: Final = 30.0
CALM_S: Final = 120.0
"""Timeout of the first request to a model, on a busy machine."""
SERVE_OPTIONS: Final = (
    *("--kv-pool", "16MiB", "--max-num-seqs", "8", "--log-level", "info"),
    *("--set", f"control.min_residency_s={MIN_RESIDENCY_S}"),
    *("--set", "control.measure_s=1"),
)


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """Size of a campaign.

    Attributes:
      seconds: duration of the load.
      kill_every_s: time between two kills.
      clients: number of concurrent clients.
      asks: number of different requests per model.
      seed: random seed.
    """

    seconds: float
    kill_every_s: float
    clients: int
    asks: int
    seed: int


class Residency:
    """A campaign.

    Args:
      url: address of the server.
      log: log of the fleet.
      plan: size of the campaign.
      say: called with a line for each kill.

    Attributes:
      done: counts of actions by name.
      loads: number of loads of each model.
      wrongs: descriptions of what was wrong.
      first_tokens_s: time to first token of each answer, including waking.
      most_bytes: peak memory of all models.
      budget_bytes: memory limit of all models.
    """

    def __init__(
        self, url: str, log: FleetLog, plan: ResidencyPlan, say: Callable[[str], None]
    ) -> None:
        self.done: Counter[str] = Counter()
        self.loads: Counter[str] = Counter()
        self.wrongs: list[str] = []
        self.first_tokens_s: list[float] = []
        self.most_bytes = self.budget_bytes = 0
        self._url = url
        self._log = log
        self._plan = plan
        self._say = say
        self._asks = {
            name: [_of_model(ask, name) for ask in draw_asks(plan.asks, plan.seed)]
            for name in NAMES
        }
        self._reference: dict[tuple[str, int], Answer] = {}
        self._loaded_since = dict.fromkeys(NAMES, UNSEEN)
        self._over = trio.Event()

    async def run(self) -> None:
        """Run the campaign."""
        for name in NAMES:
            await self._ask_in_peace(name)
        self._look_apart()
        async with trio.open_nursery() as nursery:
            for number in range(self._plan.clients):
                nursery.start_soon(self._ask, number)
            nursery.start_soon(self._kill)
            nursery.start_soon(self._watch)
            await trio.sleep(self._plan.seconds)
            self._over.set()
        await self._look_at_rest()

    async def _ask_in_peace(self, name: str) -> None:
        for ask in self._asks[name]:
            story = Story(ask)
            await tell(self._url, story, retries_broken=False)
            if story.answer is None:
                self.wrongs.append(f"in peace: {name}, {ask.name}: {story.failure}")
            else:
                self._reference[name, ask.number] = story.answer

    def _look_apart(self) -> None:
        """Check that the answers of the models differ; else comparing them would prove nothing."""
        for one, other in pairwise(NAMES):
            answers = [
                (self._reference.get((one, n)), self._reference.get((other, n)))
                for n in range(self._plan.asks)
            ]
            if not any(a and b and a.differs_from(b) for a, b in answers):
                self.wrongs.append(f"{one} and {other} answer the same; the run proves nothing")

    async def _ask(self, number: int) -> None:
        rng = Random(f"{self._plan.seed} client {number}")
        for turn in count():
            if self._over.is_set():
                return
            name = rng.choice(NAMES)
            ask = replace(rng.choice(self._asks[name]), name=f"{name}-{number}-{turn}")
            story = Story(ask)
            await tell(self._url, story, retries_broken=False)
            self._judge(name, story)

    def _judge(self, name: str, story: Story) -> None:
        self.done[f"answers of {name}"] += 1
        if story.answer is None:
            self.wrongs.append(f"{story.ask.name} failed: {story.failure}")
        else:
            expected = self._reference.get((name, story.ask.number))
            if expected and (difference := story.answer.differs_from(expected)):
                self.wrongs.append(f"{story.ask.name} differs in {difference}")
        if story.arrivals:
            self.first_tokens_s.append(story.arrivals[0] - story.sent_at)

    async def _kill(self) -> None:
        """Kill a worker of a model or control at intervals."""
        rng = Random(f"{self._plan.seed} kills")
        while True:
            with trio.move_on_after(self._plan.kill_every_s * rng.uniform(0.75, 1.25)):
                await self._over.wait()
            if self._over.is_set():
                return
            alive = {
                name: pid
                for name, pid in self._log.pids().items()
                if not name.startswith("server") and not is_gone(pid)
            }
            victim = rng.choice(sorted(alive))
            os.kill(pid := alive[victim], signal.SIGKILL)
            await wait_until(lambda: is_gone(pid), GONE_S, f"{victim} is gone")  # noqa: B023
            self.done[f"kills: {victim.rpartition('.')[2]}"] += 1
            self._say(f"killed {victim}, pid {pid}")

    async def _watch(self) -> None:
        """Poll control, and check the memory and the residency of each model."""
        async with admin_of(self._url) as admin:
            while not self._over.is_set():
                shown = await admin.models()
                if shown is None:
                    self.done["polls of control while it was down"] += 1
                    self._loaded_since = dict.fromkeys(NAMES, UNSEEN)
                else:
                    self._note(shown)
                await trio.sleep(WATCH_S)

    def _note(self, shown: dict[str, Any]) -> None:
        self.budget_bytes = shown["budget_bytes"]
        workers = {
            f"{worker['name']} ({model['state']})": worker["pid"]
            for model in shown["models"]
            for worker in model["workers"]
            if worker["pid"]
        }
        accounted, found = shown["held_bytes"], bytes_beside_templates(workers.values())
        self.most_bytes = max(self.most_bytes, accounted, found)
        if max(accounted, found) > self.budget_bytes:
            self.wrongs.append(
                f"of {self.budget_bytes / MIB:.0f} MiB control counts {accounted / MIB:.0f}, "
                f"{found / MIB:.0f} are used: {', '.join(workers)}"
            )
        now = trio.current_time()
        for model in shown["models"]:
            name, state = model["name"], model["state"]
            since = self._loaded_since.get(name)
            if state in ("loading", "warm", "serving"):
                if since is None:
                    self._loaded_since[name] = now
                    self.loads[name] += 1
            elif state in ("draining", "sleeping", "staged") and since is not None:
                del self._loaded_since[name]
                stayed_s = now - since
                # It was noticed up to one poll late, and its end up to one poll late too.
                if stayed_s < MIN_RESIDENCY_S - 2 * WATCH_S:
                    self.wrongs.append(f"{name} was evicted after {stayed_s:.1f} s")

    async def _look_at_rest(self) -> None:
        blocks = await blocks_when_settled(self._url)
        if not blocks.is_all_free:
            self.wrongs.append(f"blocks are still leased at the end: {blocks}")
        self.wrongs += [f"audit at rest: {one}" for one in await violations_now(self._url)]
        seldom = [name for name in NAMES if not self.loads[name]]
        if seldom:
            self.wrongs.append(f"never loaded under load: {', '.join(seldom)}")


def _of_model(ask: Ask, name: str) -> Ask:
    return replace(ask, body=ask.body | {"model": name})


def write_models(folder: Path) -> dict[str, Path]:
    """Write models with one shape and different weights. Return their directories by name."""
    made = {}
    weights = load_file(DEMO / "model.safetensors")
    [norm] = [name for name in weights if name.endswith("model.norm.weight")]
    for number, name in enumerate(NAMES):
        made[name] = folder / name
        made[name].mkdir(parents=True, exist_ok=True)
        for path in DEMO.iterdir():
            if path.name not in ("model.safetensors", "page.json"):
                (made[name] / path.name).write_bytes(path.read_bytes())
        changed = weights | {norm: weights[norm] * SCALE**number}
        save_file(changed, made[name] / "model.safetensors", metadata={"format": "pt"})
    return made


def measured_bytes(models: dict[str, Path], log: Path, options: Sequence[str]) -> int:
    """Return the memory of one model under load, as measured by control."""
    name = NAMES[0]
    words = [*SERVE_OPTIONS, *options, f"{name}={models[name]}", f"b={models['b']}"]
    words += ["--set", "models.b.start=false"]

    async def measure(url: str) -> int:
        for ask in draw_asks(8, 1):
            await tell(url, Story(_of_model(ask, name)), retries_broken=False)
        async with admin_of(url) as admin:
            with trio.fail_after(CALM_S):
                await trio.sleep(2.0)  # two measurements by control
                shown = await admin.models()
        assert shown is not None, "no process was killed"
        return next(int(model["bytes"]) for model in shown["models"] if model["name"] == name)

    with running_server(words, log) as url:
        return trio.run(measure, url)


def table_of(campaign: Residency) -> Table:
    """Return a table with a row per kind of action."""
    rows = [[what, str(times)] for what, times in sorted(campaign.done.items())]
    rows += [[f"loads of {name}", str(campaign.loads[name])] for name in NAMES]
    held, budget = campaign.most_bytes / MIB, campaign.budget_bytes / MIB
    rows.append(["peak memory, of the budget", f"{held:.0f} of {budget:.0f} MiB"])
    if campaign.first_tokens_s:
        shown = milliseconds(campaign.first_tokens_s, 50, 99, 100)
        rows.append(["first token, ms: p50, p99, max", ", ".join(shown)])
    return as_table("four models, memory for two", ("", ""), rows)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = campaign_parser("residency", "Serve four models with memory for two.")
    parser.add_argument("--minutes", type=float, default=5, help="minutes of load (5)")
    parser.add_argument("--every", type=float, default=10, help="seconds between kills (10)")
    parser.add_argument("--clients", type=int, default=3, help="concurrent clients (3)")
    parser.add_argument("--asks", type=int, default=12, help="different requests per model (12)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, console: Console) -> Residency:
    """Measure one model, then run the campaign with memory for `NUM_RESIDENT`."""
    models = write_models(options.out / "models")
    one_bytes = measured_bytes(models, options.out / "measured.log", options.serve)
    budget = int(NUM_RESIDENT * ROOM * one_bytes)
    log = FleetLog(options.out / "server.log")
    words = [*SERVE_OPTIONS, *options.serve, "--set", f"control.memory_bytes={budget}"]
    for place, (name, path) in enumerate(models.items()):
        words.append(f"{name}={path}")
        if place >= NUM_RESIDENT:
            words += ["--set", f"models.{name}.start=false"]
    plan = ResidencyPlan(
        seconds=options.minutes * 60,
        kill_every_s=options.every,
        clients=options.clients,
        asks=options.asks,
        seed=options.seed,
    )
    with running_server(words, log.path) as url:
        campaign = Residency(url, log, plan, lambda line: console.print(line, soft_wrap=True))
        trio.run(campaign.run)
    report = {
        "plan": asdict(plan),
        "done": campaign.done,
        "loads": campaign.loads,
        "wrongs": campaign.wrongs,
        "budget_bytes": budget,
        "most_bytes": campaign.most_bytes,
    }
    (options.out / "residency.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    return campaign


def campaign(options: argparse.Namespace, console: Console) -> list[str]:
    """Run the campaign, print what was done and return what was wrong."""
    done = run(options, console)
    console.print(table_of(done))
    return done.wrongs


def main(arguments: Sequence[str]) -> int:
    """Run and return the exit code."""
    return run_campaign(parse(arguments), __doc__, campaign)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

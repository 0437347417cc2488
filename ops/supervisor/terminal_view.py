"""Terminal output of `triolet serve`: progress bars during the start, then a table, then events.

Log lines of the processes are printed above the bars. Each line after the start has a timestamp.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from datetime import datetime, timedelta
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import trio
from rich.console import Console, Group
from rich.padding import Padding
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from triolet.plain_text import one_line, printable
from triolet.status import ControlReady, ServerReady, WorkerReady
from triolet.status import Progress as ProgressReport
from triolet.units import show_count, show_size

from ..episodes import Episodes
from ..models.model_directory import shown_path
from .restart_policy import GiveUp, Restart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from rich.console import RenderableType

    from triolet.status import Report

    from .plan import FleetPlan
    from .restart_policy import Ending, Verdict

ACCENT: Final = "bright_magenta"
LEVEL_STYLES: Final = {"warning": "yellow", "error": "red", "critical": "bold red"}
UNSHOWN_KEYS: Final = frozenset({"event", "level", "timestamp", "process", "exception"})


class TerminalView:
    """Shows a fleet in a terminal.

    Args:
      plan: plan of the fleet.
      console: console to print to; None for stdout.
      clock: returns the local time.
    """

    def __init__(
        self,
        plan: FleetPlan,
        console: Console | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._plan = plan
        self._clock = clock
        is_debug = plan.settings.process.log_level == "debug"
        hold_s = plan.settings.supervisor.episode_hold_s
        self._episodes = None if is_debug else Episodes(hold_s)
        self._waits = trio.Event()
        self._console = Console(highlight=False) if console is None else console
        width = max(map(len, plan.process_names))
        self._bars = Progress(
            SpinnerColumn(style=ACCENT, finished_text="[green]✓"),
            TextColumn(f"{{task.fields[process]:<{width}}}"),
            TextColumn("[dim]{task.description:<12}"),
            BarColumn(bar_width=28, complete_style=ACCENT, finished_style="green"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._pids: dict[str, int] = {}
        self._workers: dict[str, WorkerReady] = {}
        self._began = 0.0
        self._is_serving = False
        self._is_stopping = False

    def __enter__(self) -> TerminalView:
        title = Text.assemble(("Triolet ", f"bold {ACCENT}"), (version("triolet"), "dim"))
        self._console.print(Text(), title, Text(), sep="\n")
        for name in self._plan.process_names:
            self._tasks[name] = self._bars.add_task("starting", total=None, process=name)
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bars.stop()
        self._tell_held(math.inf)
        if self._is_serving:
            self._news("dim", "Stopped.")

    def started(self, name: str, pid: int) -> None:
        if not self._pids:
            self._began = trio.current_time()
        self._pids[name] = pid
        if name in self._tasks:
            self._bars.reset(self._tasks[name], description="starting", total=None)

    def reported(self, name: str, report: Report) -> None:
        # A spare has no bar, because it is not part of the start.
        task = self._tasks.get(name)
        match report:
            case ProgressReport(stage, done, total) if task is not None:
                self._bars.update(
                    task, description=stage.replace("_", " "), completed=done, total=total
                )
            case WorkerReady() | ServerReady() | ControlReady():
                if task is not None:
                    self._bars.update(task, description="ready", completed=1, total=1)
                if isinstance(report, WorkerReady):
                    self._workers[name] = report
                if self._is_serving:
                    is_new = "has started" if task is None else "has restarted"
                    self._news("green", f"{name} {is_new} (pid {self._pids[name]})")

    def logged(self, name: str, line: bytes) -> None:
        """Print a line from the stderr of a process, unless it is part of an episode."""
        entry = entry_of(line)
        at = self._now() if entry is None else time_of(entry, self._now())
        is_held, told = False, None
        if self._episodes is not None and entry is not None:
            is_held, told = self._episodes.take(name, entry, at, trio.current_time())
            self._waits.set()
        if told is not None:
            self._console.print(Text(f"{at} {one_line(told)}", style="yellow"))
        if not is_held:
            self._console.print(log_line(name, line, at))

    async def run(self) -> None:
        """Print the summaries of episodes when they are due."""
        while self._episodes is not None:
            with trio.move_on_at(self._episodes.due_at):
                await self._waits.wait()
            self._waits = trio.Event()
            self._tell_held(trio.current_time())

    def _tell_held(self, now: float) -> None:
        for line in [] if self._episodes is None else self._episodes.due(now):
            self._news("yellow", one_line(line))

    def ended(self, name: str, ending: Ending, verdict: Verdict | None) -> None:
        if self._episodes is not None:
            self._episodes.ended(name)
        match verdict:
            case Restart(was_asked_for=True):
                self._news("dim", f"{name} was drained and has exited; restarting it")
            case Restart():
                self._news("yellow", f"{name} {ending}; {self._next_start(verdict)}")
            case None if self._is_serving and not self._is_stopping:
                self._news("dim", f"{name} has exited as requested")
            case GiveUp() | None:
                pass  # `failed` or `stopping` reports it

    def _next_start(self, verdict: Restart) -> str:
        if verdict.num_deaths < 2:
            return "restarting it at once"
        at = self._clock() + timedelta(seconds=verdict.delay_s)
        return (
            f"crash {verdict.num_deaths} in {verdict.within_s:.1f} s: restarting it at "
            f"{at:%H:%M:%S}, in {verdict.delay_s:g} s (the delay doubles until it runs for "
            f"{self._plan.settings.supervisor.stable_s:g} s)"
        )

    def failed(self, model: str, reason: GiveUp) -> None:
        for name in [name for name in self._tasks if name.startswith(f"{model}.")]:
            self._bars.update(self._tasks[name], description="failed", completed=0, total=1)
            self._pids.pop(name, None)
            self._workers.pop(name, None)
        self._news("red", f"Model {model} has failed, the others keep running: {reason.message}")

    def stopping(self) -> None:
        self._is_stopping = True
        self._bars.stop()
        if self._is_serving:
            self._news(
                "dim",
                f"Stopping: running requests may finish within "
                f"{self._plan.settings.server.drain_timeout_s:g} s. Ctrl-C again stops at once.",
            )

    def serving(self, url: str) -> None:
        self._bars.stop()
        self._is_serving = True
        self._console.print(self._model_lines(), Text(), self._processes(), self._places(url))
        took_s = trio.current_time() - self._began
        self._console.print(
            Text.assemble(
                ("Ready", "bold green"), (f" after {took_s:.1f} s. Press Ctrl-C to stop.", "dim")
            ),
            Text(),
            sep="\n",
        )

    def _news(self, style: str, text: str) -> None:
        self._console.print(Text(f"{self._now()} {text}", style=style))

    def _now(self) -> str:
        return f"{self._clock():%H:%M:%S}"

    def _model_lines(self) -> RenderableType:
        lines = Table.grid(Column(style="dim", min_width=9), "", padding=(0, 2))
        for place, model in enumerate(self._plan.models):
            path = Text(str(shown_path(model.model_dir)), style="dim", overflow="fold")
            lines.add_row("Model", Text(model.settings.server.model_name, style="bold"))
            lines.add_row("", path)
            lines.add_row("", "\n".join(self._model_facts(place)))
        return Padding(lines, (0, 0, 0, 1))

    def _model_facts(self, place: int) -> list[str]:
        names = [one.name for one in self._plan.workers if one.model == place]
        workers = [self._workers[name] for name in names if name in self._workers]
        if not workers:
            return ["not running"]
        first = workers[0]
        return [
            f"{show_count(first.parameters)} parameters, {first.dtype}, context of "
            f"{first.max_model_len:,} tokens",
            pools_line(workers),
        ]

    def _processes(self) -> RenderableType:
        table = Table(
            "Process",
            Column("pid", justify="right"),
            "Device",
            Column("KV blocks", justify="right"),
            Column("Tokens", justify="right"),
            Column("Memory", justify="right"),
            "Capacity",
            box=None,
            padding=(0, 2, 0, 1),
            header_style="dim",
        )
        for name in self._plan.process_names:
            pid, worker = self._pids.get(name, "-"), self._workers.get(name)
            if worker is None:
                table.add_row(name, str(pid))
                continue
            table.add_row(
                name,
                str(pid),
                worker.device,
                f"{worker.num_blocks:,} × {worker.block_size}",
                f"{worker.num_blocks * worker.block_size:,}",
                show_size(worker.pool_bytes),
                room_for(worker),
            )
        return table

    def _places(self, url: str) -> RenderableType:
        places = Table.grid(Column(style="dim", min_width=9), "", padding=(0, 2))
        places.add_row("Chat", Text(f"{url}/", style=f"bold {ACCENT} underline"))
        places.add_row("API", Text.assemble(f"{url}/v1", ("  base_url of OpenAI clients", "dim")))
        places.add_row("Metrics", f"{url}/metrics")
        return Group(Text(), Padding(places, (0, 0, 0, 1)), Text())


def pools_line(workers: Iterable[WorkerReady]) -> str:
    """Return a line with the sizes of a model's KV pools, and the option that sets them."""
    alike = Counter((show_size(one.pool_bytes), room_for(one)) for one in workers)
    pools = [
        f"{count} {'worker' if count == 1 else 'workers'} × {size}: {room} each"
        for (size, room), count in alike.items()
    ]
    return f"KV: {'; '.join(pools)}; change with --kv-pool"


def room_for(worker: WorkerReady) -> str:
    """Return how many sequences of full length a pool holds, or the length of the one it holds."""
    tokens = worker.num_blocks * worker.block_size
    blocks_each = -(-worker.max_model_len // worker.block_size)
    sequences = worker.num_blocks // blocks_each
    if sequences == 0:
        return f"1 sequence of {tokens:,} tokens"
    noun = "sequence" if sequences == 1 else "sequences"
    return f"{sequences:,} {noun} of {worker.max_model_len:,} tokens"


def entry_of(line: bytes) -> dict[str, Any] | None:
    """Decode a log line; return None if it is not a JSON object."""
    try:
        entry = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def time_of(entry: dict[str, Any], otherwise: str) -> str:
    """Return the local time of day of a log entry, or `otherwise` if it has none."""
    try:
        return f"{datetime.fromisoformat(str(entry.get('timestamp'))).astimezone():%H:%M:%S}"
    except (ValueError, OverflowError):
        return otherwise


def log_line(name: str, line: bytes, at: str) -> Text:
    """Format a log line of a process for the terminal. Lines that are not JSON stay as they are.

    Args:
      name: name of the process.
      line: the line.
      at: time of day of the line.
    """
    entry, head = entry_of(line), (f"{at} {name:<10} ", "dim")
    if entry is None:
        return Text.assemble(head, printable(line.decode("utf-8", "replace").expandtabs()))
    rest = " ".join(
        f"{key}={json.dumps(value)}" for key, value in entry.items() if key not in UNSHOWN_KEYS
    )
    return Text.assemble(
        head,
        (
            f"{printable(str(entry.get('event', '')))} ",
            LEVEL_STYLES.get(str(entry.get("level")), ""),
        ),
        (printable(rest), "dim"),
        (printable(f"\n{entry['exception']}"), "dim") if "exception" in entry else "",
    )

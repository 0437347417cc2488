"""`python -m loadtest.bench.guess`: what guessing ahead brings, over HTTP, and what it costs.

Two whole fleets stand beside one another, one that guesses and one that does not; only one is
asked at a time, and they take turns at every question, so that whatever else the machine does
strikes both alike. Both must give the same answers.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import httpx2

from ..harness.metrics import total
from ..harness.progress import announce, progress
from ..harness.report import BENCH, Ratio, Report, describe, finish, line_of
from ..harness.servers import running_server
from ..harness.streams import CHAT, Clients, post

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from ..harness.streams import Stream

PLAIN: Final = "off"
COPY_FLOOR: Final = 1.0
"""Where text is copied it must not be slower."""
PLAIN_FLOOR: Final = 0.9
"""Where hardly anything can be guessed it may cost a little."""
BEAT_S: Final = 1.2
"""After which a worker's counters have certainly reached its server."""
TIMEOUT_S: Final = 120.0
MAX_TOKENS: Final = 220
COUNTING: Final = ("Count from 1 to 50.", "Count to 40.", "Count from 1 to 30.", "Count to 50.")
STORIES: Final = (
    "Tell me a story about a fox named Mia on the moon.",
    "Tell me a story about a bear named Tom in a forest.",
    "Tell me a story about a mouse named Lily at the sea.",
    "Tell me a story about a cat named Ben in a castle.",
)

Messages = list[dict[str, str]]


class Counts(NamedTuple):
    """What a decode worker has done."""

    steps: float
    rows: float
    proposed: float
    accepted: float

    def since(self, before: Counts) -> Counts:
        """Return what was added."""
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


NOTHING: Final = Counts(0, 0, 0, 0)


@dataclass(slots=True)
class Measured:
    """What came of one task on one fleet.

    Attributes:
      tokens_per_s: of each group of streams that ran at once.
      tokens: of all answers.
      counts: of the worker meanwhile.
    """

    tokens_per_s: list[float] = field(default_factory=list)
    tokens: int = 0
    counts: Counts = NOTHING


def ask_at_once(url: str, conversations: Sequence[Messages]) -> list[Stream]:
    """Ask greedily side by side, and read all answers."""
    more: dict[str, object] = {"max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    more["stream_options"] = {"include_usage": True}
    with closing(Clients(url)) as clients:
        streams = [clients.begin(post(CHAT, {"messages": m, **more})) for m in conversations]
        deadline = time.monotonic() + TIMEOUT_S
        if not clients.read_until(deadline, lambda: all(one.is_whole for one in streams)):
            raise TimeoutError(f"an answer did not end within {TIMEOUT_S:.0f} s")
    return streams


def text_of(stream: Stream) -> str:
    """Return what a chat said."""
    return "".join(text for _, text in _pieces(stream))


def _pieces(stream: Stream) -> list[tuple[float, str]]:
    """Return when each text of a chat came, and the text."""
    return [
        (at, text)
        for at, event in zip(stream.times, stream.events(), strict=True)
        for choice in event["choices"]
        if (text := choice["delta"].get("content"))
    ]


def counts_of(url: str) -> Counts:
    """Return what the fleet's decode worker has counted."""
    time.sleep(BEAT_S)
    metrics = httpx2.get(f"{url}/metrics", timeout=TIMEOUT_S).raise_for_status().text
    names = ("worker_steps", *(f"speculative_{what}" for what in ("rows", "proposed", "accepted")))
    return Counts(*(total(metrics, f"triolet_{name}_total", "decode") for name in names))


def tasks(url: str) -> dict[str, list[Messages]]:
    """Return conversations by task: those whose next answer stands there already, and others."""
    asked: list[Messages] = [[{"role": "user", "content": text}] for text in COUNTING]
    said = [text_of(ask_at_once(url, [messages])[0]) for messages in asked]
    copies = [
        [*messages, {"role": "assistant", "content": text}, *messages]
        for messages, text in zip(asked, said, strict=True)
    ]
    return {"copy": copies, "plain": [[{"role": "user", "content": text}] for text in STORIES]}


def measure(
    urls: dict[str, str], batches: Sequence[int], repetitions: int
) -> dict[tuple[str, int, str], Measured]:
    """Return what was measured by task, streams at once, and fleet.

    Raises:
      ValueError: two fleets gave different answers.
    """
    found: dict[tuple[str, int, str], Measured] = {}
    names = list(urls)
    for task, conversations in tasks(urls[PLAIN]).items():
        for batch in batches:
            before = {name: counts_of(url) for name, url in urls.items()}
            for repetition in range(repetitions + 1):
                turn = names[repetition % len(names) :] + names[: repetition % len(names)]
                answers = {name: _round(urls[name], conversations, batch) for name in turn}
                texts = {
                    name: [text_of(answer) for group in groups for answer in group]
                    for name, groups in answers.items()
                }
                if any(text != texts[PLAIN] for text in texts.values()):
                    raise ValueError(f"fleets answer differently: {texts}")
                for name, groups in answers.items():
                    one = found.setdefault((task, batch, name), Measured())
                    one.tokens += sum(answer.num_tokens for group in groups for answer in group)
                    if repetition:  # the first one warms up
                        one.tokens_per_s += [_rate(group) for group in groups]
            for name, url in urls.items():
                found[task, batch, name].counts = counts_of(url).since(before[name])
            speeds = {name: median(found[task, batch, name].tokens_per_s) for name in urls}
            progress(f"{task} b{batch}, tokens/s: {line_of(speeds)}")
    return found


def _round(url: str, conversations: list[Messages], batch: int) -> list[list[Stream]]:
    """Ask everything, so many at once."""
    starts = range(0, len(conversations), batch)
    return [ask_at_once(url, conversations[at : at + batch]) for at in starts]


def _rate(group: list[Stream]) -> float:
    """Return tokens per second of streams that ran at once."""
    times = [[at for at, _ in _pieces(stream)] for stream in group]
    pairs = zip(group, times, strict=True)
    # A stream whose text came all at once, as on a busy machine, shows no rate.
    return sum(one.num_tokens / (of[-1] - of[0]) for one, of in pairs if of[-1] > of[0])


def report_of(found: dict[tuple[str, int, str], Measured], machine: dict[str, Any]) -> Report:
    """Return rows and ratios."""
    rows = []
    for (task, batch, name), one in found.items():
        counts = one.counts
        rows.append(
            {
                "task": f"{task} b{batch}",
                "guesses": name,
                "tokens_per_s": round(median(one.tokens_per_s), 1),
                "tokens_per_step": round(one.tokens / max(counts.steps, 1), 2),
                "accepted_per_row": round(counts.accepted / max(counts.rows, 1), 2),
                "accepted_share": round(counts.accepted / max(counts.proposed, 1), 3),
                "samples": len(one.tokens_per_s),
            }
        )
    ratios = {
        f"{task} b{batch}: {name} vs {PLAIN}": Ratio(
            median(one.tokens_per_s) / median(found[task, batch, PLAIN].tokens_per_s),
            COPY_FLOOR if task == "copy" else PLAIN_FLOOR,
        )
        for (task, batch, name), one in found.items()
        if name != PLAIN
    }
    return Report("guess", machine, rows, ratios, {}, (("task", "guesses"), "tokens_per_s"))


def run(arguments: argparse.Namespace) -> Report:
    """Start the fleets and compare them."""
    logs = BENCH / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    machine = describe(arguments.threads)
    with ExitStack() as stack:
        urls = {
            name: stack.enter_context(_fleet(name, arguments, logs))
            for name in (PLAIN, arguments.speculate)
        }
        found = measure(urls, arguments.batches, arguments.repetitions)
    return report_of(found, machine | {"dtype": arguments.dtype, "model": arguments.model})


def _fleet(name: str, arguments: argparse.Namespace, logs: Path) -> AbstractContextManager[str]:
    model = [arguments.model] if arguments.model else []
    options = [*model, "--set", f"worker.speculation.source={name}", "--dtype", arguments.dtype]
    options += ["--threads", str(arguments.threads)]
    return running_server(options, logs / f"guess-{name.replace('/', '-')}.log")


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="directory (default: the demo model)")
    parser.add_argument("--speculate", default="lookup", help="as of `triolet serve`")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    announce(__doc__)
    finish(run(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Writes metric families in Prometheus's text format, in pieces short enough for the event loop.

The client library formats each sample's name and labels at every scrape, two thirds of a scrape's
cost. Here each is formatted once by the library and cached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.samples import Sample


SAMPLES_PER_PIECE: Final = 64
"""Samples written before other tasks may run: 0.2 ms. Families are collected whole, so a piece may
be longer by one family."""
MAX_REMEMBERED: Final = 1 << 16
"""Cached names with labels: about 16 MiB. When full, the cache is cleared, which drops workers that
are gone."""
PLAIN_BELOW: Final = 1e6
"""Python and Go write numbers below this alike; the format is Go's."""


class Reading(Collector):
    """Families that are read at scrape time.

    Args:
      read: returns the families.
    """

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Return the families."""
        return self._read()


class TextWriter:
    """Formats families, byte for byte as the client library does."""

    def __init__(self) -> None:
        self._heads: dict[tuple[str, str, str], str] = {}
        self._names: dict[tuple[object, ...], str] = {}

    def pieces(self, families: Iterable[Metric]) -> Iterator[str]:
        """Yield the text in pieces of about `SAMPLES_PER_PIECE` samples, never splitting a
        family."""
        lines: list[str] = []
        num_samples = 0
        for family in families:
            lines.append(self._head(family))
            for sample in family.samples:
                lines.append(self._name(family, sample))
                lines.append(_number(sample.value))
            num_samples += len(family.samples)
            if num_samples >= SAMPLES_PER_PIECE:
                yield "".join(lines)
                lines.clear()
                num_samples = 0
        yield "".join(lines)

    def _head(self, family: Metric) -> str:
        key = (family.name, family.type, family.documentation)
        head = self._heads.get(key)
        if head is None:
            head = _written(Metric(family.name, family.documentation, family.type))
            self._heads[key] = head
        return head

    def _name(self, family: Metric, sample: Sample) -> str:
        key = (sample.name, *sample.labels.items())
        name = self._names.get(key)
        if name is None:
            if len(self._names) >= MAX_REMEMBERED:
                self._names.clear()
            alone = Metric(family.name, "", family.type)
            alone.add_sample(sample.name, sample.labels, 0.0)
            name = _written(alone).splitlines()[-1].removesuffix("0.0")
            self._names[key] = name
        return name


class Exposition:
    """All families as one text.

    Args:
      collect: returns the families.
    """

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect
        self._writer = TextWriter()
        self._writing = trio.Lock()
        self._num_begun = self._num_done = 0
        self._text = b""

    def whole(self) -> bytes:
        """Return the text, written in one go."""
        return "".join(self._writer.pieces(self._collect())).encode()

    async def take(self) -> bytes:
        """Return a text started after this call, written in turns with other tasks.

        A text that is already being written may lack recent events, so callers wait for the next
        one and share it: however many call at once, at most two are written.
        """
        wanted = self._num_begun + 1
        async with self._writing:
            if self._num_done < wanted:
                self._num_begun += 1
                self._text = (await in_turns(self._writer.pieces(self._collect()))).encode()
                self._num_done = self._num_begun
            return self._text


async def in_turns(pieces: Iterable[str]) -> str:
    """Join pieces, letting other tasks run after each."""
    parts = []
    for piece in pieces:
        parts.append(piece)
        await trio.lowlevel.checkpoint()
    return "".join(parts)


def _written(family: Metric) -> str:
    """Return the client library's text."""
    text: bytes = generate_latest(Reading(lambda: [family]))
    return text.decode()


def _number(value: float) -> str:
    """Return a formatted value with a newline."""
    if -PLAIN_BELOW < value < PLAIN_BELOW:
        return f"{float(value)!r}\n"
    return f"{floatToGoString(value)}\n"  # type: ignore[no-untyped-call]


OF_ALL_SERVERS: Final = (
    "triolet_worker_",
    "triolet_kv_",
    "triolet_prefix_cache_",
    "triolet_speculative_",
    "triolet_step_tokens",
    "vllm:iteration_tokens_total",
    "vllm:gpu_cache_usage_perc",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions",
    "vllm:cache_config",
    "triolet_rollout_",
    "triolet_shadow_",
)
"""Name prefixes of families that describe workers, or rollouts as control sees them: all servers
have the same."""
SERVER_UP: Final = "triolet_server_up"
LINES_PER_PIECE: Final = 256
"""Lines read or written before other tasks may run: 0.2 ms."""


def merging(expositions: Mapping[str, str | None]) -> Iterator[str]:
    """Merge the expositions of several servers and yield the result in pieces. Pieces are empty
    until all lines are read.

    Args:
      expositions: metrics of each server, starting with the one that answers the request; None for
        a server without an answer.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for number, (server, text) in enumerate(expositions.items()):
        family = ""
        for line_number, line in enumerate((text or "").splitlines(), 1):
            if line_number % LINES_PER_PIECE == 0:
                yield ""
            if line.startswith("#"):
                # `# HELP name …` starts a family, `# TYPE name …` follows.
                family = line.split(" ", 3)[2]
                if line not in heads.setdefault(family, []):
                    heads[family].append(line)
                continue
            if family.startswith(OF_ALL_SERVERS):
                if number == 0:
                    samples.setdefault(family, []).append(line)
            else:
                samples.setdefault(family, []).append(_labelled(line, server))
    heads[SERVER_UP] = [
        f"# HELP {SERVER_UP} 1 for a server with metrics in this scrape",
        f"# TYPE {SERVER_UP} gauge",
    ]
    samples[SERVER_UP] = [
        _labelled(f"{SERVER_UP} {float(text is not None)}", server)
        for server, text in expositions.items()
    ]
    lines: list[str] = []
    for family, head in heads.items():
        lines += head
        lines += samples.get(family, [])
        if len(lines) >= LINES_PER_PIECE:
            yield "".join(f"{line}\n" for line in lines)
            lines.clear()
    yield "".join(f"{line}\n" for line in lines)


def _labelled(sample: str, server: str) -> str:
    """Return a sample line with a `server` label added."""
    name, brace, labels = sample.partition("{")
    if brace and " " not in name:
        return f'{name}{{server="{server}",{labels}'
    name, _, value = sample.partition(" ")
    return f'{name}{{server="{server}"}} {value}'

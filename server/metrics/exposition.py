"""Families as Prometheus's text form, in pieces that are short enough for the event loop.

The client library writes each sample's name and labels anew at every scrape, which is two thirds of
what a scrape costs. Here each is written once by the library and remembered.
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
"""Written before others have their turn: 0.2 ms. A family is collected whole, so a piece may be
longer by one family."""
MAX_REMEMBERED: Final = 1 << 16
"""Names with labels: about 16 MiB. Beyond, all are written anew once: names of workers that are
gone are among them."""
PLAIN_BELOW: Final = 1e6
"""Numbers that Go writes as Python does; the form is Go's."""


class Reading(Collector):
    """Families that are read at the moment of a scrape.

    Args:
      read: returns them.
    """

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Return the families."""
        return self._read()


class TextWriter:
    """Writes families, byte for byte as the client library does."""

    def __init__(self) -> None:
        self._heads: dict[tuple[str, str, str], str] = {}
        self._names: dict[tuple[object, ...], str] = {}

    def pieces(self, families: Iterable[Metric]) -> Iterator[str]:
        """Yield the text; each piece holds `SAMPLES_PER_PIECE` samples and the rest of a family."""
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
      collect: yields the families.
    """

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect
        self._writer = TextWriter()
        self._writing = trio.Lock()
        self._num_begun = self._num_done = 0
        self._text = b""

    def whole(self) -> bytes:
        """Return a text, written at once."""
        return "".join(self._writer.pieces(self._collect())).encode()

    async def take(self) -> bytes:
        """Return a text that is begun from now on; others have their turn while it is written.

        One that is being written may lack what has happened since, so it is not for those that ask
        now. They share the next one: however many ask at once, two are written.
        """
        wanted = self._num_begun + 1
        async with self._writing:
            if self._num_done < wanted:
                self._num_begun += 1
                self._text = (await in_turns(self._writer.pieces(self._collect()))).encode()
                self._num_done = self._num_begun
            return self._text


async def in_turns(pieces: Iterable[str]) -> str:
    """Join pieces; after each one other tasks have their turn."""
    parts = []
    for piece in pieces:
        parts.append(piece)
        await trio.lowlevel.checkpoint()
    return "".join(parts)


def _written(family: Metric) -> str:
    """Return what the client library writes."""
    text: bytes = generate_latest(Reading(lambda: [family]))
    return text.decode()


def _number(value: float) -> str:
    """Return a value with the line's end."""
    if -PLAIN_BELOW < value < PLAIN_BELOW:
        return f"{float(value)!r}\n"
    return f"{floatToGoString(value)}\n"  # type: ignore[no-untyped-call]


OF_WORKERS: Final = (
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
)
"""Families with names that begin so describe workers."""
SERVER_UP: Final = "triolet_server_up"
LINES_PER_PIECE: Final = 256
"""Taken in before others have their turn: 0.2 ms."""


def merging(expositions: Mapping[str, str | None]) -> Iterator[str]:
    """Yield one exposition of several servers, in pieces; those before all lines are taken in are
    empty.

    Args:
      expositions: by server, the one that answers first; None of one that gave no answer.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for number, (server, text) in enumerate(expositions.items()):
        family = ""
        for line_number, line in enumerate((text or "").splitlines(), 1):
            if line_number % LINES_PER_PIECE == 0:
                yield ""
            if line.startswith("#"):
                # `# HELP name …` begins a family, `# TYPE name …` follows.
                family = line.split(" ", 3)[2]
                if line not in heads.setdefault(family, []):
                    heads[family].append(line)
                continue
            if family.startswith(OF_WORKERS):
                if number == 0:
                    samples.setdefault(family, []).append(line)
            else:
                samples.setdefault(family, []).append(_labelled(line, server))
    heads[SERVER_UP] = [
        f"# HELP {SERVER_UP} 1 for a server with its numbers in here",
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
    """Return a sample with one label more."""
    name, brace, labels = sample.partition("{")
    if brace and " " not in name:
        return f'{name}{{server="{server}",{labels}'
    name, _, value = sample.partition(" ")
    return f'{name}{{server="{server}"}} {value}'

"""The metrics of several servers of one machine as one text, each sample with its server's name.

Knows Prometheus's text form, line by line; counts nothing itself. What servers say of workers is
the same at each of them, give or take a heartbeat, and a sum over servers would count it twice: of
that only the first one's word is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
"""Families whose names begin so describe workers."""
SERVER_UP: Final = "triolet_server_up"
LINES_PER_PIECE: Final = 256
"""Taken in before others have their turn: 0.2 ms."""


def merge(expositions: Mapping[str, str | None]) -> str:
    """Return one exposition.

    Args:
      expositions: by server, the one that answers first; None of one that gave no answer.
    """
    return "".join(merging(expositions))


def merging(expositions: Mapping[str, str | None]) -> Iterator[str]:
    """Yield the same in pieces; those before all lines are taken in are empty."""
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
        f"# HELP {SERVER_UP} 1 for a server whose numbers are in here",
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

"""`python -m loadtest.bench.cache`: hit rate of the prefix cache with real conversations.

Replays chats of the Mooncake trace, scaled to the small model, against a whole fleet over HTTP,
with and without the prefix cache. Hits of prefill and decode are compared with the best possible
cache of the same size, and every answer with that of the other run. All prompts are computed on
prefill, as long ones are with large models: prompts that decode computes are never looked up on
prefill, so the hit rates would depend on routing. Needs the trace: `--trace`, or beside the
repository.

The ideal cache answers one request after the other, and a prompt's blocks may be evicted as soon as
it is answered. Real requests hold their blocks: a pool hardly larger than the concurrent prompts
cannot cache. For such a pool the shares of the ideal are shown but are no goal; `--at-once 1`
compares like with like.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx2
import trio

from ..harness.metrics import samples
from ..harness.progress import announce, progress
from ..harness.report import BENCH, Ratio, Report, describe, finish
from ..harness.servers import TAKES_ALL, running_server
from ..harness.streams import COMPLETIONS, Clients, completion, post
from .model import SHAPES, written_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


TRACE_BLOCK_TOKENS: Final = 512
FIRST_TOKEN_ID: Final = 300
"""Smaller ids may be special tokens."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Attributes:
      conversation: id of all requests with the same first two blocks.
      block_ids: blocks of its prompt; the last one may be partly filled.
      prompt_tokens: scaled length of the prompt.
      output_tokens: scaled length of the answer.
    """

    conversation: int
    block_ids: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int

    def prompt(self, block_size: int, vocab_size: int) -> list[int]:
        """Return the prompt's token ids: equal blocks get equal tokens, others differ."""
        tokens = [t for block in self.block_ids for t in tokens_of(block, block_size, vocab_size)]
        return tokens[: self.prompt_tokens]


@cache
def tokens_of(block_id: int, block_size: int, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens of a block of the trace."""
    rng = random.Random(f"block {block_id}")
    return tuple(rng.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(block_size))


def read_turns(trace: Path, block_size: int, every: int) -> list[Turn]:
    """Return the turns of every n-th conversation, in order of arrival.

    Whole conversations are kept, so that each turn has its earlier ones; with fewer of them in
    between, a smaller pool corresponds to a larger one.
    """
    turns = []
    with trace.open(encoding="utf-8") as lines:
        for line in lines:
            fields = json.loads(line)
            block_ids = tuple(fields["hash_ids"])
            conversation = block_ids[min(1, len(block_ids) - 1)]
            if zlib.crc32(str(conversation).encode()) % every:
                continue
            turns.append(
                Turn(
                    conversation,
                    block_ids,
                    max(1, fields["input_length"] * block_size // TRACE_BLOCK_TOKENS),
                    max(1, fields["output_length"] * block_size // TRACE_BLOCK_TOKENS),
                )
            )
    return turns


def ideal_hit_rate(turns: Iterable[Turn], num_blocks: int, block_size: int) -> float:
    """Return the share of prompt tokens that a cache of `num_blocks` finds with sequential
    requests: LRU eviction, the end of a prompt before its beginning, and the last token of a prompt
    is always computed."""
    recent: dict[int, None] = {}
    num_queried = num_hit = 0
    for turn in turns:
        full = turn.block_ids[: turn.prompt_tokens // block_size]
        num_queried += turn.prompt_tokens
        num_hit += block_size * _num_leading(
            recent, turn.block_ids[: (turn.prompt_tokens - 1) // block_size]
        )
        for block in reversed(full):
            recent.pop(block, None)
            recent[block] = None
        while len(recent) > num_blocks:
            del recent[next(iter(recent))]
    return num_hit / num_queried


def most_held_blocks(turns: Iterable[Turn], at_once: int, block_size: int) -> int:
    """Return the peak number of blocks for the prompts of `at_once` concurrent requests."""
    sizes = sorted(-(-turn.prompt_tokens // block_size) for turn in turns)
    return sum(sizes[-at_once:])


def _num_leading(known: dict[int, None], block_ids: Sequence[int]) -> int:
    for index, block in enumerate(block_ids):
        if block not in known:
            return index
    return len(block_ids)


ROOT: Final = Path(__file__).parents[2]
TRACE: Final = ROOT.parent / "shared" / "data" / "traces" / "mooncake_conversation.jsonl"
FLOOR: Final = 0.9
BLOCK_SIZE: Final = 16
BEAT_S: Final = 1.2
"""Seconds after which workers' counters have certainly reached the server."""
TIMEOUT_S: Final = 300.0
CACHED, PLAIN = "cache", "no cache"


@dataclass
class Replay:
    """Result of one run.

    Attributes:
      answers: token ids of the answers, by turn.
      seconds: duration of the run.
      metrics: metrics of the server at the end, by name and by role or pool.
    """

    answers: dict[int, list[int]] = field(default_factory=dict)
    seconds: float = 0.0
    metrics: dict[tuple[str, str], float] = field(default_factory=dict)

    def count(self, name: str, role: str = "") -> float:
        """Return a metric of the server, summed over its workers."""
        return self.metrics.get((f"triolet_{name}", role), 0.0)

    def hit_rate(self, role: str) -> float:
        """Return the share of prompt tokens that the workers of a role found in their cache."""
        queried = self.count("prefix_cache_queried_tokens_total", role)
        return self.count("prefix_cache_hit_tokens_total", role) / queried if queried else 0.0

    @property
    def ttft_ms(self) -> float:
        """Mean time to the first token."""
        name = "time_to_first_token_seconds"
        return 1e3 * self.count(f"{name}_sum") / max(1.0, self.count(f"{name}_count"))


def read_metrics(url: str) -> dict[tuple[str, str], float]:
    """Return the server's metrics, summed over workers and states."""
    metrics = httpx2.get(f"{url}/metrics", timeout=TIMEOUT_S).raise_for_status().text
    numbers: defaultdict[tuple[str, str], float] = defaultdict(float)
    for name, labels, value in samples(metrics):
        found = re.search(r'(?:role|pool)="(\w+)"', labels)
        numbers[name, found[1] if found else ""] += value
    return numbers


async def replay(url: str, turns: list[Turn], vocab_size: int, at_once: int) -> Replay:
    """Send all turns in order, `at_once` at a time. A turn waits for the previous one."""
    result = Replay()
    ended: dict[int, trio.Event] = {}
    seats = trio.CapacityLimiter(at_once)

    async def one(number: int, turn: Turn, before: trio.Event | None, end: trio.Event) -> None:
        try:
            if before is not None:
                await before.wait()
            prompt = turn.prompt(BLOCK_SIZE, vocab_size)
            fields = completion(prompt, turn.output_tokens, return_token_ids=True)
            answer = await clients.ask(post(COMPLETIONS, fields))
            answer.check()
            result.answers[number] = json.loads(answer.body)["choices"][0]["token_ids"]
        finally:
            end.set()
            seats.release_on_behalf_of(number)

    began_at = trio.current_time()
    async with Clients(url).reading() as clients, trio.open_nursery() as nursery:
        for number, turn in enumerate(turns):
            await seats.acquire_on_behalf_of(number)
            before = ended.get(turn.conversation)
            end = ended[turn.conversation] = trio.Event()
            nursery.start_soon(one, number, turn, before, end)
    result.seconds = trio.current_time() - began_at
    await trio.sleep(BEAT_S)
    result.metrics = await trio.to_thread.run_sync(read_metrics, url)
    return result


def run(arguments: argparse.Namespace) -> Report:
    """Replay with and without the cache."""
    model = written_model("15m")
    logs = BENCH / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    turns = read_turns(arguments.trace, BLOCK_SIZE, arguments.every)
    machine = describe(2)
    options = [str(model), "--dtype", "bfloat16", "--kv-pool", arguments.kv_pool]
    options += [
        "--set",
        f"worker.engine.block_size={BLOCK_SIZE}",
        "--set",
        f"worker.engine.host_cache_bytes={arguments.host_cache}",
    ]
    options += ["--set", f"server.routing.local_prefill={arguments.local_prefill}"]
    replays: dict[str, Replay] = {}
    for name, more in ((CACHED, []), (PLAIN, ["--set", "worker.engine.prefix_cache=false"])):
        progress(f"{name}: {len(turns)} requests")
        log = logs / f"cache-{name.replace(' ', '-')}.log"
        with running_server([*options, *TAKES_ALL, *more], log) as url:
            vocab_size = SHAPES["15m"].vocab_size
            replays[name] = trio.run(replay, url, turns, vocab_size, arguments.at_once)
        progress(f"{name}: {len(turns)} requests in {replays[name].seconds:.0f} s")
    machine |= {"model": "15m", "pool": arguments.kv_pool}
    return report_of(turns, replays, machine, arguments.at_once)


def report_of(
    turns: list[Turn], replays: dict[str, Replay], machine: dict[str, Any], at_once: int
) -> Report:
    """Return rows and ratios."""
    cached, plain = replays[CACHED], replays[PLAIN]
    num_blocks = round(cached.count("kv_blocks", "prefill"))
    held_blocks = most_held_blocks(turns, at_once, BLOCK_SIZE)
    floor = FLOOR if at_once == 1 or held_blocks <= num_blocks else None
    ideal = ideal_hit_rate(turns, num_blocks, BLOCK_SIZE)
    rows = [
        {
            "run": name,
            "requests": len(turns),
            "prompt_tokens": round(result.count("prompt_tokens_total")),
            "prefill_hit_%": 100 * result.hit_rate("prefill"),
            "decode_hit_%": 100 * result.hit_rate("decode"),
            "ideal_hit_%": 100 * ideal if result is cached else 0.0,
            "computed_tokens": round(result.count("worker_computed_tokens_total", "prefill")),
            "kv_mib_received": result.count("kv_bytes_received_total") / 2**20,
            "ttft_ms": result.ttft_ms,
            "seconds": result.seconds,
        }
        for name, result in replays.items()
    ]
    saved = 1 - cached.count("kv_bytes_received_total") / plain.count("kv_bytes_received_total")
    same = sum(cached.answers[n] == answer for n, answer in plain.answers.items())
    ratios = {
        "prefill hit rate of ideal": Ratio(cached.hit_rate("prefill") / ideal, floor),
        "decode hit rate of ideal": Ratio(cached.hit_rate("decode") / ideal, floor),
        "KV bytes saved of ideal": Ratio(saved / ideal, floor),
        "answers equal to those without": Ratio(same / len(turns), 1.0),
    }
    machine |= {"pool_blocks": num_blocks, "most_held_blocks": held_blocks}
    return Report("cache", machine, rows, ratios, {})


def main() -> int:
    """Measure, print, write; exit code 0 unless something broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--every", type=int, default=24, help="use one conversation in N")
    parser.add_argument("--kv-pool", default="48MiB", help="KV pool of each worker: 1,024 blocks")
    parser.add_argument("--host-cache", default="0", help="host memory cache of each worker")
    parser.add_argument(
        "--local-prefill", default="off", help="decode computes prompts: off, auto or always"
    )
    parser.add_argument("--at-once", type=int, default=4, help="concurrent requests")
    arguments = parser.parse_args()
    announce(__doc__)
    if not arguments.trace.exists():
        progress(f"skipped: no trace at {arguments.trace}; pass one with --trace")
        return 0
    finish(run(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())

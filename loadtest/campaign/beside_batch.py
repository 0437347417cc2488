"""Interactive requests with and without a batch behind them, in turns on one fleet.

Each turn asks at the same moments of its own, whatever has been answered; what is kept is the time
to the first token. Knows the campaign's parts; prints nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Final

import trio

from .asks import Ask, draw_asks, lengthened
from .batch_client import BatchClient, draw_lines, num_done
from .client import Story, tell
from .disturbed import wait_whole
from .own_fleet import own_fleet

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ANSWER_TOKENS: Final = 24
LINE_TOKENS: Final = 48
LINES: Final = 2_000
"""Of each turn's batch: more than are answered in it, so that none ends before its turn."""


@dataclass(slots=True)
class Side:
    """What was found with the batch, or without.

    Attributes:
      ttfts_s: times to the first token.
      gaps_s: longest gap between tokens of each request.
      failures: of requests.
      num_lines: of batches that were answered meanwhile.
      elapsed_s: of all turns.
    """

    ttfts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    num_lines: int = 0
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked.

    Attributes:
      turns: of each side.
      requests: of each turn.
      per_s: requests that arrive in a second, at random moments.
      seed: of requests and moments.
    """

    turns: int
    requests: int
    per_s: float
    seed: int


async def compare(load: Load, out: Path, options: Sequence[str]) -> tuple[Side, Side]:
    """Return what was found without a batch, and with one.

    Raises:
      ServerDidNotStartError: with the end of its log.
      BatchTookTooLongError: a batch did not end when it was cancelled.
    """
    serve = ["--batch-dir", str(out / "jobs-beside"), "--log-level", "info", *options]
    without, beside = Side(), Side()
    with own_fleet(serve, out / "beside.log") as fleet:
        await wait_whole(fleet.url, fleet.log)
        async with BatchClient(fleet.url) as client:
            for turn in range(-1, load.turns):
                # The first turn is for caches and clocks of processors.
                sides = (Side(), Side()) if turn < 0 else (without, beside)
                await _turn(fleet.url, load, 2 * turn + 2, sides[0])
                batch_id = await client.create(draw_lines(LINES, load.seed + turn, LINE_TOKENS))
                await client.wait(batch_id, lambda batch: num_done(batch) > 0)
                done_before = num_done(await client.wait(batch_id, lambda _: True))
                await _turn(fleet.url, load, 2 * turn + 3, sides[1])
                done = num_done(await client.wait(batch_id, lambda _: True))
                if done >= LINES:
                    sides[1].failures.append(f"the batch had ended before turn {turn} had")
                sides[1].num_lines += done - done_before
                await client.cancel(batch_id)
    return without, beside


async def _turn(url: str, load: Load, number: int, side: Side) -> None:
    rng = Random(f"{load.seed} {number}")
    drawn = draw_asks(load.requests, load.seed + 1000 * (number + 1))
    stories = [Story(_streamed(ask)) for ask in drawn]
    began_at = trio.current_time()
    async with trio.open_nursery() as nursery:
        for story in stories:
            nursery.start_soon(_tell, url, story)
            await trio.sleep(rng.expovariate(load.per_s))
    side.elapsed_s += trio.current_time() - began_at
    for story in stories:
        if story.failure is not None or not story.arrivals:
            side.failures.append(f"{story.ask.name}: {story.failure}")
            continue
        side.ttfts_s.append(story.arrivals[0] - story.sent_at)
        side.gaps_s.append(max((b - a for a, b in pairwise(story.arrivals)), default=0.0))


async def _tell(url: str, story: Story) -> None:
    await tell(url, story, retries_broken=False)


def _streamed(ask: Ask) -> Ask:
    """Return a chat that is streamed, whatever surface it was drawn for."""
    if ask.surface == "ws":
        ask = Ask(ask.number, ask.name, "sse", _as_chat(ask.body))
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return lengthened(Ask(ask.number, ask.name, "sse", ask.body | stream), ANSWER_TOKENS)


def _as_chat(body: dict[str, object]) -> dict[str, object]:
    return {
        "messages": [{"role": "user", "content": body["input"]}],
        "seed": body["seed"],
        "temperature": body["temperature"],
        "return_token_ids": True,
    }

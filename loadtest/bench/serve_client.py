"""What `bench.serve` asks: lengths and moments of requests, out of a real trace or made up. Pure.

Real traces come from models a thousand times larger on machines to match. Their lengths are divided
by one number and their moments by another, so that proportions, bursts and lulls stay as they were
and this machine can keep up.

The clients time each event and parse next to nothing: they share the machine with the servers.
"""

from __future__ import annotations

import csv
import json
import math
import random
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from .streams import FIRST_WORD, LAST_WORD, MARK, SAID, StreamBrokenError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path


SEED: Final = 9
MIN_PROMPT, MIN_OUTPUT = 8, 2
MADE_UP_PROMPT: Final = (1020, 0.8)
MADE_UP_OUTPUT: Final = (129, 0.9)
"""Medians and widths (of the logarithm) of conversations in Azure's trace of 2023."""


class Arrival(NamedTuple):
    """One request.

    Attributes:
      at_s: after the first.
      prompt_tokens: in.
      output_tokens: out.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int


class Shape(NamedTuple):
    """A series of requests.

    Attributes:
      name: where it is from; said beside whatever was measured with it.
      arrivals: in order.
    """

    name: str
    arrivals: tuple[Arrival, ...]


def read_trace(path: Path) -> list[Arrival]:
    """Return all requests of a trace: CSV with lengths and `arrival_s`, or Mooncake's JSONL."""
    if path.suffix == ".jsonl":
        lines = (json.loads(line) for line in path.read_text().splitlines() if line)
        return [
            Arrival(line["timestamp"] / 1000, line["input_length"], line["output_length"])
            for line in lines
        ]
    with path.open(newline="") as file:
        return [
            Arrival(float(r["arrival_s"]), int(r["input_tokens"]), int(r["output_tokens"]))
            for r in csv.DictReader(file)
        ]


def made_up(count: int) -> list[Arrival]:
    """Return requests whose lengths are log-normal and that come independently of one another."""
    numbers = random.Random(SEED)

    def length(of: tuple[float, float]) -> int:
        return round(numbers.lognormvariate(math.log(of[0]), of[1]))

    now = 0.0
    arrivals = []
    for _ in range(count):
        arrivals.append(Arrival(now, length(MADE_UP_PROMPT), length(MADE_UP_OUTPUT)))
        now += numbers.expovariate(1.0)
    return arrivals


def scaled(
    arrivals: Sequence[Arrival], *, divisor: float, rate: float, seconds: float, max_tokens: int
) -> tuple[Arrival, ...]:
    """Return the first requests of a trace at the size of this machine.

    Args:
      arrivals: of the trace.
      divisor: of all lengths.
      rate: requests per second, on average over those that are taken.
      seconds: how long they shall last.
      max_tokens: that one request may have, in and out.
    """
    taken = sorted(arrivals)[: max(2, round(rate * seconds))]
    began_at, ended_at = taken[0].at_s, taken[-1].at_s
    stretch = (len(taken) - 1) / rate / max(ended_at - began_at, 1e-9)
    half = max_tokens // 2
    return tuple(
        Arrival(
            (arrival.at_s - began_at) * stretch,
            min(half, max(MIN_PROMPT, round(arrival.prompt_tokens / divisor))),
            min(half, max(MIN_OUTPUT, round(arrival.output_tokens / divisor))),
        )
        for arrival in taken
    )


def shape_of(
    path: Path | None, scale: Callable[[Sequence[Arrival]], tuple[Arrival, ...]], count: int
) -> Shape:
    """Return the shape of a trace, or a made-up one where there is no such file."""
    if path is not None and path.exists():
        return Shape(path.stem, scale(read_trace(path)))
    return Shape("made up, no trace here", scale(made_up(count)))


def lengths_in_words(arrivals: Iterable[Arrival]) -> str:
    """Return what the requests are like."""
    listed = list(arrivals)
    prompts = sorted(arrival.prompt_tokens for arrival in listed)
    outputs = sorted(arrival.output_tokens for arrival in listed)
    middle = len(listed) // 2
    return (
        f"{len(listed)} requests in {listed[-1].at_s:.0f} s, tokens in {prompts[middle]} (median) "
        f"to {prompts[-1]}, out {outputs[middle]} to {outputs[-1]}"
    )


END: Final = b"data: [DONE]"
WHOLE: Final = b'"finish_reason":"length"'
RECEIVE_BYTES: Final = 64 * 1024
TIMEOUT_S: Final = 240.0


@dataclass(slots=True)
class Answer:
    """One stream. Times are of one clock.

    Attributes:
      asked_at: when the request was sent.
      tokens: that it has.
      times: of its events.
      pieces: the bytes received, as they came.
    """

    asked_at: float
    tokens: int
    times: list[float] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """From the request to the first token."""
        return self.times[0] - self.asked_at

    @property
    def gaps_s(self) -> list[float]:
        """Between one token and the next."""
        return [later - earlier for earlier, later in pairwise(self.times)]


@dataclass(frozen=True, slots=True)
class Target:
    """A server.

    Attributes:
      port: on loopback.
      model: what it calls the model.
    """

    port: int
    model: str


async def ask(
    target: Target, prompt: Sequence[int], max_tokens: int, said: int | None = SAID
) -> Answer:
    """Ask once and read the whole answer.

    Args:
      target: the server.
      prompt: token ids.
      max_tokens: the length of the answer.
      said: the token that every one of the answer is biased to; None for what the model chooses.

    Raises:
      StreamBrokenError: it is an error, or not as long as it was to be.
      trio.TooSlowError: it takes far too long.
    """
    fields = {
        "model": target.model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    if said is not None:
        fields["logit_bias"] = {str(said): 100}
    body = json.dumps(fields).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{target.port}\r\n"
        "content-type: application/json\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode()
    with trio.fail_after(TIMEOUT_S):
        async with await trio.open_tcp_stream("127.0.0.1", target.port) as stream:
            answer = Answer(perf_counter(), max_tokens)
            await stream.send_all(head + body)
            await _read(stream, answer)
    return answer


async def _read(stream: trio.SocketStream, answer: Answer) -> None:
    tail, is_whole = b"", False
    while END not in tail:
        data = bytes(await stream.receive_some(RECEIVE_BYTES))
        now = perf_counter()
        if not data:
            raise StreamBrokenError(f"closed early, after {tail[-400:].decode(errors='replace')}")
        answer.pieces.append(data)
        seen = tail + data
        answer.times += [now] * (seen.count(MARK) - tail.count(MARK))
        is_whole = is_whole or WHOLE in seen.replace(b": ", b":")
        # Long enough for the longest mark that may be in two pieces.
        tail = seen if len(seen) < 512 else seen[-256:]
    if not is_whole or not answer.times:
        raise StreamBrokenError(f"it did not end at its length: {tail.decode(errors='replace')}")


async def ask_together(
    target: Target, arrivals: Sequence[Arrival], seed: int, said: int | None = SAID
) -> list[Answer]:
    """Ask each request at its moment, whatever became of those before it (an open loop).

    Returns:
      The answers in the order of `arrivals`.
    """
    numbers = random.Random(seed)
    prompts = [
        [numbers.randint(FIRST_WORD, LAST_WORD) for _ in range(arrival.prompt_tokens)]
        for arrival in arrivals
    ]
    answers: dict[int, Answer] = {}
    began_at = trio.current_time()

    async def one(index: int, arrival: Arrival) -> None:
        await trio.sleep_until(began_at + arrival.at_s)
        answers[index] = await ask(target, prompts[index], arrival.output_tokens, said)

    async with trio.open_nursery() as nursery:
        for index, arrival in enumerate(arrivals):
            nursery.start_soon(one, index, arrival)
    return [answers[index] for index in range(len(arrivals))]


def at_once(count: int, prompt_tokens: int, output_tokens: int) -> list[Arrival]:
    """Return requests that come at the same moment."""
    return [Arrival(0.0, prompt_tokens, output_tokens)] * count

"""Streams over HTTP, timed event by event, with next to no parsing: the clients share the machine.

Speaks /v1/completions, which all that is compared speak. Every stream says one and the same word
whatever the random weights would like, so that each token is an event.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Final

import trio

from .serve_shapes import Arrival
from .streams import FIRST_WORD, LAST_WORD, MARK, SAID, StreamBrokenError

if TYPE_CHECKING:
    from collections.abc import Sequence

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

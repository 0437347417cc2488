"""Exhaust a tenant's limit on one or more servers, and compare the admitted amount with the limit.

The comparison does not depend on speed: a bucket starts full and refills continuously, and a
request is refused only if less than its cost is left.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import httpx2
import trio

from .answers import key_headers

if TYPE_CHECKING:
    from collections.abc import Sequence

QUESTION: Final[dict[str, Any]] = {"prompt": "Hi", "max_tokens": 2, "ignore_eos": True}
COST: Final = 4
"""Tokens of a question and its answer, which are reserved for a request."""
CLIENTS: Final = 2
"""Clients per server."""
PAUSE_S: Final = 0.01
"""Pause after a refusal: short compared with the refill time of a request."""
TIMEOUT_S: Final = 60.0


class UnexpectedAnswerError(Exception):
    """An answer that is neither a success nor a rate limit."""


@dataclass
class Taken:
    """What a tenant got before its limits were exhausted.

    Attributes:
      tokens: used tokens.
      refusals: number of refusals.
      shown_limits: tokens per minute in the answers' headers.
      sent_at: time of the first request.
      answered_at: times of the first and the last answer.
      refused_at: time at which the last refused request was sent.
    """

    tokens: int = 0
    refusals: int = 0
    shown_limits: set[str] = field(default_factory=set)
    sent_at: float = field(default_factory=time.monotonic)
    answered_at: tuple[float, float] = (0.0, 0.0)
    refused_at: float = 0.0

    def answered(self, tokens: int) -> None:
        """Record an answer."""
        now = time.monotonic()
        self.answered_at = (self.answered_at[0] or now, now)
        self.tokens += tokens

    def allowed(self, limit: float) -> tuple[float, float]:
        """Return the minimum and maximum of tokens that the limit allows.

        Args:
          limit: tokens per minute, with a full bucket at the start.
        """
        a_second = limit / 60
        first, last = self.answered_at
        return (
            limit + a_second * (self.refused_at - first) - COST,
            limit + a_second * (last - self.sent_at),
        )

    def share(self, limit: float) -> float:
        """Return the used tokens relative to the allowed ones: 1 if within both bounds. The bounds
        differ because clients cannot observe the exact times."""
        least, most = self.allowed(limit)
        return self.tokens / min(max(self.tokens, least), most)


async def take_all(key: str, urls: Sequence[str], seconds: float = 0.0) -> Taken:
    """Send requests to all servers for a while, and then until every client has been refused.

    Args:
      key: API key of the tenant.
      urls: addresses of the servers.
      seconds: time during which clients continue after a refusal.

    Raises:
      UnexpectedAnswerError: in a group: an answer is neither a success nor a rate limit.
    """
    taken = Taken()
    until = trio.current_time() + seconds

    async def ask(client: httpx2.AsyncClient) -> None:
        while await _ask_once(client, taken) or trio.current_time() < until:
            pass

    async with AsyncExitStack() as stack:
        # One client per server, with a connection per asker: creating one takes 30 ms of CPU.
        clients = [
            await stack.enter_async_context(
                httpx2.AsyncClient(
                    base_url=url, timeout=TIMEOUT_S, headers=key_headers(key), trust_env=False
                )
            )
            for url in urls
        ]
        async with trio.open_nursery() as nursery:
            for client in clients:
                for _ in range(CLIENTS):
                    nursery.start_soon(ask, client)
    return taken


async def _ask_once(client: httpx2.AsyncClient, taken: Taken) -> bool:
    """Send a request. Return whether it was answered; pause if it was refused."""
    sent_at = time.monotonic()
    answer = await client.post("/v1/completions", json=QUESTION)
    taken.shown_limits.add(answer.headers.get("x-ratelimit-limit-tokens", "none"))
    if answer.status_code == httpx2.codes.OK:
        taken.answered(answer.json()["usage"]["total_tokens"])
        return True
    if answer.status_code != httpx2.codes.TOO_MANY_REQUESTS:
        raise UnexpectedAnswerError(f"{answer.status_code}: {answer.text}")
    taken.refusals += 1
    taken.refused_at = max(taken.refused_at, sent_at)
    await trio.sleep(PAUSE_S)
    return False

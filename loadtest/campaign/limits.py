"""Use up a tenant's limit on one or more servers, and compare the amount with the limit.

The comparison does not depend on speed: a bucket is full at first and refills all the time, and a
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
"""Tokens of the demo model's question and answer, which is the reserved amount."""
CLIENTS: Final = 2
"""Clients per server."""
PAUSE_S: Final = 0.01
"""Seconds after a refusal: short compared with the refill time of a request."""
TIMEOUT_S: Final = 60.0


class UnexpectedAnswerError(Exception):
    """Neither an answer nor a limit that is met."""


@dataclass
class Taken:
    """What a tenant got that sent requests until its limits were exhausted.

    Attributes:
      tokens: used.
      refusals: number of refusals.
      shown_limits: tokens per minute that answers named.
      sent_at: when the first request was sent.
      answered_at: when the first answer came, and the last.
      refused_at: when the last request was sent that was refused.
    """

    tokens: int = 0
    refusals: int = 0
    shown_limits: set[str] = field(default_factory=set)
    sent_at: float = field(default_factory=time.monotonic)
    answered_at: tuple[float, float] = (0.0, 0.0)
    refused_at: float = 0.0

    def answered(self, tokens: int) -> None:
        """Note an answer."""
        now = time.monotonic()
        self.answered_at = (self.answered_at[0] or now, now)
        self.tokens += tokens

    def allowed(self, limit: float) -> tuple[float, float]:
        """Return how many tokens it must have got at least, and may have got at most.

        Args:
          limit: tokens per minute, of which none were taken before.
        """
        a_second = limit / 60
        first, last = self.answered_at
        return (
            limit + a_second * (self.refused_at - first) - COST,
            limit + a_second * (last - self.sent_at),
        )

    def share(self, limit: float) -> float:
        """Return its share of what it may have: 1 if it is within the bounds. The two bounds differ
        by what cannot be observed from outside."""
        least, most = self.allowed(limit)
        return self.tokens / min(max(self.tokens, least), most)


async def take_all(key: str, urls: Sequence[str], seconds: float = 0.0) -> Taken:
    """Ask all servers at once for so long, and then until everybody who asks is refused.

    Args:
      key: of the tenant.
      urls: of the servers.
      seconds: for which everybody asks again after a refusal.

    Raises:
      UnexpectedAnswerError: in a group: something else is wrong.
    """
    taken = Taken()
    until = trio.current_time() + seconds

    async def ask(client: httpx2.AsyncClient) -> None:
        while await _ask_once(client, taken) or trio.current_time() < until:
            pass

    async with AsyncExitStack() as stack:
        # One for each server, with a connection for each asker: to make one takes 30 ms of a core.
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
    """Return whether there was an answer; wait a little if not."""
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

"""Users of the benchmark: requests at random times, one record for each, and clients that retry and
resume. A client knows its version from the header alone."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, pairwise, takewhile
from random import Random
from typing import TYPE_CHECKING, Final

import trio

from ..campaign.answers import key_headers
from ..harness.streams import CHAT, COMPLETIONS, Clients, Stream, StreamBrokenError, post
from ..harness.tenants import key_of
from .candidates import LONG_TOKENS, MARKER, MODEL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

RATE: Final = 20.0
"""Requests per second."""
USERS: Final = 400
TENANTS: Final = ("acme", "globex")
ACME_ONE_IN: Final = 8
"""One user in so many belongs to the first tenant."""
MAX_TOKENS: Final = 8
MEDIAN_TOKENS: Final = 40
SIGMA: Final = 0.25
"""Spread of the logarithm of the lengths of prompts."""
LONG_SHARE: Final = 0.03
LONG: Final = range(LONG_TOKENS + 10, LONG_TOKENS + 60)
"""Lengths of long prompts."""
WORDS: Final = range(256, MARKER)
"""Token ids of the demo model that are parts of words. No two prompts have a common prefix."""
OK: Final = 200
FIELDS: Final = {"model": MODEL, "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
STICKY_EVERY_S: Final = 0.5
"""Pause of the client that breaks off, resumes and repeats."""
VERSION: Final = re.compile(rb"\r\nx-triolet-model-version: ?(\S+)\r\n", re.IGNORECASE)
EVENT_ID: Final = re.compile(rb"\nid: ?(\S+)")


def tenant_of(user: int) -> str:
    """Return a user's tenant."""
    return TENANTS[user % ACME_ONE_IN > 0]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that has ended.

    Attributes:
      user: number of the user.
      sent_at: Unix time.
      ended_at: Unix time; its version was chosen between the two.
      version: its version; empty if the answer names none.
      failure: why it is no whole answer; empty if it is one.
      ttft_s: time to the first event; None without one.
    """

    user: int
    sent_at: float
    ended_at: float
    version: str
    failure: str
    ttft_s: float | None


def version_of(stream: Stream) -> str:
    """Return the version that an answer names."""
    return found[1].decode() if (found := VERSION.search(stream.head)) else ""


def kept_versions(tries: Iterable[Stream]) -> list[str]:
    """Return the versions of the tries before the first one that failed. A failed answer is not
    kept: it can still be resumed, but a repetition is a new request."""
    kept = takewhile(lambda one: one.status == OK and not one.code, tries)
    return [version_of(one) for one in kept]


@dataclass(eq=False, slots=True)
class CutStream(Stream):
    """An answer whose client leaves after the first events.

    Attributes:
      scope: cancelled at the first event.
    """

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    def note(self, data: bytes, num_events: int, now: float) -> None:
        """Store a part of the body, and leave."""
        Stream.note(self, data, num_events, now)
        if self.times:
            self.scope.cancel()


class Users:
    """The users of one server.

    Args:
      url: address of the server.
      seed: random seed.

    Attributes:
      asked: requests that have ended.
      versions: versions of each answer that was broken off, resumed and repeated.
      is_chat: whether they chat; else they send token ids.
    """

    def __init__(self, url: str, seed: int) -> None:
        self.asked: list[Asked] = []
        self.versions: list[list[str]] = []
        self.is_chat = False
        self._clients = Clients(url)
        self._numbers = Random(f"users {seed}")

    async def run(self) -> None:
        """Send requests until cancelled."""
        async with self._clients.reading(), trio.open_nursery() as nursery:
            nursery.start_soon(self._be_sticky)
            while True:
                await trio.sleep(self._numbers.expovariate(RATE))
                nursery.start_soon(self._ask, self._numbers.randrange(USERS))

    def since(self, at: float) -> list[Asked]:
        """Return the requests that were sent at this Unix time or later and have ended."""
        return [one for one in self.asked if one.sent_at >= at]

    async def _ask(self, user: int) -> None:
        sent_at, stream, failure = time.time(), Stream(), ""
        try:
            await self._clients.ask(self._post(user, self._fields(user)), stream)
        except (StreamBrokenError, trio.TooSlowError) as error:
            failure = repr(error)
        if stream.code or stream.status != OK:
            failure = failure or f"{stream.status} {stream.code}"
        version, now = version_of(stream), time.time()
        self.asked.append(Asked(user, sent_at, now, version, failure, stream.ttft_s))

    async def _be_sticky(self) -> None:
        """Break an answer off, resume and repeat it, with one user after the other."""
        for number in count():
            await trio.sleep(STICKY_EVERY_S)
            user = number % USERS
            key = {"idempotency-key": f"sticky-{self._numbers.getrandbits(64):x}"}
            fields = self._fields(user)
            answers = [await self._cut_off(self._post(user, fields, key))]
            last = (
                {"last-event-id": found[-1].decode()}
                if (found := EVENT_ID.findall(answers[0].body))
                else {}
            )
            for more in (last, {}):
                with suppress(StreamBrokenError, trio.TooSlowError):
                    answers.append(await self._clients.ask(self._post(user, fields, key | more)))
            self.versions.append(kept_versions(answers))

    async def _cut_off(self, request: bytes) -> Stream:
        """Return the beginning of an answer, and close its connection."""
        with trio.CancelScope() as scope:
            stream = CutStream(scope=scope)
            with suppress(StreamBrokenError, trio.TooSlowError):
                await self._clients.ask(request, stream)
        return stream

    def _fields(self, user: int) -> dict[str, object]:
        """Return a request of a user with a prompt that no other one begins with."""
        draw, is_long = self._numbers, self._numbers.random() < LONG_SHARE
        median = MEDIAN_TOKENS * draw.lognormvariate(0.0, SIGMA)
        length = draw.choice(LONG) if is_long else round(median)
        words = [MARKER] * (tenant_of(user) == TENANTS[0]) + draw.choices(WORDS, k=length)
        text = [{"role": "user", "content": " ".join(map(str, words))}]
        prompt = {"messages": text} if self.is_chat else {"prompt": words}
        return FIELDS | prompt | {"user": f"user-{user}"}

    def _post(
        self, user: int, fields: Mapping[str, object], headers: Mapping[str, str] | None = None
    ) -> bytes:
        told = key_headers(key_of(tenant_of(user))) | dict(headers or {})
        told["connection"] = "close"  # the server may close an idle one just now
        return post(CHAT if "messages" in fields else COMPLETIONS, fields, told)


def returned(asked: Iterable[Asked], stable: str, candidate: str) -> list[str]:
    """Return users that were on the candidate and then on the stable version again.

    Args:
      asked: requests of one rollout before its end.
      stable: the stable version.
      candidate: the candidate.
    """
    by_user: defaultdict[int, list[Asked]] = defaultdict(list)
    for one in sorted(asked, key=lambda one: one.sent_at):
        by_user[one.user].append(one)
    return [
        f"user {user} went back to the stable version at {after.sent_at:.1f}"
        for user, own in by_user.items()
        for before, after in pairwise(one for one in own if one.version)
        if (before.version, after.version) == (candidate, stable)
        and before.ended_at < after.sent_at
    ]

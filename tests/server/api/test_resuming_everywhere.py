"""Tests of idempotency keys at every generating endpoint: a retry gets the first answer's bytes,
and a cut stream continues after any event."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.support.fakes import FakeFleet, FakeGeneration
from tests.server.support.surface import Surface, surface

HI = [{"role": "user", "content": "Hi"}]
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"model": "demo", "messages": HI, "max_tokens": 20},
}
EVERYWHERE = pytest.mark.parametrize("path", ENDPOINTS)
KEY = {"idempotency-key": "k"}


def tell(generation: FakeGeneration) -> None:
    """Generate a few words."""
    generation.say(*(f"word{number} " for number in range(12)))
    generation.finish()


async def ask(server: Surface, path: str, *, stream: bool, **headers: str) -> bytes:
    """Send a request with the key and return the answer's body."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await server.post(path, ENDPOINTS[path] | {"stream": stream}, headers=KEY | named)
    assert answer.status == 200, answer.body
    return answer.body


@EVERYWHERE
async def test_a_retry_gets_the_bytes_of_the_first(path: str) -> None:
    async with surface(FakeFleet(tell)) as server:
        first = await ask(server, path, stream=False)
        assert b"word11" in first
        assert await ask(server, path, stream=False) == first
        assert len(server.fleet.generations) == 1


@EVERYWHERE
async def test_a_stream_goes_on_behind_any_of_its_events(path: str) -> None:
    async with surface(FakeFleet(tell)) as server:
        uncut = await ask(server, path, stream=True)
        events = [event + b"\n\n" for event in uncut.split(b"\n\n") if event]
        assert [event.split(b"\n")[0] for event in events] == [
            b"id: %d" % number for number in range(len(events))
        ]
        for number in range(len(events) - 1):
            rest = await ask(server, path, stream=True, last_event_id=str(number))
            assert rest == b"".join(events[number + 1 :])
        assert len(server.fleet.generations) == 1


@EVERYWHERE
async def test_another_question_with_the_key_is_a_conflict(path: str) -> None:
    async with surface(FakeFleet(tell)) as server:
        await ask(server, path, stream=False)
        others = [(path, {"temperature": 0.5}), *((other, {}) for other in ENDPOINTS)]
        for other, changes in others:
            if (other, changes) == (path, {}):
                continue
            answer = await server.post(other, ENDPOINTS[other] | changes, headers=KEY)
            assert answer.status == 409
        # Another key in either header makes a different name.
        for header in ("authorization", "x-api-key"):
            answer = await server.post(path, ENDPOINTS[path], headers=KEY | {header: "Bearer me"})
            assert answer.status == 200
        assert len(server.fleet.generations) == 3

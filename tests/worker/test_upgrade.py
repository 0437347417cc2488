"""Tests of rolling upgrades: workers of a newer release serve servers of the previous release, but
of none before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from transport import handshake
from transport.frames import Hello, Peer
from triolet.ids import Role
from triolet.sampling import SamplingParams

from .fleet import open_fleet
from .scripts import completion

if TYPE_CHECKING:
    from trio.testing import MockClock

PROMPT = tuple(range(1, 40))
ROLES = (Role.PREFILL, Role.DECODE)


@pytest.fixture(autouse=True)
def release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process a release that speaks version 5 and supports 4."""
    monkeypatch.setattr(handshake, "PROTOCOL_VERSION", 5)
    monkeypatch.setattr(handshake, "OLDEST_PROTOCOL_VERSION", 4)


@pytest.mark.parametrize(
    ("oldest", "newest", "agreed"), [(3, 4, 4), (4, 4, 4), (4, 5, 5), (5, 6, 5)]
)
async def test_servers_one_release_away_are_served(
    oldest: int, newest: int, agreed: int, autojump_clock: MockClock
) -> None:
    async with open_fleet() as fleet:
        links = fleet.client.links
        for role in ROLES:
            links[role].welcome = None
            fleet.client.send(role, Hello(Peer.of(fleet.client.me), newest, oldest))
        await fleet.client.wait_until(lambda: all(links[role].welcome for role in ROLES))
        welcomes = [links[role].welcome for role in ROLES]
        assert [welcome.version for welcome in welcomes if welcome is not None] == [agreed] * 2
        answer = await fleet.client.start(PROMPT, SamplingParams(max_tokens=20, seed=3))
        await fleet.client.finish(answer)
        assert answer.token_ids == completion(PROMPT, 3, 20)


@pytest.mark.parametrize(("oldest", "newest"), [(2, 3), (3, 3), (6, 6), (6, 7)])
async def test_servers_two_releases_away_are_told_what_to_do(
    oldest: int, newest: int, autojump_clock: MockClock
) -> None:
    async with open_fleet() as fleet:
        for role in ROLES:
            fleet.client.send(role, Hello(Peer.of(fleet.client.me), newest, oldest))
        links = fleet.client.links
        await fleet.client.wait_until(lambda: all(links[role].goodbyes for role in ROLES))
        for role in ROLES:
            assert f"speaks protocol versions {oldest} to {newest}" in links[role].goodbyes[0]
            assert "upgrade the older by one release at a time" in links[role].goodbyes[0]
            fleet.client.greet(role)

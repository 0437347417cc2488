"""Tests of a worker's tables of peers and of ended attempts: both are bounded, and entries
expire."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.frames import Ended, EndReason, Goodbye, Welcome
from transport.handshake import make_hello
from triolet.config import LinkConfig
from triolet.ids import AttemptKey, PeerId, Role
from worker.attempt_table import Tombstones
from worker.identity import Identity
from worker.server_sessions import PeerTable

from .scripts import scripted_engine

if TYPE_CHECKING:
    from transport.frames import AnyFrame

SERVERS = [PeerId(Role.SERVER, f"server-{n}", n + 1) for n in range(4)]


def peer_table(sent: list[tuple[bytes, AnyFrame]], max_peers: int = 2) -> PeerTable:
    identity = Identity(Role.DECODE, "decode-0", scripted_engine(), max_num_seqs=4)
    return PeerTable(
        identity,
        Role.SERVER,
        silence_s=2.0,
        max_peers=max_peers,
        send=lambda to, frame: sent.append((to, frame)),
    )


def test_no_more_peers_than_the_bound_are_known() -> None:
    sent: list[tuple[bytes, AnyFrame]] = []
    peers = peer_table(sent)
    greeted = [peers.greet(s.identity(), make_hello(s), 0.0) for s in SERVERS]
    assert greeted == [True, True, False, False]
    assert [type(frame) for _, frame in sent] == [Welcome, Welcome, Goodbye, Goodbye]
    assert peers.greet(SERVERS[0].identity(), make_hello(SERVERS[0]), 1.0)
    assert len(peers) == 2


def test_a_silent_peer_is_forgotten_and_makes_room() -> None:
    sent: list[tuple[bytes, AnyFrame]] = []
    peers = peer_table(sent)
    for server in SERVERS[:2]:
        peers.greet(server.identity(), make_hello(server), 0.0)
    assert peers.hear(SERVERS[0].identity(), 1.5) == SERVERS[0]
    peers.forget_silent(2.5)
    assert peers.known() == [(SERVERS[0].identity(), SERVERS[0])]
    assert peers.hear(SERVERS[1].identity(), 2.5) is None
    assert peers.greet(SERVERS[2].identity(), make_hello(SERVERS[2]), 2.5)


def ended(number: int, reason: EndReason = EndReason.STOP) -> Ended:
    return Ended(number.to_bytes(16, "big"), 0, reason, num_tokens=1, freed_blocks=1)


def key(number: int) -> AttemptKey:
    return ended(number).key


def test_the_first_last_words_stand() -> None:
    words = Tombstones(LinkConfig())
    words.say(ended(1), 0.0)
    words.say(ended(1, EndReason.CANCEL), 0.0)
    assert words.find(key(1)) == ended(1)


def test_last_words_are_forgotten_by_age_and_by_number() -> None:
    link = LinkConfig(tombstone_s=10.0, max_tombstones=2)
    words = Tombstones(link)
    for number, now in ((1, 0.0), (2, 5.0), (3, 6.0)):
        words.say(ended(number), now)
    assert [words.find(key(n)) is not None for n in (1, 2, 3)] == [False, True, True]
    words.sweep(15.5)
    assert [words.find(key(n)) is not None for n in (1, 2, 3)] == [False, False, True]

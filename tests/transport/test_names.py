"""Tests of the gate that decides which connection may use which name, key and role. No sockets are
involved."""

from __future__ import annotations

from transport.gate import MAX_NAMES, STRANGER, Credential, PeerNames
from triolet.ids import PeerId, Role

ANYBODY = Credential.parse(b"")
SERVER = PeerId(Role.SERVER, "web", 1)


def test_a_credential_is_one_word_beside_each_message() -> None:
    own = Credential("k" * 40, frozenset({Role.SERVER, Role.OPERATOR}))
    assert Credential.parse(own.user_id) == own
    assert Credential("", frozenset(Role)) == ANYBODY


def test_a_connection_is_a_stranger_until_it_claims_and_after_it_lost_its_name() -> None:
    names = PeerNames()
    assert names.sender(b"1") == STRANGER + b"1"
    assert names.connection(STRANGER + b"1") == b"1"
    assert names.connection(SERVER.identity()) is None
    assert names.claim(b"1", SERVER, ANYBODY) == ""
    assert (names.sender(b"1"), names.connection(SERVER.identity())) == (SERVER.identity(), b"1")
    assert names.claim(b"2", SERVER, ANYBODY) == ""
    assert names.sender(b"1") == STRANGER + b"1"
    assert names.connection(SERVER.identity()) == b"2"


def test_a_connection_that_says_a_second_name_gives_up_its_first() -> None:
    names = PeerNames()
    other = SERVER._replace(epoch=2)
    names.claim(b"1", SERVER, ANYBODY)
    names.claim(b"1", other, ANYBODY)
    assert names.sender(b"1") == other.identity()
    assert names.connection(SERVER.identity()) is None


def test_no_connection_can_be_called_as_a_peer_is() -> None:
    names = PeerNames()
    names.claim(b"1", SERVER, ANYBODY)
    assert names.sender(SERVER.identity()) != SERVER.identity()


def test_a_name_stays_with_the_key_that_claimed_it_first() -> None:
    names = PeerNames()
    first, second = (Credential(key * 40, frozenset({Role.SERVER})) for key in "ab")
    assert names.claim(b"1", SERVER, first) == ""
    assert "belongs to another key" in names.claim(b"2", SERVER, second)
    assert "may not act as a prefill" in names.claim(b"2", PeerId(Role.PREFILL, "p", 1), second)
    assert names.connection(SERVER.identity()) == b"1"


def test_one_keys_names_push_out_only_its_own() -> None:
    names = PeerNames()
    friend, flood = (Credential(key * 40, frozenset({Role.SERVER})) for key in "ab")
    names.claim(b"friend", SERVER, friend)
    for number in range(MAX_NAMES + 100):
        assert names.claim(b"%d" % number, PeerId(Role.SERVER, "flood", number), flood) == ""
    assert names.connection(SERVER.identity()) == b"friend"
    assert len(names._claims) == len(names._name_of) == MAX_NAMES + 1

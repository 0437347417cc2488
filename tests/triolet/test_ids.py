"""Tests of how errors and peers are named in logs and messages."""

from __future__ import annotations

import pytest

from triolet.errors import ConfigError, said_by
from triolet.ids import PeerId, Role, shown_identity


class ReadTimeout(Exception):
    """An error without a message, as libraries raise them."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConfigError("port is 0"), "port is 0"),
        (ReadTimeout(), "read timeout"),
        (OSError(), "os error"),
        (KeyboardInterrupt(), "keyboard interrupt"),
    ],
)
def test_an_error_is_called_by_its_words_and_never_by_its_class(
    error: BaseException, words: str
) -> None:
    assert said_by(error) == words


def test_a_peer_is_called_by_its_name_and_no_bytes_are_shown() -> None:
    peer = PeerId(Role.DECODE, "chat.decode-0", 0xAB)
    assert shown_identity(peer.identity()) == str(peer)
    assert shown_identity(b"\x00k\x8bE\xa7") == "006b8b45a7"
    assert shown_identity(b"decode:\n:00000000000000ab") == b"decode:\n:00000000000000ab".hex()

"""Fixtures for tests of whole server processes."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def port() -> Iterator[socket.socket]:
    """A socket bound to a free port."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound

"""Fixtures for the tests of the repository's rules: a cache of the parsed syntax trees of all
sources."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

from .test_layout import nodes_of, parsed

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package", autouse=True)
def kept_trees() -> Iterator[None]:
    """Exempt the cached trees from garbage collection: scanning their million nodes took four times
    as long as parsing. They contain no cycles and are freed by reference counts."""
    gc.disable()
    yield
    nodes_of.cache_clear()
    parsed.cache_clear()
    gc.enable()

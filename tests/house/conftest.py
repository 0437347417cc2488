"""The syntax of all sources is kept while the rules of the house are checked, and no longer."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

from .test_layout import nodes_of, parsed

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package", autouse=True)
def kept_trees() -> Iterator[None]:
    """A million nodes, of which none is garbage: looking for some took four times as long as the
    parse. They hold no cycles and go by their counts."""
    gc.disable()
    yield
    nodes_of.cache_clear()
    parsed.cache_clear()
    gc.enable()

"""Fixtures for tests of clients: a scripted fleet with a context long enough for coding agents."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import pytest

from tests.end_to_end.conftest import EAGER, PATIENT, play
from tests.end_to_end.fleet_process import running_fleet
from tests.end_to_end.scripted_model import command, write_model

from .installed import MODEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.end_to_end.fleet_process import FleetProcess

CONTEXT: Final = 65_536
"""Instructions and tools of coding agents take 13,000 to 24,000 tokens in the demo tokenizer."""
POOL: Final = ("--kv-pool", "256MiB", "--dtype", "bfloat16")
"""A third more than one full context."""


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the served model."""
    return write_model(tmp_path_factory.mktemp("wide"), max_position_embeddings=CONTEXT)


@pytest.fixture(scope="session")
def wide_fleet(
    wide_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FleetProcess]:
    """The fleet for the whole session; it must be idle afterwards."""
    log = tmp_path_factory.mktemp("wide-fleet") / "fleet.log"
    options = (str(wide_model), "--model-name", MODEL, *POOL, *PATIENT, *EAGER)
    with running_fleet(log, *options, at_rest=True, command=command(wide_model)) as fleet:
        yield fleet


@pytest.fixture
def wide_script(wide_fleet: FleetProcess, wide_model: Path) -> Callable[..., FleetProcess]:
    """A function that gives the fleet the rules of a test and returns it."""
    return partial(play, wide_fleet, wide_model)

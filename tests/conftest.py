"""What all tests share, and what none may leave to the next."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
import structlog
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

# Examples have no deadline of their own and may be slow to make: a busy machine is no bug. They are
# the same in every run, so that no change is refused for what another one did; who looks for new
# ones says `pytest --hypothesis-profile=explore`.
UNHURRIED: Final = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("house", UNHURRIED, derandomize=True)
settings.register_profile("explore", UNHURRIED, max_examples=1000)
settings.load_profile("house")

# Triton decides when it is first imported, by whomever, whether its kernels are compiled or
# interpreted. Without an NVIDIA driver only the latter can be.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """Commands and campaigns configure this process's logs; the next test must not find them so."""
    root, hook = logging.getLogger(), sys.excepthook
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    logging.captureWarnings(False)
    sys.excepthook = hook
    root.handlers[:] = handlers
    root.setLevel(level)

"""What all tests share, and what none may leave to the next."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

# Examples have no deadline of their own: a busy machine is no bug.
settings.register_profile("house", deadline=None)
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

"""Tests of tests/forked.py: a forked program that exceeds its timeout is killed like any other."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests import forked

HANGS = "import time; time.sleep(15)"


@pytest.mark.slow
def test_a_program_that_is_over_its_time_is_killed() -> None:
    with (
        pytest.raises(subprocess.TimeoutExpired),
        forked.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE) as process,
    ):
        process.communicate(timeout=0.1)
    assert process.returncode == -signal.SIGKILL, "it was not waited for"

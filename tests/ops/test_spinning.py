"""Tests that kernel threads spin only briefly at barriers, unless the environment says
otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ops.own_process import SPIN_COUNT, spin_briefly


def test_whoever_set_it_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    spin_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    spin_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == SPIN_COUNT


@pytest.mark.slow
def test_the_command_line_loads_nothing_that_reads_it_before() -> None:
    # Nor a client of HTTP, which the templates of workers would wait for.
    unwanted = ("httpx2", "numpy", "torch")
    script = f"import sys, ops.cli; print([m for m in {unwanted} if m in sys.modules])"
    finished = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert finished.stdout.strip() == "[]"

"""Tests of a whole fleet on one GPU: clients disconnect and workers die under load, and no KV block
and no answer is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]
ROOT = Path(__file__).parents[2]
ON_THE_GPU = [
    "--device",
    "cuda",
    "--backend",
    "triton",
    "--kv-pool",
    "512MiB",
    "--set",
    "worker.engine.gpu.fixed_batch=true",
]


def campaign(module: str, *options: str) -> None:
    """Run a loadtest campaign; its exit code says whether its own checks passed."""
    command = [sys.executable, "-m", module, *options]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_clients_that_leave_free_their_blocks(tmp_path: Path) -> None:
    options = ["--dtype", "bfloat16", *ON_THE_GPU]
    campaign("loadtest.cancels", "--count", "100", "--out", str(tmp_path), "--", *options)


def test_answers_outlive_their_workers(tmp_path: Path) -> None:
    load = ["--requests", "60", "--times", "1", "--dtype", "float32"]
    faults = ["--faults", "calm", "decode-kill", "prefill-kill"]
    campaign("loadtest.kills", *load, *faults, "--out", str(tmp_path), "--", *ON_THE_GPU)

"""Kernels run on a GPU if there is one, else interpreted on the CPU: the same tests for both."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return where kernels run; skip what needs them where Triton is not installed."""
    if not HAS_TRITON:
        pytest.skip("Triton is not installed (it is for Linux on x86-64 only)")
    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")

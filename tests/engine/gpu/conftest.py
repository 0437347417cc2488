"""Fixtures for tests of the Triton kernels, which run on a GPU if there is one and else interpreted
on the CPU."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None


def interpret_the_language_once() -> None:
    """Have Triton's interpreter patch its language at the first call of each device function.

    Triton does so at every call, a third of a kernel's time, and never removes the patches.
    """
    from triton.runtime.interpreter import InterpretedFunction

    patching = InterpretedFunction.__call__
    called = set()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if function.fn in called:
            return function.rewrite()(*args, **kwargs)
        called.add(function.fn)
        return patching(function, *args, **kwargs)

    InterpretedFunction.__call__ = call


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device of kernels. Skip if Triton is not installed."""
    if not HAS_TRITON:
        pytest.skip("Triton is not installed (it is for Linux on x86-64 only)")
    if os.environ.get("TRITON_INTERPRET") != "1":
        return torch.device("cuda")
    interpret_the_language_once()
    return torch.device("cpu")

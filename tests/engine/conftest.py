"""Fixtures for tests of the engine: checkpoints shared by a whole session, because writing one
takes longer than a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from engine.native.builds import BUILDS
from engine.native.library import Library, load_build, load_library
from store.gguf.directory import gguf_directory
from tests.gguf_files import write_quantised

from .checkpoints import Checkpoint, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Limit tests to one core, like a worker that shares a machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Return a function that returns a family's checkpoint, written at its first use."""
    written: dict[str, Checkpoint] = {}

    def of(name: str) -> Checkpoint:
        if name not in written:
            written[name] = write_checkpoint(tmp_path_factory.mktemp("models") / name, name)
        return written[name]

    return of


@pytest.fixture(scope="session")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a model with weights in every quantised form that kernels support."""
    folder = tmp_path_factory.mktemp("quantised")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        return gguf_directory(write_quantised(folder / "model.gguf"))


@pytest.fixture
def kernels() -> None:
    """Skip where the kernels are not built."""
    if load_library() is None:
        pytest.skip("the kernels are not built for this machine")


@pytest.fixture(params=["native", "sdpa"])
def backend(request: pytest.FixtureRequest) -> str:
    """Return each backend that computes on the CPU."""
    name: str = request.param
    if name == "native" and load_library() is None:
        pytest.skip("the kernels are not built for this machine")
    return name


@pytest.fixture(params=BUILDS)
def library(request: pytest.FixtureRequest) -> Library:
    """Return each build of the kernels."""
    loaded = load_build(request.param)
    if loaded is None:
        pytest.skip(f"no {request.param} build for this machine")
    return loaded

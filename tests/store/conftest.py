"""Fixtures for tests of the model store: a model to import, and a store to import it into."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from ops.models.importing import Imported, WantedImport, import_model
from ops.models.model_directory import demo_model_path
from store.layout import ModelStore
from store.verify import verify
from triolet.config import WeightFormat

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory that a test may change."""
    return copy_of_demo(tmp_path / "model")


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    """A store that does not exist yet."""
    return ModelStore(tmp_path / "store")


@pytest.fixture
def add(store: ModelStore) -> Callable[..., Imported]:
    """Import a model into the store."""

    def add(model: Path, name: str = "chat", tag: str | None = None, **others: object) -> Imported:
        given = {"sampling": None, "weights": WeightFormat.AUTO, "may_link": False, **others}
        return import_model(store, WantedImport(str(model), name, tag, **given))  # type: ignore[arg-type]

    return add


def copy_of_demo(to: Path) -> Path:
    """Return a directory with the demo model's files."""
    shutil.copytree(demo_model_path(), to)
    return to


def replace_readme(model: Path, words: str) -> None:
    """Make another version of a model; a file linked into a store must not be written."""
    (model / "README.md").unlink()
    (model / "README.md").write_text(words)


def faults(store: ModelStore) -> list[str]:
    """Return the faults found in a store."""
    return verify(store, store.entries()).faults

"""Fixtures for tests of registries: a version to push, a real registry, and a fake registry that
lies."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from ops.models.importing import WantedImport, import_model
from store.layout import ModelStore
from store.reference import tag_of
from store.registry.client import Registry
from store.registry.location import parse_location
from store.registry.pull import Pulled, WantedVersion, pull
from tests.gguf_files import write_tiny
from triolet.config import WeightFormat

from .docker_registry import DockerRegistry, running_registry
from .lying_registry import LyingRegistry, running_lying_registry

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def anybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide credentials and caches of the user who runs the tests; shorten waits between
    attempts."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TRIOLET_REGISTRY_USERNAME", raising=False)
    monkeypatch.delenv("TRIOLET_REGISTRY_PASSWORD", raising=False)
    monkeypatch.setattr("store.registry.client.FIRST_DELAY_S", 0.001)


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerRegistry]:
    """A real registry, open to everyone; each test uses its own repository."""
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    """A read-only store with a small model as `chat:v1`."""
    folder = tmp_path_factory.mktemp("source")
    store = ModelStore(folder / "store")
    file = write_tiny(folder / "tiny.gguf")
    import_model(store, WantedImport(str(file), "chat", "v1", None, WeightFormat.DTYPE, False))
    return store


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    """A store that does not exist yet."""
    return ModelStore(tmp_path / "store")


@pytest.fixture
def liar(source: ModelStore) -> Iterator[LyingRegistry]:
    """A registry with the version, which tells the truth unless a test sets a lie."""
    with running_lying_registry(source) as running:
        yield running


def digest_in(store: ModelStore) -> str:
    """Return the only version of a store."""
    (entry,) = store.entries()
    return entry.digest


def pulled(store: ModelStore, location: str) -> Pulled:
    """Pull into a store as `chat:v1`."""
    wanted = WantedVersion("chat", tag_of("chat", "v1"))
    with closing(Registry(parse_location(location), None)) as asked:
        return pull(store, asked, wanted, lambda done, total: None)

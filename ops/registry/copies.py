"""Whether registries still have what is to be evicted here."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from triolet.errors import ConfigError
from triolet.store.sources import Source, Sources

from .client import Registry, RegistryFailed
from .credentials import credentials_for
from .location import parse_location
from .manifests import has_manifest

if TYPE_CHECKING:
    from triolet.store.layout import ModelStore
    from triolet.store.reference import Pointer


def note_source(
    store: ModelStore, registry: Registry, name: str, digest: str, tag: Pointer | None
) -> None:
    """Note that a registry has a version.

    Args:
      store: that has it too.
      registry: with the repository.
      name: of the model here.
      digest: of the version.
      tag: that it was pulled or pushed with.

    Raises:
      StoreError: it cannot be written.
    """
    location = str(registry.location.at(digest))
    label = "" if tag is None else tag.label
    Sources(store).note(Source(name, digest, location, label, registry.is_insecure))


class Copies:
    """Asks registries, as who the environment and Docker's file say; one that fails is not asked
    again."""

    def __init__(self) -> None:
        self._failed: set[str] = set()

    def has(self, source: Source) -> bool:
        """Return whether a version can be pulled again."""
        try:
            place = parse_location(source.location)
            if place.host in self._failed:
                return False
            credentials = credentials_for(place.host, None, None)
            registry = Registry(place, credentials, is_insecure=source.is_insecure)
            with closing(registry):
                return has_manifest(registry, source.digest)
        except RegistryFailed:
            self._failed.add(place.host)
            return False
        except ConfigError:
            return False  # a source that is written by hand, or credentials that are broken

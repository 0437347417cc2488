"""Whether registries still have what is to be evicted here."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from triolet.errors import ConfigError, RegistryFailed

from ..referrers import SIGNATURE_TYPE
from ..sources import Source, Sources
from .blobs import has_blob
from .client import Registry
from .credentials import credentials_for
from .location import parse_location
from .manifests import find_manifest
from .referrers import unlisted_referrers

if TYPE_CHECKING:
    from ..layout import ModelStore
    from ..reference import Pointer


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
    again.

    Args:
      store: with the versions that are asked for.
    """

    def __init__(self, store: ModelStore) -> None:
        self._store = store
        self._failed: set[str] = set()

    def has(self, source: Source) -> bool:
        """Return whether a version can be pulled again, with all that the store has of it."""
        try:
            place = parse_location(source.location)
            if place.host in self._failed:
                return False
            credentials = credentials_for(place.host, None, None)
            registry = Registry(place, credentials, is_insecure=source.is_insecure)
            with closing(registry):
                return self._is_whole(registry, source.digest)
        except RegistryFailed:
            self._failed.add(place.host)
            return False
        except ConfigError:
            return False  # a source that is written by hand, or credentials that are broken

    def _is_whole(self, registry: Registry, digest: str) -> bool:
        # Its bytes, and not a status alone: a proxy's page is a 200 too.
        if find_manifest(registry, digest) is None:
            return False
        blobs = self._store.manifest(digest).blobs
        if not all(has_blob(registry, one) for one in blobs):
            return False
        # A signature that was made here and not pushed goes with the version for good. Measurements
        # do not count: `triolet model probe` makes them again.
        return not unlisted_referrers(registry, self._store, digest, (SIGNATURE_TYPE,))

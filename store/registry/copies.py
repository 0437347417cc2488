"""Check that a registry still has a version before the local store evicts it."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from triolet.errors import ConfigError, RegistryFailed

from ..referrers import SIGNATURE_TYPE
from .blobs import has_blob
from .client import Registry, find_manifest
from .credentials import credentials_for
from .location import parse_location
from .referrers import unlisted_referrers

if TYPE_CHECKING:
    from ..layout import ModelStore
    from ..sources import Source


class Copies:
    """Asks registries, with credentials from the environment and Docker's file; one that fails is
    not asked again.

    Args:
      store: with the versions in question.
    """

    def __init__(self, store: ModelStore) -> None:
        self._store = store
        self._failed: set[str] = set()

    def has(self, source: Source) -> bool:
        """Return whether a version can be pulled again with everything that the store has of it."""
        try:
            place = parse_location(source.location)
            if place.host in self._failed:
                return False
            credentials = credentials_for(place.host, None, None)
            with closing(Registry(place, credentials, is_insecure=source.is_insecure)) as registry:
                return self._is_whole(registry, source.digest)
        except RegistryFailed:
            self._failed.add(place.host)
        except ConfigError:
            pass  # a hand-written source, or broken credentials
        return False

    def _is_whole(self, registry: Registry, digest: str) -> bool:
        # Compare its bytes, not only the status: a proxy's error page may be a 200 too.
        if not find_manifest(registry, digest):
            return False
        blobs = self._store.manifest(digest).blobs
        # A signature that was made here and not pushed would be lost with the version. Measurements
        # do not count: `triolet model probe` makes them again.
        return all(has_blob(registry, one) for one in blobs) and not unlisted_referrers(
            registry, self._store, digest, (SIGNATURE_TYPE,)
        )

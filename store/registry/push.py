"""`triolet model push`: upload a version to a registry, first all blobs, then its manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from triolet.errors import RegistryFailed, StoreError

from ..manifest import MAX_MANIFEST_BYTES, Descriptor, digest_of
from ..reference import PointerKind, Reference
from ..sources import Source, Sources
from ..verify import require_whole
from .blobs import for_each, has_blob, upload
from .client import Registry, find_manifest, put_manifest
from .referrers import send_referrers

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..layout import ModelStore


class Pushed(NamedTuple):
    """Result of a push.

    Attributes:
      num_sent: blobs sent; the registry had the others.
      sent_bytes: their size.
      total_bytes: total size of its blobs.
      num_referrers: signatures and measurements sent.
    """

    num_sent: int
    sent_bytes: int
    total_bytes: int
    num_referrers: int


def push(
    store: ModelStore,
    registry: Registry,
    version: Reference,
    digest: str,
    expect: str | None,
    on_bytes: Callable[[int, int], None],
) -> Pushed:
    """Send a version to a registry: its blobs, its manifest, then its signatures and measurements.

    Args:
      store: store with the version.
      registry: with the location of the manifest.
      version: the reference as given; a tag in it is evicted and pulled with the version.
      digest: digest of the version.
      expect: version that the tag may have there now, besides this one.
      on_bytes: called with the number of bytes done, and the total.

    Raises:
      RegistryFailed: the registry refuses or is lost, or the tag is another version there.
      StoreError: a blob here is damaged, or the location names another digest.
    """
    location = registry.location
    if location.digest not in (None, digest):
        raise StoreError(f"{location} names another version than {digest}; give a tag instead")
    manifest, content = store.manifest(digest), store.read(digest, MAX_MANIFEST_BYTES)
    blobs = {one.digest: one for one in manifest.blobs}.values()
    total = sum(one.size for one in blobs)
    require_whole(store, digest, blobs)
    there = find_manifest(registry, location.reference)
    found = digest_of(there) if there else None
    if found not in (None, digest, expect):
        raise RegistryFailed(
            f"{location} is {found} and stays; push to another tag, or move it with --expect "
            f"{found}"
        )

    def send(one: Descriptor) -> int:
        if has_blob(registry, one):
            on_bytes(one.size, total)
            return 0
        path = store.blob_path(one.digest)
        upload(registry, one, path, lambda count: on_bytes(count, total))
        return one.size

    sent = [size for size in for_each(registry, blobs, send) if size]
    if found != digest:
        put_manifest(registry, location.reference, content)
    num_referrers = send_referrers(registry, store, digest)
    tag = version.pointer
    label = tag.label if tag is not None and tag.kind is PointerKind.TAG else ""
    place = str(location.at(digest))
    Sources(store).note(Source(version.name, digest, place, label, registry.is_insecure))
    return Pushed(len(sent), sum(sent), total, num_referrers)

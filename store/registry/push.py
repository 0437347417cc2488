"""`triolet model push`: a version goes to a registry as it is: what is there is not sent again."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from triolet.errors import RegistryFailed, StoreError

from ..manifest import MANIFEST_TYPE, MAX_MANIFEST_BYTES, digest_of
from ..reference import PointerKind
from ..verify import require_whole
from .blobs import Progress, has_blob, upload
from .copies import note_source
from .manifests import DIGEST_HEADER, fetch_manifest, put_manifest
from .referrers import send_referrers
from .transfers import for_each

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..layout import ModelStore
    from ..manifest import Descriptor
    from ..reference import Reference
    from .client import Registry


class Pushed(NamedTuple):
    """A version that is in a registry.

    Attributes:
      num_sent: blobs that were sent; the others were there.
      sent_bytes: of these.
      total_bytes: of all its blobs.
      num_referrers: signatures and measurements that were sent.
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
    """Send a version to a registry: its blobs, then its manifest, then what is about it.

    Args:
      store: that has it.
      registry: with the place of the manifest.
      version: as it was named; a tag goes and comes with it if it is evicted.
      digest: of the version.
      expect: the version that a tag may be there now, beside this one.
      on_bytes: told how many bytes are there, and of how many.

    Raises:
      RegistryFailed: the registry refuses or is lost, or the tag is another version there.
      StoreError: a blob here is damaged, or the place names another digest.
    """
    location = registry.location
    if location.digest not in (None, digest):
        raise StoreError(f"{location} names another version than {digest}; give a tag instead")
    manifest, content = store.manifest(digest), store.read(digest, MAX_MANIFEST_BYTES)
    blobs = {one.digest: one for one in manifest.blobs}
    total = sum(one.size for one in blobs.values())
    require_whole(store, digest, blobs.values())
    there = _digest_there(registry)
    if there not in (None, digest, expect):
        raise RegistryFailed(
            f"{location} is {there} and stays; push to another tag, or move it with --expect "
            f"{there}"
        )
    progress = Progress(lambda done: on_bytes(done, total))

    def send(one: Descriptor) -> int:
        if has_blob(registry, one):
            progress.at(one.digest, one.size)
            return 0
        upload(registry, one, store.blob_path(one.digest), progress)
        return 1

    sent = for_each(registry, blobs.values(), send)
    if there != digest:
        put_manifest(registry, location.reference, content)
    num_referrers = send_referrers(registry, store, digest)
    tag = version.pointer
    if tag is not None and tag.kind is not PointerKind.TAG:
        tag = None
    note_source(store, registry, version.name, digest, tag)
    sent_bytes = sum(blobs[one].size for one, is_new in sent.items() if is_new)
    return Pushed(sum(sent.values()), sent_bytes, total, num_referrers)


def _digest_there(registry: Registry) -> str | None:
    """Return the digest of the manifest that has the place now."""
    reference = registry.location.reference
    answer = registry.call(
        "HEAD",
        f"manifests/{reference}",
        f"manifest {reference}",
        {200, 404},
        headers={"accept": MANIFEST_TYPE},
    )
    if answer.status == 404:
        return None
    return answer.headers.get(DIGEST_HEADER) or digest_of(fetch_manifest(registry, reference))

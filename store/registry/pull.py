"""`triolet model pull`: download a version from a registry unchanged, and tag it when complete."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from triolet.errors import StoreError
from triolet.units import show_size

from ..aliases import Aliases
from ..evict import make_room
from ..layout import ModelStore, StoreEntry, explained
from ..manifest import ENGINE_TYPE, POLICY_TYPE, Descriptor, Manifest, digest_of, read_manifest
from ..measured import contradicted, without_known
from ..partial import Partials
from ..reference import Pointer, Reference, require_name
from ..referrers import GOLDEN_TYPE, Artefact, keep_artefacts
from ..signatures import signatures_of
from ..sources import Source, Sources
from ..verify import is_whole
from .blobs import download, for_each
from .client import Registry, find_manifest
from .copies import Copies
from .referrers import FoundReferrers, fetch_referrers

if TYPE_CHECKING:
    from collections.abc import Callable


class WantedVersion(NamedTuple):
    """The names and limit for a pulled version.

    Attributes:
      name: name of the model.
      tag: tag of the version, if any.
      limit_bytes: size limit of the store; None for none.
    """

    name: str
    tag: Pointer | None
    limit_bytes: int | None = None


class Pulled(NamedTuple):
    """Result of a pull.

    Attributes:
      digest: digest of the version.
      fetched_bytes: received over the network.
      total_bytes: total size of its blobs.
      signers: ids of keys with a valid signature, new or already here.
      notes: why some signatures and measurements were not kept.
    """

    digest: str
    fetched_bytes: int
    total_bytes: int
    signers: tuple[str, ...]
    notes: tuple[str, ...]


def pull(
    store: ModelStore,
    registry: Registry,
    wanted: WantedVersion,
    on_bytes: Callable[[int, int], None],
    on_evicted: Callable[[list[Source]], None] | None = None,
) -> Pulled:
    """Pull a version with its signatures into a store. It gets a name only when everything has
    arrived and is checked; nothing is fetched if a required signature is missing.

    Args:
      store: the target; created if there is none.
      registry: with the manifest's location.
      wanted: its name here.
      on_bytes: called with the number of new bytes, negative if some were wrong, and the total.
      on_evicted: called with the versions that were evicted for it, before anything is fetched.

    Raises:
      RegistryFailed: the registry refuses, lies or is lost. Received bytes are kept for the next
        pull.
      StoreError: it is not a version of a model, lacks a signature that its name requires here, or
        the store cannot be written.
    """
    require_name(wanted.name)
    location = registry.location
    content = find_manifest(registry, location.reference, allowed=(200,))
    digest = digest_of(content)
    manifest = _model_manifest(content, digest, str(location))
    referrers = _without_unsigned_golden(store, wanted.name, fetch_referrers(registry, digest))
    if wanted.tag is not None:
        reference = Reference(wanted.name, wanted.tag)
        Aliases(store).require_signed(reference, digest, referrers.signers)
    one = _Pull(store, registry, manifest, on_bytes)
    if wanted.limit_bytes is not None:
        small = [content, *(part for _, pair in referrers.artefacts for part in pair)]
        evicted = one.make_room(wanted.limit_bytes, digest, sum(map(len, small)))
        if on_evicted is not None:
            on_evicted(evicted)
    fetched = one.run(content, wanted, referrers.artefacts)
    label = "" if wanted.tag is None else wanted.tag.label
    source = Source(wanted.name, digest, str(location.at(digest)), label, registry.is_insecure)
    Sources(store).note(source)
    signers = sorted({*referrers.signers, *signatures_of(store, digest).keys})
    notes = (*referrers.notes, *contradicted(store, digest, referrers.artefacts))
    return Pulled(digest, fetched, one.total_bytes, tuple(signers), notes)


def _without_unsigned_golden(store: ModelStore, name: str, found: FoundReferrers) -> FoundReferrers:
    """Leave out golden tokens if the model requires signatures: golden tokens are not signed, and
    wrong ones would keep its workers from serving."""
    kept = [(kind, one) for kind, one in found.artefacts if kind != GOLDEN_TYPE]
    if len(kept) == len(found.artefacts) or not Aliases(store).requires_signatures(name):
        return found
    note = (
        f"golden tokens there are not kept: {name} requires signatures here, and golden tokens "
        "are not signed; `triolet model probe` makes them on this machine"
    )
    return found._replace(artefacts=kept, notes=(*found.notes, note))


def _model_manifest(content: bytes, digest: str, location: str) -> Manifest:
    """Return the manifest of a version made by `triolet model import`."""
    remedy = "push a version there with `triolet model push`"
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if "manifests" in msgspec.json.decode(content, type=dict[str, object]):
            raise StoreError(
                f"{location} is an index of several manifests, expected the manifest of one model; "
                f"name one of them by its digest, or {remedy}"
            )
    try:
        manifest = read_manifest(content, digest, remedy)
    except StoreError as error:
        raise StoreError(f"{location}: {error}") from None
    for media_type in (ENGINE_TYPE, POLICY_TYPE):
        if manifest.layer(media_type) is None:
            raise StoreError(
                f"{location} is a model without a layer {media_type}, which another program has "
                f"made; get its files, import them, and {remedy}"
            )
    return manifest


class _Pull:
    """One pull in progress."""

    def __init__(
        self,
        store: ModelStore,
        registry: Registry,
        manifest: Manifest,
        on_bytes: Callable[[int, int], None],
    ) -> None:
        self._store = store
        self._registry = registry
        self._partials = Partials(store)
        self._blobs = {one.digest: one for one in manifest.blobs}
        self.total_bytes = sum(one.size for one in self._blobs.values())
        self._on_bytes = on_bytes

    def make_room(self, limit_bytes: int, digest: str, small_bytes: int) -> list[Source]:
        """Evict versions until this one fits below the limit; return them.

        Args:
          limit_bytes: size limit of the store.
          digest: digest of the version.
          small_bytes: size of its manifest and artefacts.

        Raises:
          StoreError: not enough can be evicted; then nothing is.
        """
        with self._partials.kept(), self._store.writing() as writer:
            missing = self._missing()
            wanted = self._bytes_to_fetch(missing) + (small_bytes if missing else 0)
            stay = {digest, *self._blobs}
            is_there = Copies(self._store).has
            aliases = Aliases(self._store)
            return make_room(writer, aliases, limit_bytes - wanted, is_there, wanted=stay).versions

    def run(
        self, content: bytes, wanted: WantedVersion, referrers: list[tuple[str, Artefact]]
    ) -> int:
        """Fetch missing blobs, then add the version; return the bytes received."""
        with self._partials.kept():
            with explained(self._store.root):
                self._store.receipts.folder.mkdir(exist_ok=True)
            missing = self._missing()
            self._require_room(missing)
            self._count(self.total_bytes - sum(one.size for one in missing))
            fetched = self._fetch(missing)
            with self._store.writing() as writer:
                # A collection may have removed some in the meantime.
                gone = self._missing()
                fetched += self._fetch(gone)
                with explained(self._store.root):
                    for one in gone:
                        self._partials.keep(writer, one.digest)
                    for one in missing:
                        # Left over if another pull or an import was first.
                        self._partials.path(one.digest).unlink(missing_ok=True)
                digest = writer.put(content)
                entry = StoreEntry(wanted.name, digest, len(content))
                writer.set_entries({*self._store.entries(), entry})
                keep_artefacts(writer, digest, without_known(self._store, digest, referrers))
                if wanted.tag is not None:
                    Aliases(self._store).tag_new(wanted.tag, digest, "pulled")
        return fetched

    def _count(self, num_bytes: int) -> None:
        self._on_bytes(num_bytes, self.total_bytes)

    def _missing(self) -> list[Descriptor]:
        return [one for one in self._blobs.values() if not is_whole(self._store, one)]

    def _bytes_to_fetch(self, missing: list[Descriptor]) -> int:
        return sum(one.size - self._partials.size(one.digest) for one in missing)

    def _require_room(self, missing: list[Descriptor]) -> None:
        wanted, free = self._bytes_to_fetch(missing), shutil.disk_usage(self._store.root).free
        if wanted > free:
            raise StoreError(
                f"{self._store.root} has room for {show_size(free)} and the version needs "
                f"{show_size(wanted)} more; make room (`triolet model gc` removes unnamed "
                "blobs), or give --store on another disk; nothing was fetched"
            )

    def _fetch(self, blobs: list[Descriptor]) -> int:
        """Fetch blobs into their partial files. One with a receipt was fetched before and has not
        been written since."""
        receipts = self._store.receipts

        def fetch(one: Descriptor) -> int:
            with self._partials.opened(one.digest) as file:
                is_here = receipts.find(os.fstat(file.fileno())) == one.digest
                # Another pull or an import may have been first.
                if is_here or is_whole(self._store, one):
                    return 0
                num_bytes = download(self._registry, file, one, self._count)
                receipts.write(os.fstat(file.fileno()), one.digest)
            return num_bytes

        return sum(for_each(self._registry, blobs, fetch))

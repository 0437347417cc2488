"""What a machine has found out about a version: golden tokens and capacity, kept beside it.

Golden tokens are the first greedy tokens of some prompts. Everything that their bits depend on
beside the version is in the key, so a worker with the same key has to compute the same tokens.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple, TypeAlias

import msgspec

from triolet.errors import ModelError, StoreError

from .compute_digest import compute_digest
from .layout import ModelStore
from .manifest import canonical, digest_of
from .referrers import (
    CAPACITY_TYPE,
    GOLDEN_TYPE,
    WORDS,
    Artefact,
    ReferrerFault,
    artefact,
    keep_artefacts,
    layer_of,
    read_artefact,
    referrers_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .layout import Referrer, Writer

ANY_HOST: Final = "any"
"""Host class of golden tokens: where their bits depend on the machine, the arithmetic names it."""
MAX_PROMPTS: Final = 8
"""Each start of a worker computes all of them."""
MAX_PROMPT_TOKENS: Final = 64
MAX_GOLDEN_TOKENS: Final = 16
"""Of one prompt."""
_Word: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,200}\Z")]
"""Shown on terminals, and may come from a registry."""
_TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Number: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]


class MeasurementKey(msgspec.Struct, frozen=True):
    """What a measurement holds for, beside the version.

    Attributes:
      backend: that computes.
      dtype: that is computed in.
      arithmetic: kernels, and what of the machine their bits depend on.
      host: class of machines, or ANY_HOST.
    """

    backend: _Word
    dtype: _Word
    arithmetic: _Word
    host: _Word = ANY_HOST

    def __str__(self) -> str:
        return f"{self.backend} {self.dtype} {self.arithmetic} host={self.host}"


class GoldenPrompt(msgspec.Struct, frozen=True):
    """A prompt and what follows.

    Attributes:
      token_ids: of the prompt.
      golden_ids: its first greedy tokens.
    """

    token_ids: Annotated[
        tuple[_TokenId, ...], msgspec.Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)
    ]
    golden_ids: Annotated[
        tuple[_TokenId, ...], msgspec.Meta(min_length=1, max_length=MAX_GOLDEN_TOKENS)
    ]


class Golden(msgspec.Struct, frozen=True):
    """Golden tokens of a version.

    Attributes:
      key: what they hold for.
      prompts: with their tokens.
    """

    key: MeasurementKey
    prompts: Annotated[tuple[GoldenPrompt, ...], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)]


class MeasuredCapacity(msgspec.Struct, frozen=True):
    """How fast one worker was on an idle machine.

    A decode step takes `step_s + row_s * rows + kv_token_s * tokens in the KV of all rows`.

    Attributes:
      key: what it holds for; the host is a class of machines with a number of threads.
      prefill_tokens_per_s: of a full step.
      step_s: of any decode step.
      row_s: of each row more.
      kv_token_s: of each token that a row attends to.
      load_s: from the start of the load to the first step, with the files in the page cache.
    """

    key: MeasurementKey
    prefill_tokens_per_s: _Number
    step_s: _Number
    row_s: _Number
    kv_token_s: _Number
    load_s: _Number


class KeptMeasurement(NamedTuple):
    """A measurement that a store has.

    Attributes:
      referrer: as the index names it.
      said: what it says.
      path: of the file that says it.
    """

    referrer: Referrer
    said: Golden | MeasuredCapacity
    path: Path


def as_artefact(said: Golden | MeasuredCapacity, digest: str, size: int) -> tuple[str, Artefact]:
    """Return the type and the artefact of a measurement.

    Args:
      said: what was measured.
      digest: of the version's manifest.
      size: of that manifest.
    """
    kind = GOLDEN_TYPE if isinstance(said, Golden) else CAPACITY_TYPE
    return kind, artefact(kind, canonical(msgspec.to_builtins(said)), digest, size)


def read_measured(found: Artefact, artifact_type: str, digest: str) -> Golden | MeasuredCapacity:
    """Return what an artefact says.

    Args:
      found: the artefact.
      artifact_type: GOLDEN_TYPE or CAPACITY_TYPE.
      digest: of the version that it should be about.

    Raises:
      ReferrerFault: it is damaged, or about another version.
    """
    layer = layer_of(found.manifest, artifact_type, digest)
    if digest_of(found.layer) != layer.digest:
        raise ReferrerFault("its layer is another one than its manifest says")
    kind: type[Golden | MeasuredCapacity] = (
        Golden if artifact_type == GOLDEN_TYPE else MeasuredCapacity
    )
    try:
        return msgspec.json.decode(found.layer, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ReferrerFault(f"its layer cannot be read: {error}") from None


def measured_of(store: ModelStore, digest: str, artifact_type: str) -> list[KeptMeasurement | str]:
    """Return the measurements of a type about a version; a sentence for each that is damaged."""
    found: list[KeptMeasurement | str] = []
    for one in referrers_of(store, digest, artifact_type):
        try:
            parts = read_artefact(store, one)
            said = read_measured(parts, artifact_type, digest)
            found.append(KeptMeasurement(one, said, store.blob_path(digest_of(parts.layer))))
        except (StoreError, ReferrerFault) as error:
            found.append(f"{WORDS[artifact_type]} {one.digest}: {error}")
    return found


def keep_measured(
    writer: Writer, digest: str, measured: list[Golden | MeasuredCapacity]
) -> list[str]:
    """Keep measurements beside their version; those with an equal key, and damaged ones, go.

    Args:
      writer: of the store.
      digest: of the version.
      measured: at most one of each type.

    Returns:
      The digests of their artefacts.

    Raises:
      StoreError: the version has been removed, or nothing can be written.
    """
    store, size = writer.store, writer.require_size(digest)
    new = [as_artefact(said, digest, size) for said in measured]
    replaced = set()
    for said, (kind, _) in zip(measured, new, strict=True):
        sound = [
            one for one in measured_of(store, digest, kind) if isinstance(one, KeptMeasurement)
        ]
        stay = {one.referrer.digest for one in sound if one.said.key != said.key}
        replaced |= {one.digest for one in referrers_of(store, digest, kind)} - stay
    keep_artefacts(writer, digest, new, replaced)
    return [one.digest for _, one in new]


def without_known(
    store: ModelStore, digest: str, artefacts: Sequence[tuple[str, Artefact]]
) -> list[tuple[str, Artefact]]:
    """Return artefacts from elsewhere without measurements for keys that the store has some for:
    what was measured or came first here stays.

    Args:
      store: that is to keep them.
      digest: of the version.
      artefacts: valid ones, each with its type.
    """
    kept = []
    known = {
        (kind, one.said.key)
        for kind in (GOLDEN_TYPE, CAPACITY_TYPE)
        for one in measured_of(store, digest, kind)
        if isinstance(one, KeptMeasurement)
    }
    for kind, one in artefacts:
        if kind in (GOLDEN_TYPE, CAPACITY_TYPE):
            place = (kind, read_measured(one, kind, digest).key)
            if place in known:
                continue
            known.add(place)
        kept.append((kind, one))
    return kept


def contradicted(
    store: ModelStore, digest: str, artefacts: Sequence[tuple[str, Artefact]]
) -> list[str]:
    """Return a sentence for each artefact from elsewhere with other golden tokens than the store
    has for the same key: one of the machines that made them computes wrongly.

    Args:
      store: that has the version.
      digest: of the version.
      artefacts: valid ones, each with its type.
    """
    kept = [
        one for one in measured_of(store, digest, GOLDEN_TYPE) if isinstance(one, KeptMeasurement)
    ]
    here = {one.said.key: one for one in kept}
    notes = []
    for kind, one in artefacts:
        said = read_measured(one, kind, digest) if kind == GOLDEN_TYPE else None
        if said is not None and said.key in here and said != here[said.key].said:
            notes.append(
                f"golden tokens {one.digest} there differ from those here for {said.key} "
                f"({here[said.key].path}), which stay: `triolet model probe` on a machine that is "
                "known to be sound says which are right"
            )
    return notes


def golden_for(root: Path, digest: str, key: MeasurementKey) -> tuple[Golden, Path] | None:
    """Return the golden tokens that a worker has to compute and the file that says so; None if
    there are none for its key. Those of the version come first, then those of other versions of its
    model with the same compute digest.

    Args:
      root: of the store that has the version.
      digest: of the version.
      key: of the worker.

    Raises:
      ModelError: some of the version are damaged, so that it is not known what they are for.
    """
    store = ModelStore(root)
    for version in (digest, *_computing_alike(store, digest)):
        for one in measured_of(store, version, GOLDEN_TYPE):
            if isinstance(one, KeptMeasurement):
                if isinstance(one.said, Golden) and one.said.key == key:
                    return one.said, one.path
            elif version == digest:
                raise ModelError(
                    f"{one}; what the model should say is not known: `triolet model probe` "
                    "measures it again, if the model is sound"
                )
    return None


def _computing_alike(store: ModelStore, digest: str) -> list[str]:
    """Return the other versions of a model that have golden tokens and the same compute digest.

    Versions under other names do not count: unsigned golden tokens from a registry may be beside
    them, and this model may take only signed versions.

    Raises:
      StoreError: the index or the version's manifest is broken.
    """
    entries = store.entries()
    names = {one.name for one in entries if one.digest == digest}
    measured = {one.subject for one in store.referrers() if one.artifact_type == GOLDEN_TYPE}
    others = {one.digest for one in entries if one.name in names} & measured - {digest}
    if not others:
        return []
    own = compute_digest(store, store.manifest(digest))
    found: list[str] = []
    for other in sorted(others):
        # Damage to another version keeps no worker of this one from starting.
        with suppress(StoreError):
            if compute_digest(store, store.manifest(other)) == own:
                found.append(other)
    return found

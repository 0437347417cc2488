"""Measurements of a version on a machine: golden tokens and capacity, stored with the version.

Golden tokens are the first greedy tokens of some prompts. Besides the version they depend on the
values in their key, so workers with the same key must compute the same tokens.
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
"""Host class of golden tokens: `arithmetic` already names what depends on the machine."""
MAX_PROMPTS: Final = 8
"""Prompts: each start of a worker computes all of them."""
MAX_PROMPT_TOKENS: Final = 64
MAX_GOLDEN_TOKENS: Final = 16
"""Tokens of one prompt."""
_Word: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,200}\Z")]
"""Length of texts, which are shown on terminals and may come from a registry."""
_TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Number: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]


class MeasurementKey(msgspec.Struct, frozen=True):
    """What a measurement applies to, besides the version.

    Attributes:
      backend: compute backend.
      dtype: data type of the computation.
      arithmetic: kernels, and the machine features that their bits depend on.
      host: class of machines, or ANY_HOST.
    """

    backend: _Word
    dtype: _Word
    arithmetic: _Word
    host: _Word = ANY_HOST

    def __str__(self) -> str:
        return f"{self.backend} {self.dtype} {self.arithmetic} host={self.host}"


class GoldenPrompt(msgspec.Struct, frozen=True):
    """A prompt and its continuation.

    Attributes:
      token_ids: token ids of the prompt.
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
      key: what they apply to.
      prompts: with their tokens.
    """

    key: MeasurementKey
    prompts: Annotated[tuple[GoldenPrompt, ...], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)]


class MeasuredCapacity(msgspec.Struct, frozen=True):
    """Speed of one worker on an idle machine.

    A decode step takes `step_s + row_s * rows + kv_token_s * tokens in the KV of all rows`.

    Attributes:
      key: what it applies to; the host is a class of machines with a number of threads.
      prefill_tokens_per_s: prefill tokens per second of a full step.
      step_s: fixed time of a decode step.
      row_s: additional time per row.
      kv_token_s: additional time per token that a row attends to.
      load_s: from the start of loading to the first step, with the files in the page cache.
    """

    key: MeasurementKey
    prefill_tokens_per_s: _Number
    step_s: _Number
    row_s: _Number
    kv_token_s: _Number
    load_s: _Number


class KeptMeasurement(NamedTuple):
    """A measurement in a store.

    Attributes:
      referrer: its entry in the index.
      said: its content.
      path: path of its file.
    """

    referrer: Referrer
    said: Golden | MeasuredCapacity
    path: Path


def as_artefact(said: Golden | MeasuredCapacity, digest: str, size: int) -> tuple[str, Artefact]:
    """Return the type and the artefact of a measurement.

    Args:
      said: the measurement.
      digest: digest of the version's manifest.
      size: size of that manifest.
    """
    kind = GOLDEN_TYPE if isinstance(said, Golden) else CAPACITY_TYPE
    return kind, artefact(kind, canonical(msgspec.to_builtins(said)), digest, size)


def read_measured(found: Artefact, artifact_type: str, digest: str) -> Golden | MeasuredCapacity:
    """Parse the measurement in an artefact.

    Args:
      found: the artefact.
      artifact_type: GOLDEN_TYPE or CAPACITY_TYPE.
      digest: digest of the version that it should belong to.

    Raises:
      ReferrerFault: it is damaged, or belongs to another version.
    """
    layer = layer_of(found.manifest, artifact_type, digest)
    if digest_of(found.layer) != layer.digest:
        raise ReferrerFault("its layer does not match its manifest")
    kind: type[Golden | MeasuredCapacity] = (
        Golden if artifact_type == GOLDEN_TYPE else MeasuredCapacity
    )
    try:
        return msgspec.json.decode(found.layer, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ReferrerFault(f"its layer cannot be read: {error}") from None


def measured_of(store: ModelStore, digest: str, artifact_type: str) -> list[KeptMeasurement | str]:
    """Return a version's measurements of a type; for each damaged one, a sentence that says so."""
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
    """Store measurements with their version; they replace those with the same key, and damaged
    ones.

    Args:
      writer: writer of the store.
      digest: digest of the version.
      measured: at most one of each type.

    Returns:
      The digests of their artefacts.

    Raises:
      StoreError: the version has been removed, or the store cannot be written.
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
    """Leave out artefacts from elsewhere with keys for which the store has measurements: local
    and earlier measurements stay.

    Args:
      store: store for the measurements.
      digest: digest of the version.
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
    """Return a sentence for each artefact from elsewhere with golden tokens that differ from the
    store's for the same key: one of the two machines computes wrongly.

    Args:
      store: store with the version.
      digest: digest of the version.
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
                "known to work correctly shows which are right"
            )
    return notes


def golden_for(root: Path, digest: str, key: MeasurementKey) -> tuple[Golden, Path] | None:
    """Return the golden tokens that a worker must reproduce, and their file; None if there are none
    for its key. Those of the version take precedence over those of other versions of its model with
    the same compute digest.

    Args:
      root: root of the store with the version.
      digest: digest of the version.
      key: key of the worker.

    Raises:
      ModelError: some of the version's are damaged, so their keys are unknown.
    """
    store = ModelStore(root)
    for version in (digest, *_computing_alike(store, digest)):
        for one in measured_of(store, version, GOLDEN_TYPE):
            if isinstance(one, KeptMeasurement):
                if isinstance(one.said, Golden) and one.said.key == key:
                    return one.said, one.path
            elif version == digest:
                raise ModelError(
                    f"{one}; the expected tokens are unknown: `triolet model probe` "
                    "measures them again, if the model is intact"
                )
    return None


def _computing_alike(store: ModelStore, digest: str) -> list[str]:
    """Return the model's other versions with golden tokens and the same compute digest.

    Versions under other names do not count: they may have unsigned golden tokens from a registry,
    while this model may require signatures.

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
        # Damage to another version does not keep workers of this one from starting.
        with suppress(StoreError):
            if compute_digest(store, store.manifest(other)) == own:
                found.append(other)
    return found

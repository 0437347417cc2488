"""A version of the store in place of a directory: found, checked, and held while it is served."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from store.aliases import Aliases
from store.compute_digest import compute_digest
from store.gguf.directory import WEIGHTS as GGUF_WEIGHTS
from store.gguf.directory import gguf_directory
from store.layout import ModelStore, default_store
from store.manifest import ENGINE_TYPE, MAX_DOCUMENT_BYTES, SAMPLING_FILE, SAMPLING_TYPE
from store.reference import is_reference, parse_reference
from store.sources import Sources
from store.view import opened
from triolet.config import WeightFormat
from triolet.errors import ConfigError, StoreError
from triolet.home import expanded
from triolet.ids import Role

from ..settings.form import of_role
from .known import AUTO, DEMO, KNOWN
from .model_directory import refuse_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from store.manifest import Manifest

    from ..settings.form import Settings

log = structlog.get_logger(__name__)

_OWN_NAMES: Final = frozenset({AUTO, DEMO, *KNOWN})
NO_VERSION: Final = (
    "{given!r} is no version of the store; import it there with `triolet model import`, or add the "
    "model with `triolet model add`, which takes paths"
)


class _Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a version's engine layer says."""

    weights: WeightFormat


def store_of(given: str | Path | None) -> ModelStore:
    """Return the store that `--store` or `fleet.store` names, or this user's."""
    return ModelStore(default_store() if given is None else expanded(Path(given)))


@contextmanager
def with_stored_model(
    settings: Settings, *, is_served: bool = True, is_reference_only: bool = False
) -> Iterator[Settings]:
    """Give settings with a directory as the model, also where a version of the store was named;
    that version stays in the store until the end.

    What exists on disk under the name is meant first, then the models with names of their own.

    Args:
      settings: of a process or fleet.
      is_served: the log says which version it is; else it is only looked at.
      is_reference_only: the name is of a version of the store, whatever exists on disk under it.

    Raises:
      ConfigError: there is no such version, it is damaged, lacks a signature that is required, or a
        setting is not what it was imported with.
    """
    named, store = settings.fleet.model, store_of(settings.fleet.store)
    is_meant = (
        named is not None
        and named not in _OWN_NAMES
        and is_reference(named)
        and (settings.fleet.store is not None or store.is_there)
    )
    if is_reference_only and not is_meant:
        raise ConfigError(NO_VERSION.format(given=named))
    if named is None or not is_meant or (Path(named).exists() and not is_reference_only):
        yield settings
        return
    reference = parse_reference(named)
    try:
        aliases = Aliases(store)
        digest = aliases.resolve(reference)
    except StoreError as error:
        raise StoreError(f"{named} is no directory and no file here, and {error}") from None
    aliases.require_signed(reference, digest)
    version = f"{reference.name}@{digest}"
    with opened(store, digest) as (view, manifest):
        refuse_adapter(view, named)
        path = view
        if (view / GGUF_WEIGHTS).is_symlink():
            path = gguf_directory(view / GGUF_WEIGHTS, _gguf_extra(store, manifest, version))
        settings = replace(settings, fleet=replace(settings.fleet, model=str(path)))
        name = settings.server.model_name or reference.name
        own = {"model_digest": digest, "compute_digest": compute_digest(store, manifest)}
        settings = of_role(settings, Role.SERVER, model_name=name, **own)
        for role in (Role.PREFILL, Role.DECODE):
            where = str(store.root)
            settings = of_role(settings, role, model_store=where, **own)
        settings = _as_imported(settings, store, manifest, version)
        if is_served:
            Sources(store).touch(reference.name, digest)
            log.info("model_version", reference=str(reference), digest=digest, store=where)
        yield settings


def _gguf_extra(
    store: ModelStore, manifest: Manifest, version: str
) -> dict[str, dict[str, object]]:
    """Return what the version says beside the GGUF file."""
    layer = manifest.layer(SAMPLING_TYPE)
    if layer is None:
        return {}
    content = store.read(layer.digest, MAX_DOCUMENT_BYTES)
    try:
        return {SAMPLING_FILE: msgspec.json.decode(content, type=dict[str, object])}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(
            f"{version} has sampling defaults that cannot be read: {error}; import the model "
            "again, or get another version from where it was made"
        ) from error


def _as_imported(
    settings: Settings, store: ModelStore, manifest: Manifest, version: str
) -> Settings:
    """Return settings with those that the version pins."""
    layer = manifest.layer(ENGINE_TYPE)
    if layer is None:
        raise StoreError(f"{version} has no layer {ENGINE_TYPE}; import the model again")
    try:
        content = store.read(layer.digest, MAX_DOCUMENT_BYTES)
        pinned = msgspec.json.decode(content, type=_Engine)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(
            f"{version} has settings that this Triolet does not know: {error}; use the one that "
            "imported it, or import the model again"
        ) from error
    for role in (Role.PREFILL, Role.DECODE):
        engine = settings.worker(role).engine
        if engine.weights not in (WeightFormat.AUTO, pinned.weights):
            raise ConfigError(
                f"worker.engine.weights is '{engine.weights}', and {version} was imported with "
                f"weights '{pinned.weights}'; remove the setting, or import the model with "
                f"--weights {engine.weights}, which makes another version"
            )
        settings = of_role(settings, role, engine=replace(engine, weights=pinned.weights))
    return settings

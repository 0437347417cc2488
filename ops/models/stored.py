"""Resolves a MODEL argument that names a version in the store: checks the version, holds it while
it is served, and applies the settings that it was imported with."""

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
    "{given!r} is not a version in the store; import it with `triolet model import`, or add the "
    "model with `triolet model add`, which accepts paths"
)


class _Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a version's engine layer."""

    weights: WeightFormat


def store_of(given: str | Path | None) -> ModelStore:
    """Return the store given by `--store` or `fleet.store`, or this user's."""
    return ModelStore(default_store() if given is None else expanded(Path(given)))


@contextmanager
def with_stored_model(
    settings: Settings, *, is_served: bool = True, is_reference_only: bool = False
) -> Iterator[Settings]:
    """Yield settings with a version in the store resolved to a directory. Protects the version from
    garbage collection until the context ends.

    An existing path takes precedence, then the names of known models.

    Args:
      settings: settings of a process or fleet.
      is_served: log the version and mark it as used; otherwise only check it.
      is_reference_only: accept only a version in the store, even if a path of that name exists.

    Raises:
      ConfigError: the version does not exist, is damaged or lacks a required signature, or a
        setting conflicts with the import.
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
        raise StoreError(f"{named} is not a directory or file here, and {error}") from None
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
    """Return the settings that a version adds to its GGUF file."""
    layer = manifest.layer(SAMPLING_TYPE)
    if layer is None:
        return {}
    content = store.read(layer.digest, MAX_DOCUMENT_BYTES)
    try:
        return {SAMPLING_FILE: msgspec.json.decode(content, type=dict[str, object])}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(
            f"{version} has invalid sampling defaults: {error}; import the model again, or pull "
            "another version"
        ) from error


def _as_imported(
    settings: Settings, store: ModelStore, manifest: Manifest, version: str
) -> Settings:
    """Return the settings with those that the version was imported with."""
    layer = manifest.layer(ENGINE_TYPE)
    if layer is None:
        raise StoreError(f"{version} has no layer {ENGINE_TYPE}; import the model again")
    try:
        content = store.read(layer.digest, MAX_DOCUMENT_BYTES)
        pinned = msgspec.json.decode(content, type=_Engine)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(
            f"{version} has settings unknown to this release of Triolet: {error}; use the release "
            "that imported it, or import the model again"
        ) from error
    for role in (Role.PREFILL, Role.DECODE):
        engine = settings.worker(role).engine
        if engine.weights not in (WeightFormat.AUTO, pinned.weights):
            raise ConfigError(
                f"worker.engine.weights is '{engine.weights}', but {version} was imported with "
                f"weights '{pinned.weights}'; remove the setting, or import the model with "
                f"--weights {engine.weights} as another version"
            )
        settings = of_role(settings, role, engine=replace(engine, weights=pinned.weights))
    return settings

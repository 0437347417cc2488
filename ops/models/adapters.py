"""The LoRA adapters of a model: found, read and digested before any process starts."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from triolet.adapters.files import read_adapter
from triolet.config import AdapterConfig
from triolet.errors import ConfigError, StoreError
from triolet.home import expanded
from triolet.ids import Role
from triolet.store.aliases import Aliases
from triolet.store.reference import is_reference, parse_reference
from triolet.store.sources import Sources
from triolet.store.view import opened

from ..settings.form import of_role
from .stored import NO_VERSION, store_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..settings.form import Settings

log = structlog.get_logger(__name__)


@contextmanager
def with_adapters(
    settings: Settings, *, is_served: bool = True, is_reference_only: bool = False
) -> Iterator[Settings]:
    """Give settings whose server and workers are told of the model's adapters. Versions of the
    store stay there until the end; what exists on disk under the name is meant first.

    Args:
      settings: of one model, as the store has filled them in.
      is_served: versions of the store count as used now, and the log says which they are; else they
        are only looked at.
      is_reference_only: they are versions of the store, whatever exists on disk under their names.

    Raises:
      ConfigError: an adapter cannot be had, or asks for what is not served.
    """
    if not settings.fleet.adapters:
        yield settings
        return
    engines = [settings.worker(role).engine for role in (Role.PREFILL, Role.DECODE)]
    most, found = min(one.max_adapters for one in engines), len(settings.fleet.adapters)
    if found > most:
        raise ConfigError(
            f"adapters has {found}, and worker.engine.max_adapters allows {most}; raise it if "
            "memory holds them in each worker, or remove some"
        )
    base, adapters = settings.server.model_digest, []
    max_rank = min(one.max_adapter_rank for one in engines)
    with ExitStack() as held:
        for name, given in settings.fleet.adapters.items():
            try:
                path = _directory(
                    given,
                    settings.fleet.store,
                    held,
                    is_served=is_served,
                    is_reference_only=is_reference_only,
                )
                digest = read_adapter(path, base, max_rank).digest
            except ConfigError as error:
                raise ConfigError(f"adapter {name}: {error}") from error
            adapters.append(AdapterConfig(name, str(path), base, digest))
        yield _told(settings, tuple(adapters))


def _directory(
    given: str,
    store_given: str | None,
    held: ExitStack,
    *,
    is_served: bool,
    is_reference_only: bool,
) -> Path:
    """Return the directory of an adapter, or of the version of the store that is named."""
    path, store = expanded(Path(given)).absolute(), store_of(store_given)
    is_meant = is_reference(given) and (store_given is not None or store.is_there)
    if is_reference_only and not is_meant:
        raise ConfigError(NO_VERSION.format(given=given))
    if not is_meant or (path.exists() and not is_reference_only):
        return path
    reference, aliases = parse_reference(given), Aliases(store)
    try:
        digest = aliases.resolve(reference)
    except StoreError as error:
        raise StoreError(f"{given} is no directory here, and {error}") from None
    aliases.require_signed(reference, digest)
    view, _ = held.enter_context(opened(store, digest))
    if is_served:
        # An eviction takes the longest unused first.
        Sources(store).touch(reference.name, digest)
        log.info("adapter_version", reference=str(reference), digest=digest, store=str(store.root))
    return view


def _told(settings: Settings, adapters: tuple[AdapterConfig, ...]) -> Settings:
    settings = of_role(settings, Role.SERVER, model_adapters=adapters)
    for role in (Role.PREFILL, Role.DECODE):
        engine = replace(settings.worker(role).engine, adapters=adapters)
        settings = of_role(settings, role, engine=engine)
    return settings

"""Resolves and checks the LoRA adapters of a model before any process starts."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from store.adapter_files import read_adapter
from store.aliases import Aliases
from store.reference import is_reference, parse_reference
from store.sources import Sources
from store.view import opened
from triolet.config import AdapterConfig
from triolet.errors import ConfigError, StoreError
from triolet.home import expanded
from triolet.ids import Role

from ..settings.form import of_role
from .stored import NO_VERSION, store_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from store.adapter_files import AdapterFiles

    from ..settings.form import Settings

log = structlog.get_logger(__name__)

_ROLES: Final = (Role.PREFILL, Role.DECODE)


@contextmanager
def with_adapters(
    settings: Settings, *, is_served: bool = True, is_reference_only: bool = False
) -> Iterator[Settings]:
    """Yield settings completed with the model's adapters. Protects versions in the store from
    garbage collection until the context ends. An existing path takes precedence over a version.

    Args:
      settings: settings of one model, as completed by `with_stored_model`.
      is_served: log the versions and mark them as used; otherwise only check them.
      is_reference_only: accept only versions in the store, even if a path of that name exists.

    Raises:
      ConfigError: an adapter is missing, damaged or unsupported.
    """
    if not settings.fleet.adapters:
        yield settings
        return
    require_number(settings, len(settings.fleet.adapters))
    with ExitStack() as held:
        adapters = tuple(
            held.enter_context(
                held_adapter(
                    settings,
                    name,
                    given,
                    is_served=is_served,
                    is_reference_only=is_reference_only,
                )
            )
            for name, given in settings.fleet.adapters.items()
        )
        yield told(settings, named=adapters, loaded=adapters)


def require_number(settings: Settings, found: int) -> None:
    """Check that the number of adapters is within `max_adapters`.

    Raises:
      ConfigError: it is not.
    """
    most = min(settings.worker(role).engine.max_adapters for role in _ROLES)
    if found > most:
        raise ConfigError(
            f"adapters has {found}, but worker.engine.max_adapters allows {most}; raise it if each "
            "worker has memory for them, or remove some"
        )


@contextmanager
def held_adapter(
    settings: Settings,
    name: str,
    given: str,
    check: Callable[[AdapterFiles], None] = lambda files: None,
    *,
    is_served: bool = True,
    is_reference_only: bool = False,
) -> Iterator[AdapterConfig]:
    """Yield the config of an adapter after reading it. Protects a version in the store from garbage
    collection until the context ends.

    Args:
      settings: settings of its model, as completed by `with_stored_model`.
      name: name of the adapter.
      given: its directory or version.
      check: raises ModelError if the adapter must not be served.
      is_served: see `with_adapters`.
      is_reference_only: see `with_adapters`.

    Raises:
      ConfigError: the adapter is missing, damaged or unsupported; the text names it.
    """
    base = settings.server.compute_digest
    max_rank = min(settings.worker(role).engine.max_adapter_rank for role in _ROLES)
    with ExitStack() as held:
        try:
            path = _directory(
                given,
                settings.fleet.store,
                held,
                is_served=is_served,
                is_reference_only=is_reference_only,
            )
            digest = _digest(path, base, max_rank, check)
        except ConfigError as error:
            raise ConfigError(f"adapter {name}: {error}") from error
        yield AdapterConfig(name, str(path), base, digest)


def _digest(path: Path, base: str, max_rank: int, check: Callable[[AdapterFiles], None]) -> str:
    """Read and check an adapter, and return its digest."""
    files = read_adapter(path, base, max_rank)
    check(files)
    return files.digest


def _directory(
    given: str,
    store_given: str | None,
    held: ExitStack,
    *,
    is_served: bool,
    is_reference_only: bool,
) -> Path:
    """Return the directory of an adapter or of its version in the store."""
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
        raise StoreError(f"{given} is not a directory here, and {error}") from None
    aliases.require_signed(reference, digest)
    view, _ = held.enter_context(opened(store, digest))
    if is_served:
        # Evictions remove the least recently used versions.
        Sources(store).touch(reference.name, digest)
        log.info("adapter_version", reference=str(reference), digest=digest, store=str(store.root))
    return view


def told(
    settings: Settings,
    *,
    named: tuple[AdapterConfig, ...],
    loaded: tuple[AdapterConfig, ...],
    unnamed: tuple[AdapterConfig, ...] = (),
) -> Settings:
    """Return the settings of a model with its adapters.

    Args:
      settings: settings of the model.
      named: adapters that servers accept requests for.
      loaded: adapters that workers load.
      unnamed: adapters of some workers that servers accept no requests for.
    """
    settings = of_role(settings, Role.SERVER, model_adapters=named, unnamed_adapters=unnamed)
    for role in _ROLES:
        engine = replace(settings.worker(role).engine, adapters=loaded)
        settings = of_role(settings, role, engine=engine)
    return settings

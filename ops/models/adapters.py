"""The LoRA adapters of a model: found, read and digested before any process starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from triolet.adapters.files import read_adapter
from triolet.config import AdapterConfig
from triolet.errors import ConfigError
from triolet.ids import Role

from ..settings.form import of_role

if TYPE_CHECKING:
    from ..settings.form import Settings


def with_adapters(settings: Settings) -> Settings:
    """Return settings whose server and workers are told of the model's adapters.

    Args:
      settings: of one model, as the store has filled them in.

    Raises:
      ConfigError: an adapter cannot be read, or asks for what is not served.
    """
    if not settings.fleet.adapters:
        return settings
    base, adapters = settings.server.model_digest, []
    engines = [settings.worker(role).engine for role in (Role.PREFILL, Role.DECODE)]
    most, found = min(one.max_adapters for one in engines), len(settings.fleet.adapters)
    if found > most:
        raise ConfigError(
            f"adapters has {found}, and worker.engine.max_adapters allows {most}; raise it if "
            "memory holds them in each worker, or remove some"
        )
    max_rank = min(one.max_adapter_rank for one in engines)
    for name, given in settings.fleet.adapters.items():
        path = Path(given).expanduser().absolute()
        try:
            digest = read_adapter(path, base, max_rank).digest
        except ConfigError as error:
            raise ConfigError(f"adapter {name}: {error}") from error
        adapters.append(AdapterConfig(name, str(path), base, digest))
    told = tuple(adapters)
    settings = of_role(settings, Role.SERVER, model_adapters=told)
    for role in (Role.PREFILL, Role.DECODE):
        engine = replace(settings.worker(role).engine, adapters=told)
        settings = of_role(settings, role, engine=engine)
    return settings

"""Check that the ladders of `model: auto`, in settings and tenants, name models of this fleet."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from ..config import AUTO
from ..errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ..config import AutoConfig
    from .plans import Tenants


def require_models(config: AutoConfig, models: Collection[str], aliases: Iterable[str]) -> None:
    """Check that the default ladder names models of this fleet.

    Args:
      config: with the ladder; nothing is checked if there is none.
      models: names of all models.
      aliases: their other names.

    Raises:
      ConfigError: a name is unknown, or a model is called `auto`.
    """
    if config.ladder is None:
        return
    for name in (*models, *aliases):
        if name == AUTO:
            raise ConfigError(
                f"[auto] has a ladder, and a model is called {AUTO!r} too; give that model another "
                "name or alias, or remove [auto]"
            )
    _require_known(config.ladder, models, "[auto] ladder")
    _require_known([one.model for one in config.limits], models, "[auto] limits")


def require_tenant_ladders(
    tenants: Tenants, config: AutoConfig, models: Collection[str], file: str
) -> None:
    """Check that the tenants' ladders name models of this fleet.

    Args:
      tenants: tenants of the file.
      config: with the default ladder.
      models: names of all models.
      file: file of tenants, for errors.

    Raises:
      ConfigError: a ladder names an unknown model, or has no effect.
    """
    for tenant in tenants.by_name.values():
        if tenant.auto is None:
            continue
        where = f"{file}: [tenants.{tenant.name}] auto"
        if config.ladder is None:
            raise ConfigError(
                f"{where} is a ladder of models, and `model: auto` is off; turn it on with [auto] "
                "ladder in triolet.toml, or remove this one"
            )
        _require_known(tenant.auto, models, where)


def _require_known(names: Iterable[str], models: Collection[str], where: str) -> None:
    for name in names:
        if name not in models:
            near = difflib.get_close_matches(name, models, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(models)}"
            raise ConfigError(
                f"{where} names {name[:80]!r}, which is not a model of this fleet (aliases do not "
                f"count); {hint}"
            )

"""The model `auto`: whether ladders, of the settings and of tenants, are of models that are served.

Pure.
"""

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
    """Look whether the default ladder is one of models that are served.

    Args:
      config: with the ladder; nothing is looked at where there is none.
      models: names of all models.
      aliases: their other names.

    Raises:
      ConfigError: a name is of no model, or a model is called `auto`.
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
    """Look whether the ladders of tenants are of models that are served.

    Args:
      tenants: of the file.
      config: with the default ladder.
      models: names of all models.
      file: of tenants, for errors.

    Raises:
      ConfigError: one is not, or has no effect.
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
                f"{where} names {name[:80]!r}, which is no model of this fleet (aliases do not "
                f"count); {hint}"
            )

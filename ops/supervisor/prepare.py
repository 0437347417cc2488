"""What `triolet serve` finds out before it starts anything: the model, its name, sizes, tenants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from triolet.errors import ConfigError
from triolet.ids import Role
from triolet.tenants_form import read_tenants

from ..model_directory import check_start, with_model_name, with_pool_share
from ..models.choose import ready_model
from ..settings.form import Settings, of_role
from .plan import FleetPlan

if TYPE_CHECKING:
    from triolet.config import Dtype, TenantsConfig


def prepare(settings: Settings, gpus: tuple[str, ...]) -> FleetPlan:
    """Return the plan of a fleet: the settings with what follows from model and machine.

    Args:
      settings: as given.
      gpus: of this machine, as CUDA_VISIBLE_DEVICES names them.

    Raises:
      ConfigError: they cannot work here.
      FetchFailed: a model that was asked for by name cannot be had.
    """
    model = ready_model(settings.fleet.model)
    counts = {Role.PREFILL: settings.fleet.prefill, Role.DECODE: settings.fleet.decode}
    dtypes: dict[Role, Dtype] = {}
    for role in counts:
        worker = settings.worker(role)
        engine = with_pool_share(worker.engine, sum(counts.values()), len(gpus))
        checked = check_start(model, engine, worker.speculation)
        found = checked.model.engine
        settings = of_role(settings, role, engine=found)
        dtypes[role] = checked.model.dtype
    named = with_model_name(settings.server, checked.path)
    require_tenants(named.tenants)
    settings = replace(settings, server=named)
    return FleetPlan(checked.path, settings, gpus, dtypes)


def require_tenants(config: TenantsConfig) -> None:
    """Look whether the file of tenants, if there is one, can be read and means something.

    Raises:
      ConfigError: it cannot, in the words of the server.
    """
    if config.file is None:
        return
    try:
        with Path(config.file).open("rb") as file:
            content = file.read(config.max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"the file of tenants cannot be read: {error}") from None
    if len(content) <= config.max_bytes:
        read_tenants(content, config.file)

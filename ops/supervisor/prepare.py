"""What `triolet serve` finds out before it starts anything: the model, its name, sizes, tenants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from triolet.errors import ConfigError
from triolet.ids import Role
from triolet.tenants_form import read_tenants

from ..model_directory import check_start, with_model_name
from ..models.choose import ready_model
from ..settings.form import Settings, of_role
from .plan import FleetPlan

if TYPE_CHECKING:
    from triolet.config import EngineConfig, TenantsConfig

log = structlog.get_logger(__name__)


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
    chosen = []
    for role in counts:
        worker = settings.worker(role)
        engine = _shared(worker.engine, sum(counts.values()), len(gpus))
        checked = check_start(model, engine, worker.speculation)
        found = checked.model.engine
        settings = of_role(settings, role, engine=found)
        chosen.append(
            {
                "role": role.value,
                "device": found.device,
                "dtype": checked.model.dtype.value,
                "kv_pool_bytes": found.kv_pool_bytes or "sized by the worker on its GPU",
            }
        )
    named = with_model_name(settings.server, checked.path)
    require_tenants(named.tenants)
    plan = FleetPlan(checked.path, replace(settings, server=named), gpus)
    for row in chosen:
        log.info("engine_chosen", **row)
    return plan


def _shared(engine: EngineConfig, num_workers: int, num_gpus: int) -> EngineConfig:
    """Return the settings of a worker with its part of the memory that pools may take: the share
    is meant for each of two workers on one device."""
    on_one_device = num_workers if not num_gpus else -(-num_workers // num_gpus)
    share = engine.kv_pool_memory_share * 2 / max(2, on_one_device)
    return replace(engine, kv_pool_memory_share=share)


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

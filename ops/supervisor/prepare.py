"""Checks and resolves the settings of `triolet serve` before anything starts: models, names, sizes,
the tenants file, the objectives and the ladder of `model: auto`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from store.model_dir.bounded import within_check_time
from triolet.errors import ConfigError
from triolet.ids import Role
from triolet.slo.objectives import read_objectives
from triolet.tenants.form import read_tenants
from triolet.tenants.ladders import require_models, require_tenant_ladders

from ..models.choose import ready_model
from ..models.fetch import is_kept
from ..models.known import AUTO, KNOWN
from ..models.model_directory import check_start, check_text, with_model_name, with_pool_share
from ..models.several import name_of, naming
from ..settings.form import Settings, of_role
from .plan import FleetPlan, ModelPlan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triolet.config import Dtype, TenantsConfig
    from triolet.tenants.plans import Tenants


def prepare(settings: Settings, stored: Iterable[Settings], gpus: tuple[str, ...]) -> FleetPlan:
    """Return the plan of a fleet: its settings, completed from the models and the machine.

    Args:
      settings: settings of the fleet.
      stored: settings of each model, with versions in the store resolved to directories.
      gpus: GPUs of this machine, as CUDA_VISIBLE_DEVICES names them.

    Raises:
      ConfigError: the settings cannot work on this machine, or the objectives are invalid.
      FetchFailed: a model could not be downloaded.
    """
    require_auto(settings)
    read_objectives(settings.server.objectives)
    models = list(stored)
    # Count models that do not start yet too, so that memory suffices when they do.
    num_workers = sum(own.fleet.prefill + own.fleet.decode for own in models)
    plans = []
    for own in models:
        with naming(name_of(own)):
            plans.append(_prepared(own, num_workers, gpus))
    return FleetPlan(settings if settings.models else plans[0].settings, tuple(plans), gpus)


def prepare_model(plan: FleetPlan, own: Settings) -> ModelPlan:
    """Return the plan of a model that is added to a running fleet.

    Args:
      plan: current plan of the fleet.
      own: settings of the model, with a version in the store resolved to a directory.

    Raises:
      ConfigError: it cannot be served here.
    """
    num_workers = len(plan.workers) + own.fleet.prefill + own.fleet.decode
    with naming(name_of(own)):
        named = own.fleet.model
        if named == AUTO or (named in KNOWN and not is_kept(KNOWN[named])):
            raise ConfigError(
                f"{named} can be downloaded only at the start of a fleet; give a directory, a GGUF "
                "file, or a version in the store"
            )
        return _prepared(own, num_workers, plan.gpus)


@within_check_time()
def _prepared(settings: Settings, num_workers: int, gpus: tuple[str, ...]) -> ModelPlan:
    """Return the plan of a model.

    Args:
      settings: settings of this model.
      num_workers: number of workers of all models, which share the memory.
      gpus: GPUs of this machine.

    Raises:
      ConfigError: it cannot be served with these settings.
    """
    model = ready_model(settings.fleet.model)
    dtypes: dict[Role, Dtype] = {}
    adapter_bytes: dict[Role, int] = {}
    for role in (Role.PREFILL, Role.DECODE):
        worker = settings.worker(role)
        engine = with_pool_share(worker.engine, num_workers, len(gpus))
        checked = check_start(model, engine, worker.speculation)
        settings = of_role(settings, role, engine=checked.model.engine)
        dtypes[role] = checked.model.dtype
        adapter_bytes[role] = checked.model.adapter_bytes
    check_text(checked.path)
    named = with_model_name(settings.server, checked.path)
    return ModelPlan(checked.path, replace(settings, server=named), dtypes, adapter_bytes)


def require_auto(settings: Settings) -> None:
    """Check that the ladders of `model: auto`, in the settings and in the tenants file, contain
    only models of this fleet.

    Raises:
      ConfigError: they do not, or the tenants file is invalid.
    """
    auto, models = settings.server.auto, settings.models
    if auto.ladder is not None and not models:
        raise ConfigError(
            "[auto] has a ladder, but this fleet has a single unnamed model; give models names "
            "(`triolet serve SMALL=MODEL LARGE=MODEL`), or remove [auto]"
        )
    require_models(auto, models, [alias for one in models.values() for alias in one.aliases])
    tenants = read_tenant_file(settings.server.tenants)
    if tenants is not None:
        file = str(settings.server.tenants.file)
        require_tenant_ladders(tenants, auto, models, file)


def read_tenant_file(config: TenantsConfig) -> Tenants | None:
    """Return the tenants in the file; None if no file is set or it is too large.

    Raises:
      ConfigError: it cannot be read or is invalid.
    """
    if config.file is None:
        return None
    try:
        with Path(config.file).open("rb") as file:
            content = file.read(config.max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"the tenants file cannot be read: {error}") from None
    return read_tenants(content, config.file) if len(content) <= config.max_bytes else None

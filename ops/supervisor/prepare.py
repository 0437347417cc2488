"""What `triolet serve` finds out before it starts anything: models, their names, sizes, tenants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from store.model_dir.bounded import within_check_time
from triolet.errors import ConfigError
from triolet.ids import Role
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
    """Return the plan of a fleet: the settings with what follows from models and machine.

    Args:
      settings: of the fleet, as given.
      stored: the same for each model; versions of the store are directories already.
      gpus: of this machine, as CUDA_VISIBLE_DEVICES names them.

    Raises:
      ConfigError: they cannot work here.
      FetchFailed: a model that was asked for by name cannot be had.
    """
    # Also those of models that do not run yet: when they do, there is memory for all.
    require_auto(settings)
    models = list(stored)
    num_workers = sum(own.fleet.prefill + own.fleet.decode for own in models)
    plans = []
    for own in models:
        with naming(name_of(own)):
            plans.append(_prepared(own, num_workers, gpus))
    return FleetPlan(settings if settings.models else plans[0].settings, tuple(plans), gpus)


def prepare_model(plan: FleetPlan, own: Settings) -> ModelPlan:
    """Return what the processes of a model are that comes to a fleet while it runs.

    Args:
      plan: of the fleet as it is.
      own: settings for this model; a version of the store is a directory already.

    Raises:
      ConfigError: it cannot be served here.
    """
    num_workers = len(plan.workers) + own.fleet.prefill + own.fleet.decode
    with naming(name_of(own)):
        named = own.fleet.model
        if named == AUTO or (named in KNOWN and not is_kept(KNOWN[named])):
            raise ConfigError(
                f"{named} is fetched from the package index at the start of a fleet only; name a "
                "directory, a GGUF file, or a version of the store"
            )
        return _prepared(own, num_workers, plan.gpus)


@within_check_time()
def _prepared(settings: Settings, num_workers: int, gpus: tuple[str, ...]) -> ModelPlan:
    """Return what a model's processes are.

    Args:
      settings: for this model.
      num_workers: of all models together; they share the memory.
      gpus: of this machine.

    Raises:
      ConfigError: it cannot be served so.
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
    """Look whether the ladders of `model: auto` are of models of this fleet: that of the settings,
    and those in the file of tenants, if there is one, which has to mean something.

    Raises:
      ConfigError: they are not, or the file cannot be used, in the words of the server.
    """
    auto, models = settings.server.auto, settings.models
    if auto.ladder is not None and not models:
        raise ConfigError(
            "[auto] has a ladder, and this fleet has one model without a name; give models names: "
            "`triolet serve SMALL=MODEL LARGE=MODEL`, or remove [auto]"
        )
    require_models(auto, models, [alias for one in models.values() for alias in one.aliases])
    tenants = read_tenant_file(settings.server.tenants)
    if tenants is not None:
        file = str(settings.server.tenants.file)
        require_tenant_ladders(tenants, auto, models, file)


def read_tenant_file(config: TenantsConfig) -> Tenants | None:
    """Return the tenants of the file; None where there is no file, or it is too large to look at.

    Raises:
      ConfigError: it cannot be read, or means nothing, in the words of the server.
    """
    if config.file is None:
        return None
    try:
        with Path(config.file).open("rb") as file:
            content = file.read(config.max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"the file of tenants cannot be read: {error}") from None
    return read_tenants(content, config.file) if len(content) <= config.max_bytes else None

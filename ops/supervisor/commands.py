"""What commands ask of the supervisor of a fleet, done and told step by step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import structlog

from triolet.errors import ConfigError

from .rolling import ORDER
from .slot import RestartFailed
from .supervisor_socket import (
    Added,
    AddModelRequest,
    DropAdapterRequest,
    DropModelRequest,
    Finished,
    LoadAdapterRequest,
    Models,
    ModelsRequest,
    Refused,
    RestartRequest,
    ScaleRequest,
    ServeModelRequest,
    StartModelRequest,
    StepBegan,
    StopModelRequest,
    WithdrawAdapterRequest,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from triolet.config import ControlledModelConfig

    from .adapter_set import AdapterSet
    from .model_set import ModelSet
    from .readiness import Readiness
    from .rolling import Step
    from .scaling import Scaling
    from .supervisor import Supervisor
    from .supervisor_socket import Request, Tell

log = structlog.get_logger(__name__)


class Told(NamedTuple):
    """What the log says at the end of a command.

    Attributes:
      done: event of its success.
      failed: event of its failure.
      facts: of either.
    """

    done: str
    failed: str
    facts: dict[str, str]


class Commands:
    """Does what commands ask for.

    Args:
      supervisor: of the fleet.
      scaling: plans other numbers of workers.
      models: come and go.
      adapters: come and go.
    """

    def __init__(
        self, supervisor: Supervisor, scaling: Scaling, models: ModelSet, adapters: AdapterSet
    ) -> None:
        self._supervisor = supervisor
        self._scaling = scaling
        self._models = models
        self._adapters = adapters

    async def obey(self, readiness: Callable[[], Readiness], request: Request, tell: Tell) -> None:
        """Do what a command asked for, and tell it of each step."""
        supervisor, models = self._supervisor, self._models

        async def begun(text: str) -> None:
            log.info("model_step", step=text)
            await tell(StepBegan(text))

        match request:
            case ModelsRequest():
                configs = models.configs()
                served = [one.name for one in configs if models.is_served(one.name)]
                await tell(Models(supervisor.models(), supervisor.run_id, configs, served))
            case RestartRequest():
                done = Told("restarted", "restart_failed", {})
                await _told(partial(_restart, supervisor, readiness, request, tell), done, tell)
            case StartModelRequest(model):
                done = Told("model_started", "model_start_failed", {"model": model})
                await _told(partial(supervisor.start_model, model, begun), done, tell)
            case ScaleRequest(model, role):
                done = Told("scaled", "scale_failed", {"model": model, "role": role.value})
                await _told(partial(self._scale, request, begun), done, tell)
            case StopModelRequest(model):
                done = Told("model_stopped", "model_stop_failed", {"model": model})
                await _told(partial(supervisor.stop_model, model, begun), done, tell)
            case AddModelRequest(name, model, is_reference_only):
                done = Told("model_added", "model_add_failed", {"model": name})
                add = partial(models.add, is_reference_only=is_reference_only)
                await _told(partial(add, name, model, begun), done, tell)
            case ServeModelRequest(model, is_served):
                word = "model_served" if is_served else "model_withdrawn"
                done = Told(word, f"{word}_not", {"model": model})
                await _told(partial(models.set_served, model, is_served=is_served), done, tell)
            case DropModelRequest(model):
                done = Told("model_dropped", "model_drop_failed", {"model": model})
                await _told(partial(models.drop, model, begun), done, tell)
            case LoadAdapterRequest(model, adapter):
                facts = {"model": model, "adapter": adapter}
                done = Told("adapter_loaded", "adapter_load_failed", facts)
                await _told(partial(self._load, request, readiness, begun), done, tell)
            case DropAdapterRequest(model, adapter):
                facts = {"model": model, "adapter": adapter}
                done = Told("adapter_dropped", "adapter_drop_failed", facts)
                await _told(partial(self._drop, request, readiness, begun), done, tell)
            case WithdrawAdapterRequest(model, adapter):
                facts = {"model": model, "adapter": adapter}
                done = Told("adapter_withdrawn", "adapter_withdrawn_not", facts)
                await _told(partial(self._adapters.withdraw, model, adapter), done, tell)

    async def _load(
        self,
        request: LoadAdapterRequest,
        readiness: Callable[[], Readiness],
        begun: Callable[[str], Awaitable[None]],
    ) -> ControlledModelConfig:
        async with readiness() as servers:
            return await self._adapters.load(
                request.model,
                request.adapter,
                request.ref,
                begun,
                servers.is_met,
                is_reference_only=request.is_reference_only,
            )

    async def _drop(
        self,
        request: DropAdapterRequest,
        readiness: Callable[[], Readiness],
        begun: Callable[[str], Awaitable[None]],
    ) -> ControlledModelConfig:
        async with readiness() as servers:
            return await self._adapters.drop(request.model, request.adapter, begun, servers.is_met)

    async def _scale(self, request: ScaleRequest, begun: Callable[[str], Awaitable[None]]) -> None:
        model, role = request.model, request.role
        try:
            specs = self._scaling.plan(model, role, request.count)
        except ConfigError as error:
            raise RestartFailed(str(error)) from error
        note = partial(self._scaling.note, model)
        await self._supervisor.scale(model, role, specs, note, begun)


async def _told(
    do: Callable[[], Awaitable[ControlledModelConfig | None]], said: Told, tell: Tell
) -> None:
    """Do something, and tell and log how it ended."""
    try:
        config = await do()
    except RestartFailed as error:
        log.warning(said.failed, **said.facts, message=str(error))
        await tell(Refused(str(error)))
    else:
        log.info(said.done, **said.facts)
        await tell(Finished() if config is None else Added(config))


async def _restart(
    supervisor: Supervisor,
    readiness: Callable[[], Readiness],
    request: RestartRequest,
    tell: Tell,
) -> None:
    async def begun(step: Step) -> None:
        log.info("restart_step", name=step.name, move=step.move.name.lower())
        await tell(StepBegan(str(step)))

    async with readiness() as servers:
        roles = request.roles or tuple(ORDER)
        await supervisor.restart(roles, servers.is_met, begun, request.models)

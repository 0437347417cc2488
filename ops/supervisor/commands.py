"""Executes the requests on the supervisor's socket (restart, scale, add a model, …) and reports
each step to the client."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from triolet.errors import ConfigError

from .rolling import ORDER
from .slot import RestartFailed
from .supervisor_socket import (
    Added,
    AddModelRequest,
    AddVersionRequest,
    DropAdapterRequest,
    DropModelRequest,
    LoadAdapterRequest,
    ModelsAnswer,
    ModelsRequest,
    OrderFinished,
    OrderRefused,
    RestartRequest,
    RouteRequest,
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
    from .rolling import RollingStep
    from .scaling import Scaling
    from .supervisor import Supervisor
    from .supervisor_socket import Request, Tell

    Do = Callable[[], Awaitable[ControlledModelConfig | None]]

log = structlog.get_logger(__name__)

BUG: Final = "this is a bug in Triolet, and the fleet goes on; report it with the fleet's log"


class Commands:
    """Executes requests.

    Args:
      supervisor: supervisor of the fleet.
      scaling: plans the number of workers.
      models: adds and removes models.
      adapters: adds and removes adapters.
    """

    def __init__(
        self, supervisor: Supervisor, scaling: Scaling, models: ModelSet, adapters: AdapterSet
    ) -> None:
        self._supervisor = supervisor
        self._scaling = scaling
        self._models = models
        self._adapters = adapters

    async def obey(self, readiness: Callable[[], Readiness], request: Request, tell: Tell) -> None:
        """Execute a request and report its steps and result through `tell`."""
        supervisor, models = self._supervisor, self._models

        async def begun(text: str) -> None:
            log.info("model_step", step=text)
            await tell(StepBegan(text))

        do: Do
        match request:
            case ModelsRequest():
                configs = models.configs()
                served = [one.name for one in configs if models.is_served(one.name)]
                routes = dict(self._scaling.routes)
                told = ModelsAnswer(supervisor.models(), supervisor.run_id, configs, served, routes)
                await tell(told)
            case RestartRequest():
                do = partial(_restart, supervisor, readiness, request, tell)
                await _told(tell, do, "restarted", "restart_failed")
            case StartModelRequest(model):
                do = partial(supervisor.start_model, model, begun)
                await _told(tell, do, "model_started", "model_start_failed", model=model)
            case ScaleRequest(model, role):
                do = partial(self._scale, request, begun)
                await _told(tell, do, "scaled", "scale_failed", model=model, role=role.value)
            case StopModelRequest(model):
                do = partial(supervisor.stop_model, model, begun)
                await _told(tell, do, "model_stopped", "model_stop_failed", model=model)
            case AddModelRequest(name, model, is_reference_only):
                do = partial(models.add, name, model, begun, is_reference_only=is_reference_only)
                await _told(tell, do, "model_added", "model_add_failed", model=name)
            case AddVersionRequest(name):
                do = partial(models.add_version, request, begun)
                await _told(tell, do, "version_added", "version_add_failed", model=name)
            case RouteRequest(version):
                do = partial(models.route, request)
                await _told(tell, do, "route_changed", "route_change_failed", model=version)
            case ServeModelRequest(model, is_served):
                word = "model_served" if is_served else "model_withdrawn"
                do = partial(models.set_served, model, is_served=is_served)
                await _told(tell, do, word, f"{word}_not", model=model)
            case DropModelRequest(model):
                do = partial(models.drop, model, begun)
                await _told(tell, do, "model_dropped", "model_drop_failed", model=model)
            case LoadAdapterRequest(model, adapter):
                do = partial(self._load, request, readiness, begun)
                of_adapter = {"model": model, "adapter": adapter}
                await _told(tell, do, "adapter_loaded", "adapter_load_failed", **of_adapter)
            case DropAdapterRequest(model, adapter):
                do = partial(self._drop, request, readiness, begun)
                of_adapter = {"model": model, "adapter": adapter}
                await _told(tell, do, "adapter_dropped", "adapter_drop_failed", **of_adapter)
            case WithdrawAdapterRequest(model, adapter):
                do = partial(self._adapters.withdraw, model, adapter)
                of_adapter = {"model": model, "adapter": adapter}
                await _told(tell, do, "adapter_withdrawn", "adapter_withdrawn_not", **of_adapter)

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
    tell: Tell,
    do: Do,
    done: str,
    failed: str,
    **facts: str,
) -> None:
    """Run an action, then report and log its result.

    Args:
      tell: called with the result.
      do: the action.
      done: log event for success.
      failed: log event for failure.
      facts: fields of the log event.
    """
    try:
        config = await do()
    except RestartFailed as error:
        log.warning(failed, **facts, message=str(error))
        await tell(OrderRefused(str(error)))
    except Exception as error:  # a mistake in one command must not end the fleet
        log.exception(failed, **facts)
        await tell(OrderRefused(f"{BUG}: {error}"))
    else:
        log.info(done, **facts)
        await tell(OrderFinished() if config is None else Added(config))


async def _restart(
    supervisor: Supervisor,
    readiness: Callable[[], Readiness],
    request: RestartRequest,
    tell: Tell,
) -> None:
    async def begun(step: RollingStep) -> None:
        log.info("restart_step", name=step.name, move=step.move.name.lower())
        await tell(StepBegan(str(step)))

    async with readiness() as servers:
        roles = request.roles or tuple(ORDER)
        await supervisor.restart(roles, servers.is_met, begun, request.models)

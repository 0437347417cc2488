"""Switches a model of a running fleet to another version: loads the new version beside the old one,
routes all new requests to it, then lets the old one finish and removes it.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import trio

from triolet.config.routes import Route

from ..exit_codes import CommandFailed
from ..supervisor.supervisor_socket import AddVersionRequest, RouteRequest, ask_models
from .auditing import is_of_port
from .memory import expected_bytes
from .model_states import HOLDING
from .operations import NoRoom, OperationFailed, SwitchOrder, UnknownModel

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from triolet.config import ControlledModelConfig

    from .controller import Controller
    from .model_steps import ModelSteps
    from .operations import Operation


class Switches:
    """The switches of one fleet's models.

    Args:
      controller: the fleet's models.
      supervisor: socket of the supervisor.
      steps: steps of operations.

    Attributes:
      routes: current routes by public name, as last reported by the supervisor.
    """

    def __init__(self, controller: Controller, supervisor: Path, steps: ModelSteps) -> None:
        self.routes: dict[str, Route] = {}
        self._controller = controller
        self._supervisor = supervisor
        self._steps = steps

    def version_of(self, name: str) -> str:
        """Return the current version of a public name, or the name itself if it has no route."""
        route = self.routes.get(name)
        known = self._controller.models
        # Until the next look the route of a model that was dropped is still known.
        return name if route is None or name in known or route.stable not in known else route.stable

    def public_name_of(self, version: str) -> str:
        """Return the public name of a version."""
        names = (one for one, route in self.routes.items() if version in route.shares)
        return next(names, version)

    def plan(self, name: str, ref: str, under_way: Iterable[str]) -> tuple[str, SwitchOrder]:
        """Return a name for the new version, and the settings of the switch.

        Args:
          name: name of the current version, or its public name.
          ref: directory, file or version of the new one.
          under_way: names of models that are being changed.

        Raises:
          UnknownModel: no model has this name.
        """
        known, replaced = self._controller.models, self.version_of(name)
        if replaced not in known:
            raise UnknownModel(name, known)
        public = self.public_name_of(replaced)
        number = replaced.removeprefix(f"{public}-")
        first = int(number) + 1 if number != replaced and number.isdecimal() else 2
        taken = {*known, *under_way, *self.routes}
        new = next(one for n in count(first) if (one := f"{public}-{n}") not in taken)
        return new, SwitchOrder(public, replaced, ref)

    async def run(self, operation: Operation) -> None:
        """Switch a public name to the new version. On failure the old version keeps serving.

        Raises:
          OperationFailed: the new version cannot serve.
          CommandFailed: the new version cannot serve, or workers of the old one did not stop.
          NoRoom: there is no memory for both.
        """
        order = operation.switch
        assert order is not None, "a switch has its order"
        route = self.routes.get(order.public_name)
        # Otherwise the route was moved before control was restarted.
        if route is None or route.stable != operation.model:
            request = AddVersionRequest(
                operation.model, order.replaced, order.ref, is_of_port(operation)
            )
            config = await self._steps.ask_added(operation, request)
            if config.name == order.replaced:  # same compute digest: the workers serve both
                await self._use_alike(operation, config)
                return
            await self._move(operation, config, order, route)
        self._steps.tell(operation, f"{order.replaced}: its requests finish")
        await self._steps.wait_let_go(order.replaced)
        await self._steps.end(operation, order.replaced)
        self._steps.drop(order.replaced)

    async def _use_alike(self, operation: Operation, config: ControlledModelConfig) -> None:
        """Wait until servers have a version that took the place of the one before.

        Raises:
          Failed: one cannot read it, or they do not say so in time; the one before is back.
          CommandFailed: the same, and the one before could not be put back.
        """
        self._controller.models[config.name].config = config
        try:
            await self._steps.wait_served(operation, config.name)
        except OperationFailed:
            await self._steps.take_back(operation)
            raise
        await self._steps.end(operation, operation.model)  # the one before is not needed any more

    async def _move(
        self,
        operation: Operation,
        config: ControlledModelConfig,
        order: SwitchOrder,
        route: Route | None,
    ) -> None:
        """Load the new version beside the old one, and route all new requests to it.

        Args:
          operation: the switch.
          config: config of the new version.
          order: settings of the switch.
          route: current route of the public name, or None.

        Raises:
          OperationFailed: the new version cannot serve and was removed again.
          CommandFailed: the new version cannot serve and was removed again.
          NoRoom: there is no memory for both.
        """
        new, replaced = config.name, order.replaced
        revision = 0 if route is None else route.revision
        is_known = route is not None and new in route.shares
        self._steps.add(config, await trio.to_thread.run_sync(expected_bytes, config))
        models = self._controller.models
        kept = [models[new], *(one for one in (models[replaced],) if one.state in HOLDING)]
        for model in kept:
            model.is_kept = True
        try:
            await self._steps.load(operation)
            beside = RouteRequest(new, replaced, revision, is_moved=False)
            await self._steps.ask_route(beside)
            await self._steps.wait_served(operation, new, is_ready=True)
            moved = RouteRequest(new, replaced, revision + (not is_known), is_moved=True)
            await self._steps.ask_route(moved)
            self.routes[order.public_name] = Route({new: 1.0}, new, moved.revision + 1)
        except (OperationFailed, CommandFailed, NoRoom):
            # The answer to a request that was carried out may be late or lost.
            self.routes = (await ask_models(self._supervisor)).routes
            now = self.routes.get(order.public_name)
            if now is None or now.stable != new:
                await self._steps.take_back(operation)
                raise
        finally:
            for model in kept:
                model.is_kept = False

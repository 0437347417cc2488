"""Models that are switched to another version while a fleet runs: the version that comes is loaded
beside the other one, gets all new requests at once, and then the other one goes.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import trio

from triolet.config.routes import Route

from ..exit_codes import CommandFailed
from ..supervisor.supervisor_socket import AddVersionRequest, RouteRequest, ask
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
      controller: knows the models.
      supervisor: socket of what has their processes.
      steps: that a switch is made of.

    Attributes:
      routes: of which servers are told, by public name, as the supervisor last said.
    """

    def __init__(self, controller: Controller, supervisor: Path, steps: ModelSteps) -> None:
        self.routes: dict[str, Route] = {}
        self._controller = controller
        self._supervisor = supervisor
        self._steps = steps

    def version_of(self, name: str) -> str:
        """Return the version that a public name stands for; the name itself where it has none."""
        route = self.routes.get(name)
        known = self._controller.models
        # Until the next look the route of a model that was dropped is still known.
        return name if route is None or name in known or route.stable not in known else route.stable

    def public_name_of(self, version: str) -> str:
        """Return what clients call a version."""
        names = (one for one, route in self.routes.items() if version in route.shares)
        return next(names, version)

    def plan(self, name: str, ref: str, under_way: Iterable[str]) -> tuple[str, SwitchOrder]:
        """Return a name for the version that is to come, and what is to be done.

        Args:
          name: of the version that answers now, or its public name.
          ref: of the version that comes.
          under_way: names of models that change.

        Raises:
          UnknownModel: there is none of this name.
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
        """Give a public name to another version, or leave all as it was: the version that comes is
        loaded beside the other one, gets all new requests at once, and then the other one goes.

        Raises:
          Failed: the version that comes cannot serve.
          CommandFailed: the same, or the workers of the other one could not be ended.
          NoRoom: there is no memory for both.
        """
        order = operation.switch
        assert order is not None, "a switch has its order"
        route = self.routes.get(order.public_name)
        if route is None or route.stable != operation.model:  # else it was moved already
            request = AddVersionRequest(
                operation.model, order.replaced, order.ref, is_of_port(operation)
            )
            config = await self._steps.ask_added(operation, request)
            if config.name == order.replaced:  # it computes alike, and is there already
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
        """Load a version beside the one that it replaces, and give it all new requests.

        Args:
          operation: the switch.
          config: of the version that comes.
          order: that is done.
          route: of their public name, as it is now; None where it has none.

        Raises:
          Failed: it cannot serve; it is taken back.
          CommandFailed: the same.
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
            await ask(self._supervisor, beside)
            await self._steps.wait_served(operation, new, is_ready=True)
            moved = RouteRequest(new, replaced, revision + (not is_known), is_moved=True)
            await ask(self._supervisor, moved)
        except (OperationFailed, CommandFailed, NoRoom):
            await self._steps.take_back(operation)
            raise
        finally:
            for model in kept:
                model.is_kept = False
        self.routes[order.public_name] = Route({new: 1.0}, new, moved.revision + 1)

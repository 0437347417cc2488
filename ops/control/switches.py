"""Switches a model of a running fleet to another version: loads the new version beside the old one,
routes all new requests to it, then lets the old one finish and removes it.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import msgspec
import trio

from transport.control_protocol import Models, ModelState
from triolet.config import ControlledModelConfig
from triolet.config.routes import Route

from ..exit_codes import EXIT_BAD_INPUT, CommandFailed
from ..supervisor.supervisor_socket import AddVersionRequest, RouteRequest, ask_models
from .auditing import is_of_port
from .memory import expected_bytes
from .model_states import HOLDING
from .operations import Conflict, NoRoom, OperationFailed, SwitchOrder, UnknownModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from transport.control_protocol import Activity, ModelNews

    from .controller import Controller
    from .model_steps import ModelSteps
    from .operations import Operation


class Switches:
    """The switches of one fleet's models.

    Without a supervisor, servers on several hosts have both versions by their settings and follow
    the routes of this control; then a switch only moves the route.

    Args:
      controller: the fleet's models.
      supervisor: socket of the supervisor.
      steps: steps of operations.
      fence: fence of a control without a supervisor; 0 with one.

    Attributes:
      fence: see Args.
      routes: current routes by public name, as last reported by the supervisor or by servers.
    """

    def __init__(
        self, controller: Controller, supervisor: Path, steps: ModelSteps, fence: int
    ) -> None:
        self.fence = fence
        self.routes: dict[str, Route] = {}
        self._followed: dict[str, dict[str, Route]] = {}
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
          Conflict: the new version belongs to another public name.
        """
        known, replaced = self._controller.models, self.version_of(name)
        if replaced not in known:
            raise UnknownModel(name, known)
        public = self.public_name_of(replaced)
        if self.fence:
            if ref not in known:
                raise UnknownModel(ref, known)
            if (owner := self.public_name_of(ref)) not in (ref, public):
                raise Conflict(f"{ref} is a version of {owner}; {public} needs another one")
            route = self.routes.get(public, Route({replaced: 1.0}, replaced, 0))
            return ref, SwitchOrder(public, route.stable, ref, route.revision)
        number = replaced.removeprefix(f"{public}-")
        first = int(number) + 1 if number != replaced and number.isdecimal() else 2
        taken = {*known, *under_way, *self.routes}
        new = next(one for n in count(first) if (one := f"{public}-{n}") not in taken)
        return new, SwitchOrder(public, replaced, ref)

    def told(self, news: Callable[[], tuple[ModelNews, ...]]) -> Models:
        """Return what servers should know: model states, or routes if there is no supervisor."""
        return Models((), self.routes, self.fence) if self.fence else Models(news())

    def hear(self, said: Activity) -> None:
        """Record the models and routes of a server, if there is no supervisor.

        Raises:
          CommandFailed: the server has heard a control that started later.
        """
        if said.fence > self.fence:
            raise CommandFailed(
                f"{said.server} follows a control that was started later; this one ends. Run one "
                "control for a fleet",
                EXIT_BAD_INPUT,
            )
        for model in said.models:
            self._steps.add(ControlledModelConfig(model.name, model.version), 0, ModelState.WARM)
        self._followed[said.server] = said.routes
        for name, route in said.routes.items():
            if route.valid_until is not None:
                continue  # of a rollout
            if any(self.public_name_of(one) not in (one, name) for one in route.shares):
                continue  # servers accept no version of two names
            own = self.routes.setdefault(name, route)
            if route.revision > own.revision:
                self.routes[name] = route
            elif route.revision == own.revision and route != own:
                # Two controls gave an order at once: servers only take a higher revision.
                self.routes[name] = msgspec.structs.replace(own, revision=own.revision + 1)

    def are_following(self, public: str) -> bool:
        """Return whether all servers have the current route of a public name."""
        followed = (self._followed[one].get(public) for one in self._controller.heard_at)
        return all(route == self.routes[public] for route in followed)

    def move_servers(self, operation: Operation, order: SwitchOrder) -> None:
        """Order servers to route all new requests to a version that they have.

        Raises:
          OperationFailed: the route was moved since the order was given.
        """
        route = self.routes.get(order.public_name, Route({order.replaced: 1.0}, order.replaced, 0))
        if route.stable == operation.model:
            return
        if route.revision != order.revision:
            raise OperationFailed(f"{order.public_name} was switched to {route.stable} meanwhile")
        # The other versions stay behind the public name, so that it can go back.
        shares = dict.fromkeys(route.shares, 0.0) | {operation.model: 1.0}
        self.routes[order.public_name] = msgspec.structs.replace(
            route, shares=shares, stable=operation.model, revision=route.revision + 1
        )

    async def run(self, operation: Operation) -> None:
        """Switch a public name to the new version. On failure the old version keeps serving.

        Raises:
          OperationFailed: the new version cannot serve.
          CommandFailed: the new version cannot serve, or workers of the old one did not stop.
          NoRoom: there is no memory for both.
        """
        order = operation.switch
        assert order is not None, "a switch has its order"
        if self.fence:
            await self._steps.wait_served(operation, operation.model, is_ready=True)
            self.move_servers(operation, order)
            self._steps.tell(operation, f"{order.public_name}: servers route requests to it")
            await self._steps.wait_for_servers(lambda: self.are_following(order.public_name))
            return
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

    async def put_beside(
        self, operation: Operation, order: SwitchOrder, route: Route | None
    ) -> None:
        """Load a new version, and give it to servers beside the old one, without requests.

        Args:
          operation: the switch or rollout.
          order: its settings.
          route: current route of the public name, or None.

        Raises:
          OperationFailed: the new version cannot serve.
          CommandFailed: the new version cannot serve.
          NoRoom: there is no memory for both.
        """
        new, revision = operation.model, 0 if route is None else route.revision
        await self._steps.load(operation)
        await self._steps.ask_route(RouteRequest(new, order.replaced, revision, is_moved=False))
        await self._steps.wait_served(operation, new, is_ready=True)

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
            await self.put_beside(operation, order, route)
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

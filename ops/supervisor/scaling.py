"""How many workers a model has, and which models there are, changed while the fleet runs: which
processes that makes, and the file that tells the servers.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec

from triolet.config import Pinning
from triolet.config.members import Member, Members, written_members
from triolet.config.routes import Route
from triolet.errors import ConfigError

from ..running_fleets import write_note
from .plan import control_address, served_model
from .slot import RestartFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from triolet.config import ServedModelConfig
    from triolet.ids import Role

    from ..running_fleets import Note
    from .plan import FleetPlan, ModelPlan, PlannedWorker
    from .process_spec import ProcessSpec

MEMBERS: Final = "members.json"
"""In the private directory of the fleet."""


class Scaling:
    """The plan of a fleet that grows and shrinks.

    Args:
      plan: as the fleet was started.
      note: what commands read of it.
      directory: of the fleet.
      specs: returns the processes of a plan, and the stand-ins.

    Attributes:
      now: the plan as it is.
      routes: that servers are told of, by public name.
    """

    def __init__(
        self,
        plan: FleetPlan,
        note: Note,
        directory: Path,
        specs: Callable[[FleetPlan], tuple[Sequence[ProcessSpec], Sequence[ProcessSpec]]],
    ) -> None:
        # A model that comes after another one has gone has not its sockets.
        numbered = [replace(model, number=place) for place, model in enumerate(plan.models)]
        self.now = replace(plan, models=tuple(numbered))
        self._note = note
        self._directory = directory
        self._specs = specs
        self._next_number = len(numbered)
        self._spares = {one.name: _spares_of(self.now, one.name) for one in plan.models}
        # Also those of a plan that was refused, or is not reached yet: which of them are there,
        # `_present` says.
        self._workers = {one.name: _workers_of(self.now, one.name) for one in plan.models}
        self._present = {name: set(workers) for name, workers in self._workers.items()}
        # None while servers have the models that they were started with.
        self._served: tuple[str, ...] | None = None
        self.routes: dict[str, Route] = {}

    def plan(self, model: str, role: Role, count: int) -> list[ProcessSpec]:
        """Plan another number of workers; return all of them.

        Args:
          model: name of it, empty for the only one where that has none.
          role: of the workers.
          count: how many there shall be.

        Raises:
          ConfigError: there is no such model, or there cannot be so many.
        """
        self._require_unpinned(f"start the fleet with fleet.{role.value}={count}")
        place = self._place(model, f"{role.value}={count}")
        plan = self.now.with_count(place, role, count)
        names = {name for name, one in _workers_of(plan, model).items() if one.role is role}
        specs = [spec for spec in self._specs(plan)[0] if spec.name in names]
        self.now = plan
        self._workers[model] |= _workers_of(plan, model)
        return specs

    def add(self, model: ModelPlan) -> tuple[list[ProcessSpec], list[ProcessSpec]]:
        """Have a model more, which no server is told of yet; return its workers and stand-ins.

        Raises:
          ConfigError: there cannot be so many workers, or cores are dealt out.
        """
        name = model.name
        self._require_unpinned(f"start the fleet with {name} among its models")
        numbered = replace(model, number=self._next_number)
        plan = self.now.with_models((*self.now.models, numbered))
        specs, spares = self._specs(plan)
        own = [one for one in specs if one.model == name]
        if self._served is None:
            self._served = tuple(one.name for one in self.now.models)
        self.now, self._next_number = plan, self._next_number + 1
        self._workers[name] = _workers_of(plan, name)
        self._present[name] = set(self._workers[name])
        self._spares[name] = _spares_of(plan, name)
        return own, [one for one in spares if one.model == name]

    def change(
        self, name: str, changed: Callable[[ModelPlan], ModelPlan]
    ) -> dict[str, ProcessSpec]:
        """Have other settings of a model; return its workers and stand-ins, by name.

        Args:
          name: of the model.
          changed: returns it with them.

        Raises:
          RestartFailed: its workers cannot be planned; nothing has changed.
        """
        place = self._place(name)
        model = changed(self.now.models[place])
        models = (*self.now.models[:place], model, *self.now.models[place + 1 :])
        named = {**self.now.settings.models, name: model.settings.models[name]}
        plan = replace(self.now, models=models, settings=replace(self.now.settings, models=named))
        try:
            specs = self._planned(plan, place)
        except ConfigError as error:
            raise RestartFailed(str(error)) from error
        self.now = plan
        return {one.name: one for one in specs if one.model == name}

    def _planned(self, plan: FleetPlan, place: int) -> list[ProcessSpec]:
        """Return the processes of a plan, behind those that a model of it may have besides."""
        model, plans = plan.models[place], []
        for role, count in model.counts:
            # A scaling that was refused has left others there than are planned, and a stand-in of
            # the time when there was one worker may be needed again.
            workers = self._workers[model.name]
            there = sum(workers[one].role is role for one in self._present[model.name])
            others = {1, there} - {0, count}
            plans += [plan.with_count(place, role, number) for number in others]
        return [one for each in (*plans, plan) for specs in self._specs(each) for one in specs]

    def tell_servers(self, name: str) -> None:
        """Tell servers what a model is now, if they are told to have it.

        Raises:
          RestartFailed: a file cannot be written; servers are told what they were told before.
        """
        self._served = self._names_served
        self._write(name)

    def remove(self, name: str) -> None:
        """Have a model less, which servers have not any more."""
        self.now = self.now.with_models([one for one in self.now.models if one.name != name])
        self.routes = {key: one for key, one in self.routes.items() if name not in one.shares}
        del self._workers[name], self._present[name], self._spares[name]

    def is_served(self, name: str) -> bool:
        """Whether servers are told to have a model."""
        return name in self._names_served

    def set_served(self, name: str, *, is_served: bool) -> None:
        """Tell servers to have a model, or not to have it any more.

        Raises:
          RestartFailed: a file cannot be written; servers are told what they were told before.
        """
        served, routes = self._served, self.routes
        others = tuple(one for one in self._names_served if one != name)
        self._served = (*others, name) if is_served else others
        if not is_served:
            self.routes = {public: narrowed(one, name) for public, one in routes.items()}
        try:
            self._write(name)
        except RestartFailed:
            self._served, self.routes = served, routes
            raise

    def public_name(self, version: str) -> str:
        """Return what clients call a model: the name of its route, or its own."""
        return next((name for name, one in self.routes.items() if version in one.shares), version)

    def route(self, version: str, replaced: str, revision: int, *, is_moved: bool) -> None:
        """Put a version under the public name of another one, in its place among the models.

        Args:
          version: comes.
          replaced: has the public name now.
          revision: of the route that the caller saw; 0 where there was none.
          is_moved: all new requests go to the version that comes, and servers let the other one
            go. Otherwise servers know both, and the one that comes gets no request yet.

        Raises:
          RestartFailed: the route has changed since, servers do not have the other version, or a
            file cannot be written; servers are told what they were told before.
        """
        public = self.public_name(replaced)
        shares = {version: 1.0} if is_moved else {replaced: 1.0, version: 0.0}
        before, served = self.routes, self._served
        now = before.get(public)
        if now is not None and (now.shares == shares or now.stable == version):
            return
        seen = 0 if now is None else now.revision
        if seen != revision:
            raise RestartFailed(
                f"the route of {public} is at revision {seen}, and was at {revision} when this "
                "change began; ask again"
            )
        if not self.is_served(replaced):  # a model whose addition was not taken back yet
            raise RestartFailed(f"servers do not have {replaced}; ask again once they have it")
        stable = version if is_moved else replaced
        self.routes = {**before, public: Route(shares, stable, revision + 1)}
        others = [one for one in self._names_served if one != version]
        place = others.index(replaced)
        others[place : place + 1] = [version] if is_moved else [replaced, version]
        self._served = tuple(others)
        try:
            self._write(public)
        except RestartFailed:
            self.routes, self._served = before, served
            raise

    def note(self, model: str, names: Sequence[str]) -> None:
        """Tell servers and commands which workers a model has now.

        Raises:
          RestartFailed: a file cannot be written.
        """
        self._place(model)
        self._present[model] = set(names)
        self._write(model)

    @property
    def _names_served(self) -> tuple[str, ...]:
        told = tuple(one.name for one in self.now.models)
        return told if self._served is None else self._served

    def _write(self, about: str) -> None:
        served = self._names_served
        workers = [
            worker
            for model, present in self._present.items()
            for name, worker in self._workers[model].items()
            if name in present and model in served
        ]
        spares = [one for name in served for one in self._spares[name].values()]
        addresses = {one.name: control_address(self._directory, one) for one in workers}
        names = {one.name: model for model in served for one in self._workers[model].values()}
        names |= {one.name: model for model in served for one in self._spares[model].values()}
        members = Members(
            tuple(
                Member(one.role, control_address(self._directory, one), names[one.name])
                for one in (*workers, *spares)
            ),
            self._models(),
            {name: one for name, one in self.routes.items() if one.shares.keys() <= {*served}},
        )
        new = self._directory / f"{MEMBERS}.new"
        try:
            new.write_bytes(written_members(members))
            note = msgspec.structs.replace(
                self._note,
                workers=addresses,
                models=tuple(dict.fromkeys(map(self.public_name, filter(None, served))))
                or self.now.model_names,
            )
            write_note(self._directory, note)
            # At last: servers follow it at once, also where what comes behind it fails.
            os.replace(new, self._directory / MEMBERS)
        except OSError as error:
            raise RestartFailed(
                f"cannot write which workers {about or 'the fleet'} has: {error}; make room in "
                f"{self._directory}, and ask again"
            ) from error

    def _models(self) -> tuple[ServedModelConfig, ...] | None:
        """Return what servers are told of models; None where these have not changed."""
        if self._served is None:
            return None
        every = (*self.now.workers, *self.now.spares)
        addresses = {one.name: control_address(self._directory, one) for one in every}
        return tuple(served_model(self.now, self._place(one), addresses) for one in self._served)

    def _require_unpinned(self, instead: str) -> None:
        if self.now.settings.fleet.pin is not Pinning.OFF:
            raise ConfigError(
                f"fleet.pin gave each worker cores of its own at the start; {instead}, or with "
                "fleet.pin=off"
            )

    def _place(self, model: str, target: str = "decode=2") -> int:
        names = [one.name for one in self.now.models]
        if model in names:
            return names.index(model)
        known = ", ".join(f"{name}.{target}" if name else target for name in names)
        what = f"no model is called {model!r}" if model else f"{target} names no model"
        raise ConfigError(f"{what}; say {known}")


def narrowed(route: Route, version: str) -> Route:
    """Return a route without a version that gets no requests; one that has no other stays, since
    servers may be told of it again."""
    if version not in route.shares or len(route.shares) == 1:
        return route
    return Route({route.stable: 1.0}, route.stable, route.revision + 1)


def _workers_of(plan: FleetPlan, model: str) -> dict[str, PlannedWorker]:
    return {one.name: one for one in plan.workers if plan.models[one.model].name == model}


def _spares_of(plan: FleetPlan, model: str) -> dict[str, PlannedWorker]:
    return {one.name: one for one in plan.spares if plan.models[one.model].name == model}

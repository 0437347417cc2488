"""Changes the plan of a running fleet (number of workers, models, routes) and writes the members
file that notifies the servers.
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
"""File in the private directory of the fleet; servers watch it."""


class Scaling:
    """The current plan of a running fleet.

    Args:
      plan: plan at the start of the fleet.
      note: note for commands.
      directory: private directory of the fleet.
      specs: returns the processes and spares of a plan.

    Attributes:
      now: current plan.
      routes: current routes by public name.
    """

    def __init__(
        self,
        plan: FleetPlan,
        note: Note,
        directory: Path,
        specs: Callable[[FleetPlan], tuple[Sequence[ProcessSpec], Sequence[ProcessSpec]]],
    ) -> None:
        # Fixed numbers: a later model must not reuse the sockets of a dropped one.
        numbered = [replace(model, number=place) for place, model in enumerate(plan.models)]
        self.now = replace(plan, models=tuple(numbered))
        self._note = note
        self._directory = directory
        self._specs = specs
        self._next_number = len(numbered)
        self._spares = {one.name: _spares_of(self.now, one.name) for one in plan.models}
        # Includes workers of plans that failed or are not reached yet; `_present` has the names of
        # existing workers.
        self._workers = {one.name: _workers_of(self.now, one.name) for one in plan.models}
        self._present = {name: set(workers) for name, workers in self._workers.items()}
        # None while servers have the models of their start.
        self._served: tuple[str, ...] | None = None
        self.routes: dict[str, Route] = {}

    def plan(self, model: str, role: Role, count: int) -> list[ProcessSpec]:
        """Plan another number of workers of a role. Return all workers of that role.

        Args:
          model: name of the model; empty for a single unnamed model.
          role: role of the workers.
          count: number of workers.

        Raises:
          ConfigError: the model does not exist, or the number is not allowed.
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
        """Add a model without notifying servers. Return its workers and spares.

        Raises:
          ConfigError: too many workers, or workers have reserved cores.
        """
        name = model.name
        if not model.workers_of:
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
        """Change the settings of a model. Return its workers and spares by name.

        Args:
          name: name of the model.
          changed: returns the changed plan of the model.

        Raises:
          RestartFailed: its workers cannot be planned; nothing changed.
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
        """Return the processes of a plan, after other ones that a model may still have."""
        model, plans = plan.models[place], []
        for role, count in model.counts:
            # A failed scaling may have left other workers, and the spare for a single worker may be
            # needed again.
            workers = self._workers[model.name]
            there = sum(workers[one].role is role for one in self._present[model.name])
            others = {1, there} - {0, count}
            plans += [plan.with_count(place, role, number) for number in others]
        return [one for each in (*plans, plan) for specs in self._specs(each) for one in specs]

    def tell_servers(self, name: str) -> None:
        """Notify servers of the current state of a model, if they serve it.

        Raises:
          RestartFailed: a file cannot be written; servers keep the previous state.
        """
        self._served = self._names_served
        self._write(name)

    def remove(self, name: str) -> None:
        """Remove a model that servers no longer serve."""
        self.now = self.now.with_models([one for one in self.now.models if one.name != name])
        self.routes = {key: one for key, one in self.routes.items() if name not in one.shares}
        del self._workers[name], self._present[name], self._spares[name]

    def is_served(self, name: str) -> bool:
        """Return whether servers are configured to serve a model."""
        return name in self._names_served

    def set_served(self, name: str, *, is_served: bool) -> None:
        """Tell servers to serve a model, or to stop serving it.

        Raises:
          RestartFailed: a file cannot be written; servers keep the previous state.
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
        """Return the public name of a version: the name of its route, or its own."""
        return next((name for name, one in self.routes.items() if version in one.shares), version)

    def route(self, version: str, replaced: str, revision: int, *, is_moved: bool) -> None:
        """Route a public name to another version.

        Args:
          version: the new version.
          replaced: the version that has the public name now.
          revision: revision of the route that the caller saw; 0 if it saw none.
          is_moved: route all new requests to the new version and stop serving the old one.
            Otherwise servers have both, and the new version gets no requests yet.

        Raises:
          RestartFailed: the route has changed since, servers do not have the replaced version, or a
            file cannot be written; servers keep the previous state.
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
                f"the route of {public} is at revision {seen}, but was at {revision} when this "
                "change began; try again"
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
        """Notify servers and commands of the current workers of a model.

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
        members = [
            Member(one.role, control_address(self._directory, one), names[one.name])
            for one in (*workers, *spares)
        ]
        members += [
            Member(member.role, member.address, model.name)
            for model in self.now.models
            if model.workers_of and model.name in served
            for member in members
            if member.model == model.workers_of
        ]
        file = Members(
            tuple(members),
            self._models(),
            {name: one for name, one in self.routes.items() if one.shares.keys() <= {*served}},
        )
        new = self._directory / f"{MEMBERS}.new"
        try:
            new.write_bytes(written_members(file))
            note = msgspec.structs.replace(
                self._note,
                workers=addresses,
                models=tuple(dict.fromkeys(map(self.public_name, filter(None, served))))
                or self.now.model_names,
            )
            write_note(self._directory, note)
            # Replace this file last: servers react to it at once.
            os.replace(new, self._directory / MEMBERS)
        except OSError as error:
            raise RestartFailed(
                f"cannot write the workers of {about or 'the fleet'}: {error}; free disk space in "
                f"{self._directory}, and try again"
            ) from error

    def _models(self) -> tuple[ServedModelConfig, ...] | None:
        """Return the servers' config of the models, or None if unchanged since the start."""
        if self._served is None:
            return None
        every = (*self.now.workers, *self.now.spares)
        addresses = {one.name: control_address(self._directory, one) for one in every}
        return tuple(served_model(self.now, self._place(one), addresses) for one in self._served)

    def _require_unpinned(self, instead: str) -> None:
        if self.now.settings.fleet.pin is not Pinning.OFF:
            raise ConfigError(
                f"fleet.pin has reserved cores for each worker at the start; {instead}, or with "
                "fleet.pin=off"
            )

    def _place(self, model: str, target: str = "decode=2") -> int:
        names = [one.name for one in self.now.models]
        if model in names:
            return names.index(model)
        known = ", ".join(f"{name}.{target}" if name else target for name in names)
        what = f"no model is called {model!r}" if model else f"{target} does not name a model"
        raise ConfigError(f"{what}; give {known}")


def narrowed(route: Route, version: str) -> Route:
    """Remove a version without requests from a route. Keep a route that has no other version,
    because servers may be told to serve it again."""
    if version not in route.shares or len(route.shares) == 1:
        return route
    return Route({route.stable: 1.0}, route.stable, route.revision + 1)


def _workers_of(plan: FleetPlan, model: str) -> dict[str, PlannedWorker]:
    return {one.name: one for one in plan.workers if plan.models[one.model].name == model}


def _spares_of(plan: FleetPlan, model: str) -> dict[str, PlannedWorker]:
    return {one.name: one for one in plan.spares if plan.models[one.model].name == model}

"""Adds models and versions to a running fleet and removes them: checks files, plans the workers,
and notifies the servers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import trio

from triolet.config import MAX_MODELS
from triolet.errors import ConfigError
from triolet.ids import Role

from ..models.several import each_model, name_of
from ..settings.form import of_role, require_model_name
from .plan import controlled
from .prepare import prepare_model, require_auto
from .slot import RestartFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from triolet.config import ControlledModelConfig, FleetModelConfig

    from ..models.several import StoredModels
    from ..settings.form import Settings
    from .plan import ModelPlan
    from .scaling import Scaling
    from .supervisor import Supervisor
    from .supervisor_socket import AddVersionRequest, RouteRequest

    Tell = Callable[[str], Awaitable[None]]

log = structlog.get_logger(__name__)


class ModelSet:
    """The models of a running fleet.

    Runs one change at a time. Changes are idempotent: a repeated one continues from the current
    state.

    Args:
      supervisor: supervisor of the workers.
      scaling: plans the workers and notifies servers.
      stored: protects models in the store from garbage collection.

    Attributes:
      changing: lock held during each change.
    """

    def __init__(self, supervisor: Supervisor, scaling: Scaling, stored: StoredModels) -> None:
        self._supervisor = supervisor
        self._scaling = scaling
        self._stored = stored
        self.changing = trio.Lock()
        # During a switch in place: the previous plan of the model, by the name drawn for the new
        # version. It is put back if a server cannot read the new version.
        self._before: dict[str, ModelPlan] = {}
        # Checks of files run in this thread, one change at a time.
        self._thread = trio.CapacityLimiter(1)

    def configs(self) -> list[ControlledModelConfig]:
        """Return control's config of each named model."""
        models = self._scaling.now.models
        return [controlled(model) for model in models if model.name]

    def is_served(self, name: str) -> bool:
        """Return whether servers are configured to serve a model."""
        return self._scaling.is_served(name)

    async def add(
        self,
        name: str,
        model: FleetModelConfig,
        tell: Tell,
        *,
        is_reference_only: bool = False,
        replaced: str = "",
        is_beside: bool = False,
    ) -> ControlledModelConfig:
        """Add a model, so that its workers can be started. Servers are not notified.

        Args:
          name: name of the model.
          model: its settings.
          tell: called with a description before each step.
          is_reference_only: accept only versions in the store, not paths.
          replaced: version whose public name and aliases it takes over; empty for none. If both
            have the same compute digest, it replaces that version at once.
          is_beside: keep that version also then; its workers serve both.

        Raises:
          RestartFailed: it cannot be added; it is rolled back.
        """
        async with self.changing:
            plan = self._scaling.now
            known = {one.name: one for one in plan.models}
            if name in known:
                there = plan.settings.models[name]
                # The replaced version may have been scaled since.
                if replace(there, prefill=model.prefill, decode=model.decode) != model:
                    raise RestartFailed(f"another model is already called {name!r}")
                return controlled(known[name])
            await tell(f"{name}: checking its files")
            try:
                self._require_free(name, model, replaced)
                [own] = each_model(replace(plan.settings, models={name: model}))
                hold = partial(self._stored.hold, own, is_reference_only=is_reference_only)
                held = await trio.to_thread.run_sync(hold, limiter=self._thread)
                alike = self._alike(held, replaced)
                if alike is not None and not is_beside:
                    return controlled(self._put_in_place(held, alike))
                prepared = (
                    await trio.to_thread.run_sync(prepare_model, plan, held, limiter=self._thread)
                    if alike is None
                    else _on_workers_of(alike, held)
                )
                self._require_other_files(prepared, replaced)
                specs, spares = self._scaling.add(prepared)
            except (RestartFailed, ConfigError, OSError, ValueError, RecursionError) as error:
                # Bad files of one model must not stop the fleet.
                self._stored.release(name)
                raise RestartFailed(str(error)) from error
            try:
                if alike is None:
                    self._supervisor.add_model(name, specs, spares)
            except RestartFailed:
                self._forget(name)
                raise
            return controlled(prepared)

    async def add_version(self, request: AddVersionRequest, tell: Tell) -> ControlledModelConfig:
        """Add another version of a model, with the settings and number of workers of the current
        one.

        Args:
          request: the versions.
          tell: called with a description before each step.

        Raises:
          RestartFailed: it cannot be added; it is rolled back.
        """
        own = self._model(request.replaced)
        model = replace(
            own.settings.models[own.name],
            ref=request.ref,
            start=True,
            prefill=own.settings.fleet.prefill,
            decode=own.settings.fleet.decode,
        )
        return await self.add(
            request.name,
            model,
            tell,
            is_reference_only=request.is_reference_only,
            replaced=request.replaced,
            is_beside=request.is_beside,
        )

    def _model(self, name: str) -> ModelPlan:
        found = [one for one in self._scaling.now.models if one.name == name]
        if not found:
            raise RestartFailed(f"no model is called {name!r}")
        return found[0]

    def _alike(self, held: Settings, replaced: str) -> ModelPlan | None:
        """Return the replaced version if it has the compute digest of a new one, else None."""
        if not replaced or not held.server.compute_digest:
            return None
        old = self._model(replaced)
        is_alike = held.server.compute_digest == old.settings.server.compute_digest
        return old if is_alike else None

    def _require_other_files(self, prepared: ModelPlan, replaced: str) -> None:
        if replaced and prepared.model_dir == self._model(replaced).model_dir:
            is_stored = bool(prepared.settings.server.model_digest)
            advice = "" if is_stored else "; run `triolet restart` to read its files again"
            public = self._scaling.public_name(replaced)
            raise ConfigError(f"{public} is already served from {prepared.model_dir}{advice}")

    def _put_in_place(self, held: Settings, old: ModelPlan) -> ModelPlan:
        """Replace a version by one with the same compute digest. The workers keep running, and use
        the new files from their next start on. Return the changed model.

        Raises:
          RestartFailed: the workers are restarting, or servers cannot be notified; nothing changed.
        """
        if _has_files(old, held):  # it may be asked for again
            self._stored.release(name_of(held))
            return old
        new = self._take_files(old, held)
        self._before[name_of(held)] = old
        return new

    def _take_files(self, old: ModelPlan, held: Settings) -> ModelPlan:
        """Move the files that are held under another name to this model. Return the model.

        Raises:
          RestartFailed: its workers restart, or servers cannot be told; nothing has changed.
        """
        new = self._use_files(old.name, held)
        self._stored.replace(old.name, name_of(held), new.settings)
        return new

    def _use_files(self, name: str, of: Settings) -> ModelPlan:
        """Let a model have the files of another version, which computes alike. Return the model.

        Raises:
          RestartFailed: its workers restart, or servers cannot be told; nothing has changed.
        """
        old = self._model(name)
        new = _with_files(old, of)
        group = self._supervisor.to_change(name)
        group.use(self._scaling.change(name, lambda _: new))
        try:
            self._scaling.tell_servers(name)
        except RestartFailed:
            group.use(self._scaling.change(name, lambda _: old))
            raise
        return new

    def _require_free(self, name: str, model: FleetModelConfig, replaced: str) -> None:
        """Check that the model can be added to the fleet: its name, aliases and number."""
        require_model_name(name)
        settings = self._scaling.now.settings
        if not settings.models:
            raise ConfigError("the only model of this fleet has no name; start it as NAME=MODEL")
        if len(settings.models) >= MAX_MODELS:
            raise ConfigError(
                f"this fleet has {len(settings.models)} models; allowed: {MAX_MODELS}"
            )
        if not model.ref:
            raise ConfigError(f"models.{name}.ref is missing; give {name}=MODEL")
        taken = {
            alias: other
            for other, one in settings.models.items()
            for alias in (other, self._scaling.public_name(other), *one.aliases)
            if alias == other or other != replaced
        }
        for alias in (name, *model.aliases):
            if alias in taken:
                raise ConfigError(
                    f"model {taken[alias]} already uses {alias!r}; give {name} another name"
                )
        known = self._by_public_name(list(settings.models))
        require_auto(replace(settings, models=known if replaced else {**known, name: model}))

    def _by_public_name(self, versions: Sequence[str]) -> dict[str, FleetModelConfig]:
        """Return models by their public names, which clients and ladders use."""
        models = self._scaling.now.settings.models
        return {self._scaling.public_name(one): models[one] for one in versions}

    async def set_served(self, name: str, *, is_served: bool) -> None:
        """Tell servers to serve a model, or to stop serving it.

        Raises:
          RestartFailed: the model does not exist, is needed, or servers cannot be notified.
        """
        async with self.changing:
            if name not in self._scaling.now.settings.models:
                if is_served:
                    raise RestartFailed(f"no model is called {name!r}")
                self._put_back(name)
                return
            if self._scaling.is_served(name) == is_served:
                return
            if not is_served:
                try:
                    self._require_dispensable(name)
                except ConfigError as error:
                    raise RestartFailed(str(error)) from error
            self._scaling.set_served(name, is_served=is_served)

    def _put_back(self, version: str) -> None:
        """Undo that a version took the place of another one, if it did.

        Raises:
          RestartFailed: the workers restart, or servers cannot be told; nothing has changed.
        """
        before = self._before.get(version)
        if before is not None:
            new = self._use_files(before.name, before.settings)
            self._stored.settings[before.name] = new.settings

    def _require_dispensable(self, name: str) -> None:
        settings = self._scaling.now.settings
        served = [one for one in settings.models if self._scaling.is_served(one)]
        if served == [name]:
            raise ConfigError(f"{name} is the only model; add another one first, or stop the fleet")
        routes = self._scaling.routes.values()
        if any(one.stable == name and len(one.shares) > 1 for one in routes):
            raise ConfigError(f"{name} serves requests until its new version is ready")
        others = self._by_public_name([one for one in served if one != name])
        require_auto(replace(settings, models=others))

    async def route(self, request: RouteRequest) -> None:
        """Route the public name of a version to another one; see `Scaling.route`. If the workers of
        the replaced version serve both, that version gets the files of the other one instead.

        Raises:
          RestartFailed: a version does not exist, or the route is refused.
        """
        async with self.changing:
            version, replaced = self._model(request.version), self._model(request.replaced)
            if request.is_moved and version.workers_of:
                if not _has_files(replaced, version.settings):  # it may be asked for again
                    self._take_files(replaced, version.settings)
                return
            self._scaling.route(
                version.name, replaced.name, request.revision, is_moved=request.is_moved
            )

    async def drop(self, name: str, tell: Tell) -> None:
        """Remove a model that servers no longer serve: stop its workers and release it in the
        store.

        Args:
          name: name of the model.
          tell: called with a description before each step.

        Raises:
          RestartFailed: servers still serve it, its workers cannot be stopped, or the fleet stops.
        """
        async with self.changing:
            if name not in self._scaling.now.settings.models:
                self._before.pop(name, None)
                return
            if self._scaling.is_served(name):
                raise RestartFailed(f"servers still serve {name}; withdraw it first")
            if not self._model(name).workers_of:
                await self._supervisor.stop_model(name, tell)
                self._supervisor.drop_model(name)
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._scaling.remove(name)
        self._stored.release(name)


def _has_files(model: ModelPlan, of: Settings) -> bool:
    return model.settings.server.model_digest == of.server.model_digest


def _with_files(model: ModelPlan, of: Settings) -> ModelPlan:
    """Return a model with the files of another version in the store."""
    [told] = of.models.values()
    assert of.fleet.model is not None, "versions in the store have a directory"
    settings = replace(
        model.settings,
        fleet=replace(model.settings.fleet, model=of.fleet.model),
        models={model.name: replace(model.settings.models[model.name], ref=told.ref)},
    )
    for role in (Role.SERVER, Role.PREFILL, Role.DECODE):
        settings = of_role(settings, role, model_digest=of.server.model_digest)
    return replace(model, model_dir=Path(of.fleet.model), settings=settings)


def _on_workers_of(model: ModelPlan, held: Settings) -> ModelPlan:
    """Return a version that has the workers of another one."""
    new = _with_files(model, held)
    server = replace(new.settings.server, model_name=held.server.model_name)
    settings = replace(new.settings, server=server, models=held.models)
    return replace(new, settings=settings, workers_of=model.name)

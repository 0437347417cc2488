"""Loads LoRA adapters into a running model and unloads them: checks the files, restarts the workers
one at a time, and notifies the servers.

Servers accept requests for an adapter only while every worker has it. During a change they know
which adapters only some workers have, so that old and new workers can serve side by side.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import structlog
import trio

from triolet.config import SEPARATOR, require_adapter_names
from triolet.errors import ConfigError
from triolet.ids import Role
from triolet.memory import available_memory_bytes
from triolet.units import show_size

from ..models.adapters import held_adapter, require_number, told
from ..models.model_directory import check_adapter, check_start
from .plan import controlled
from .slot import RestartFailed
from .supervisor import require_no_restart

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from triolet.config import AdapterConfig, ControlledModelConfig

    from ..models.several import StoredModels
    from .plan import ModelPlan
    from .process_spec import ProcessSpec
    from .scaling import Scaling
    from .supervisor import Supervisor

    Tell = Callable[[str], Awaitable[None]]
    IsMet = Callable[[str], Awaitable[bool]]
    Adapters = tuple[AdapterConfig, ...]

log = structlog.get_logger(__name__)

UNREADABLE = (ConfigError, OSError, ValueError, RecursionError)
"""Errors that bad adapter files may raise; they must not stop the fleet."""


class AdapterSet:
    """The adapters of a running fleet.

    Runs one change at a time, of adapters or models. Changes are idempotent: a repeated one
    continues from the current state.

    Args:
      supervisor: supervisor of the workers.
      scaling: plans the workers and notifies servers.
      stored: protects adapters in the store from garbage collection.
      changing: lock held during each change.
    """

    def __init__(
        self, supervisor: Supervisor, scaling: Scaling, stored: StoredModels, changing: trio.Lock
    ) -> None:
        self._supervisor = supervisor
        self._scaling = scaling
        self._stored = stored
        self._changing = changing
        self._thread = trio.CapacityLimiter(1)

    async def load(
        self,
        model: str,
        name: str,
        ref: str,
        tell: Tell,
        is_met: IsMet,
        *,
        is_reference_only: bool,
    ) -> ControlledModelConfig:
        """Load an adapter into all workers and accept requests for it.

        Args:
          model: name of the model.
          name: name of the adapter.
          ref: its directory or version.
          tell: called with a description before each step.
          is_met: returns whether each server uses a worker.
          is_reference_only: accept only a version in the store, not a path.

        Raises:
          RestartFailed: it cannot be used, or a worker did not start with it; it is removed again.
            Or servers could not be notified; then workers keep it until `drop`.
        """
        async with self._changing:
            own = self._model(model)
            for other in set(_loaded(own)).difference(_named(own)):
                if other.name != name:  # left by an interrupted change; servers know at most one
                    await self._drop(model, other.name, tell, is_met)
            own = self._model(model)
            await tell(f"{model}{SEPARATOR}{name}: checking its files")
            try:
                look = partial(self._look, own, name, ref, is_reference_only=is_reference_only)
                adapter = await trio.to_thread.run_sync(look, limiter=self._thread)
            except UNREADABLE as error:
                raise RestartFailed(str(error)) from error
            named, loaded = _named(own), _loaded(own)
            if adapter in named:
                return controlled(own)
            if adapter not in loaded:
                grown, sizes = (*loaded, adapter), await self._sizes(own, (*loaded, adapter))
                try:
                    specs = self._plan(model, named, grown, (adapter,), sizes, {name: ref})
                    self._scaling.tell_servers(model)
                    await self._supervisor.change_workers(model, specs, is_met, tell)
                except (RestartFailed, *UNREADABLE) as error:
                    self._stored.release_adapter(model, name)
                    with suppress(RestartFailed):
                        self._plan(model, named, loaded, (), own.adapter_bytes)
                        self._scaling.tell_servers(model)
                    raise RestartFailed(str(error)) from error
                loaded = grown
            self._plan(model, (*named, adapter), loaded, ())
            try:
                self._scaling.tell_servers(model)
            except RestartFailed:
                self._plan(model, named, loaded, (adapter,))
                raise
            return controlled(self._model(model))

    async def withdraw(self, model: str, name: str) -> None:
        """Stop accepting requests for an adapter; workers keep it.

        Raises:
          RestartFailed: servers cannot be notified, or a restart is running, during which workers
            could not drop the adapter.
        """
        async with self._changing:
            own = self._model(model)
            named, loaded = _named(own), _loaded(own)
            gone = tuple(one for one in named if one.name == name)
            if not gone:
                return
            require_no_restart(self._supervisor)
            self._plan(model, tuple(one for one in named if one not in gone), loaded, gone)
            try:
                self._scaling.tell_servers(model)
            except RestartFailed:
                self._plan(model, named, loaded, ())
                raise

    async def drop(self, model: str, name: str, tell: Tell, is_met: IsMet) -> ControlledModelConfig:
        """Remove a withdrawn adapter from the workers and release it in the store.

        Args:
          model: name of the model.
          name: name of the adapter.
          tell: called with a description before each step.
          is_met: returns whether each server uses a worker.

        Raises:
          RestartFailed: it was not withdrawn, or a worker did not start without it. In the latter
            case requests may use it again.
        """
        async with self._changing:
            return await self._drop(model, name, tell, is_met)

    async def _drop(
        self, model: str, name: str, tell: Tell, is_met: IsMet
    ) -> ControlledModelConfig:
        own = self._model(model)
        named, loaded = _named(own), _loaded(own)
        gone = tuple(one for one in loaded if one.name == name)
        if not gone:
            return controlled(own)
        if gone[0] in named:
            raise RestartFailed(f"servers still accept requests for {name}; withdraw it first")
        left = tuple(one for one in loaded if one not in gone)
        sizes = await self._sizes(own, left)
        try:
            specs = self._plan(model, named, left, gone, sizes)
            await self._supervisor.change_workers(model, specs, is_met, tell)
        except RestartFailed:
            refs = {name: own.settings.fleet.adapters[name]}
            self._plan(model, (*named, *gone), loaded, (), own.adapter_bytes, refs)
            self._scaling.tell_servers(model)
            raise
        self._plan(model, named, left, ())
        self._stored.release_adapter(model, name)
        self._scaling.tell_servers(model)
        return controlled(self._model(model))

    def _model(self, name: str) -> ModelPlan:
        """Return a model of the fleet.

        Raises:
          RestartFailed: no model has this name.
        """
        known = {one.name: one for one in self._scaling.now.models}
        if not name or name not in known:
            names = ", ".join(one for one in known if one)
            raise RestartFailed(f"no model is called {name!r}; allowed: {names or 'none'}")
        return known[name]

    async def _sizes(self, own: ModelPlan, adapters: Adapters) -> Mapping[Role, int]:
        """Return the memory of adapters in one worker; the present value if files are gone."""
        try:
            return await trio.to_thread.run_sync(_bytes, own, adapters, limiter=self._thread)
        except UNREADABLE as error:
            log.warning("adapters_unreadable", model=own.name, reason=str(error))
            return own.adapter_bytes

    def _look(
        self, own: ModelPlan, name: str, ref: str, *, is_reference_only: bool
    ) -> AdapterConfig:
        """Check an adapter and return it. Holds a new one in the store.

        Raises:
          ConfigError: the adapter cannot be used, or its name is taken.
        """
        require_adapter_names((name,))
        known = {one.name: one for one in _loaded(own)}
        if name in known:
            with held_adapter(
                own.settings, name, ref, is_reference_only=is_reference_only
            ) as found:
                if found.digest != known[name].digest:
                    raise ConfigError(
                        f"{own.name}{SEPARATOR}{name} is {known[name].digest}, but {ref} is "
                        f"{found.digest}; run `triolet adapter unload {own.name}{SEPARATOR}{name}` "
                        "first, or choose another name"
                    )
            return known[name]
        require_number(own.settings, len(known) + 1)
        self._require_free(own, name)
        check = partial(check_adapter, own.model_dir)
        adapter = self._stored.hold_adapter(
            own.name, name, ref, check, is_reference_only=is_reference_only
        )
        try:
            _require_room(own, adapter)
        except UNREADABLE:
            self._stored.release_adapter(own.name, name)
            raise
        return adapter

    def _require_free(self, own: ModelPlan, name: str) -> None:
        """Check that no model uses a name that the adapter will have."""
        models = self._scaling.now.settings.models
        taken = {alias: one for one, it in models.items() for alias in (one, *it.aliases)}
        for alias in (own.name, *models[own.name].aliases):
            full = f"{alias}{SEPARATOR}{name}"
            if full in taken:
                raise ConfigError(
                    f"model {taken[full]} already uses the name {full!r}; give the adapter another "
                    "name"
                )

    def _plan(
        self,
        model: str,
        named: Adapters,
        loaded: Adapters,
        unnamed: Adapters,
        sizes: Mapping[Role, int] | None = None,
        refs: Mapping[str, str] | None = None,
    ) -> dict[str, ProcessSpec]:
        """Plan the adapters of a model. Return its workers and spares by name.

        Args:
          model: name of the model.
          named: adapters that servers accept requests for.
          loaded: adapters that workers load at their next start.
          unnamed: adapters of some workers that servers accept no requests for.
          sizes: memory of the loaded adapters in one worker; None if unchanged.
          refs: directory or version of a new adapter, by name.
        """

        def changed(own: ModelPlan) -> ModelPlan:
            adapters = {**own.settings.fleet.adapters, **(refs or {})}
            known = {one.name for one in loaded}
            given = {one: ref for one, ref in adapters.items() if one in known}
            settings = own.settings
            config = replace(settings.models[model], adapters=given)
            settings = replace(
                settings,
                models={model: config},
                fleet=replace(settings.fleet, adapters=given),
            )
            settings = told(settings, named=named, loaded=loaded, unnamed=unnamed)
            return replace(own, settings=settings, adapter_bytes=sizes or own.adapter_bytes)

        return self._scaling.change(model, changed)


def _named(own: ModelPlan) -> Adapters:
    return own.settings.server.model_adapters


def _loaded(own: ModelPlan) -> Adapters:
    return own.settings.worker(Role.DECODE).engine.adapters


def _bytes(own: ModelPlan, adapters: Adapters) -> dict[Role, int]:
    """Return the memory of adapters in one worker of each role."""
    found = {}
    for role, _ in own.counts:
        engine = replace(own.settings.worker(role).engine, adapters=adapters)
        found[role] = check_start(own.model_dir, engine).model.adapter_bytes
    return found


def _require_room(own: ModelPlan, adapter: AdapterConfig) -> None:
    """Check that this machine has memory for one more adapter in each worker.

    Raises:
      ConfigError: it does not.
    """
    more = _bytes(own, (adapter,))
    on_cpu = {
        role: count
        for role, count in own.counts
        if own.settings.worker(role).engine.device == "cpu"
    }
    needed = sum(count * more[role] for role, count in on_cpu.items())
    free = available_memory_bytes()
    if free is not None and needed > free:
        raise ConfigError(
            f"adapter {adapter.name} takes {show_size(needed)} in {sum(on_cpu.values())} workers, "
            f"but only {show_size(free)} are free; unload other adapters, or run `triolet model "
            "sleep` for a model"
        )

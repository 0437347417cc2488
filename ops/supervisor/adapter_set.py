"""LoRA adapters that come to a model while its fleet runs, and go: checked, held in the store,
given to its workers one after the other, and told to the servers.

Requests may name an adapter only while each worker has it. Servers are told beforehand of what some
workers have besides, so that workers of both sets serve beside one another.
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
"""What files of one adapter may lead to; it must not end a fleet."""


class AdapterSet:
    """The adapters of a fleet that runs.

    One change at a time, of adapters or models. Each may be asked for again, and goes on from where
    it is.

    Args:
      supervisor: of the workers.
      scaling: plans them, and tells servers.
      stored: holds adapters in the store.
      changing: held during each change.
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
        """Have an adapter that requests may name; wholly or not at all.

        Args:
          model: of which.
          name: of the adapter.
          ref: its directory or version.
          tell: called before each step, with its words.
          is_met: whether each server uses the worker of this name.
          is_reference_only: it is a version of the store, no path.

        Raises:
          RestartFailed: it cannot be had, or a worker did not start with it; nothing of it stays.
            Or servers cannot be told at last; workers have it until `drop`.
        """
        async with self._changing:
            own = self._model(model)
            for other in set(_loaded(own)).difference(_named(own)):
                if other.name != name:  # of a change that was not ended; servers know one such
                    await self._drop(model, other.name, tell, is_met)
            own = self._model(model)
            await tell(f"{model}{SEPARATOR}{name}: looking at its files")
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
        """Let requests name an adapter no more, which workers still have.

        Raises:
          RestartFailed: servers cannot be told, or a restart is under way: its requests would be
            ended, and workers would not let it go.
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
        """Have an adapter no more, which no request names: end it in the workers, and release it in
        the store.

        Args:
          model: of which.
          name: of the adapter.
          tell: called before each step, with its words.
          is_met: whether each server uses the worker of this name.

        Raises:
          RestartFailed: requests may name it, or a worker did not start without it. In that case
            they may name it again.
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
            raise RestartFailed(f"requests may name {name}; servers are told to let it go first")
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
          RestartFailed: there is none of this name.
        """
        known = {one.name: one for one in self._scaling.now.models}
        if not name or name not in known:
            names = ", ".join(one for one in known if one)
            raise RestartFailed(f"no model is called {name!r}; allowed: {names or 'none'}")
        return known[name]

    async def _sizes(self, own: ModelPlan, adapters: Adapters) -> Mapping[Role, int]:
        """Return what adapters take in one worker; of all that it has where files are gone."""
        try:
            return await trio.to_thread.run_sync(_bytes, own, adapters, limiter=self._thread)
        except UNREADABLE as error:
            log.warning("adapters_unreadable", model=own.name, reason=str(error))
            return own.adapter_bytes

    def _look(
        self, own: ModelPlan, name: str, ref: str, *, is_reference_only: bool
    ) -> AdapterConfig:
        """Return an adapter that a model may have; a new one is held from now on.

        Raises:
          ConfigError: it may not be, or its name means another one.
        """
        require_adapter_names((name,))
        known = {one.name: one for one in _loaded(own)}
        if name in known:
            with held_adapter(
                own.settings, name, ref, is_reference_only=is_reference_only
            ) as found:
                if found.digest != known[name].digest:
                    raise ConfigError(
                        f"{own.name}{SEPARATOR}{name} is {known[name].digest}, and {ref} is "
                        f"{found.digest}; `triolet adapter unload {own.name}{SEPARATOR}{name}` "
                        "comes first, or another name"
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
        """Look whether no model answers to a name that the adapter will have."""
        models = self._scaling.now.settings.models
        taken = {alias: one for one, it in models.items() for alias in (one, *it.aliases)}
        for alias in (own.name, *models[own.name].aliases):
            full = f"{alias}{SEPARATOR}{name}"
            if full in taken:
                raise ConfigError(
                    f"model {taken[full]} answers to {full!r} already; give the adapter another "
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
        """Plan the adapters of a model; return its workers and stand-ins, by name.

        Args:
          model: of which.
          named: that requests may name.
          loaded: that workers have once they are started anew.
          unnamed: that some workers have besides those that are named.
          sizes: of those that workers have, in one worker; None where they stay.
          refs: what settings say of an adapter that comes.
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
    """Return what adapters take in the memory of one worker of each kind."""
    found = {}
    for role, _ in own.counts:
        engine = replace(own.settings.worker(role).engine, adapters=adapters)
        found[role] = check_start(own.model_dir, engine).model.adapter_bytes
    return found


def _require_room(own: ModelPlan, adapter: AdapterConfig) -> None:
    """Look whether this machine has memory for one adapter more in each worker.

    Raises:
      ConfigError: it has not.
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
            f"and {show_size(free)} are free; unload others, or `triolet model sleep` a model"
        )

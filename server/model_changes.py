"""Adds, changes and removes models while the server runs, following the members file.

A new model's files are read in a thread; it gets requests once its links run. A removed model gets
no new requests, and its links close when its last request has ended.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog
import trio

from triolet.config import SEPARATOR
from triolet.errors import ConfigError, model_removed
from triolet.units import SECONDS

from .fleets import read_files
from .membership.members import MemberFile, by_model
from .rollouts.route_sources import RouteSources, lasting

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from triolet.config import ServedModelConfig, ServerConfig
    from triolet.config.members import Members
    from triolet.config.routes import Route
    from triolet.ids import Role

    from .api.served_models import ServedModel
    from .api.services import Services
    from .fleets import Fleets, ModelFiles
    from .scheduling.control_link import ControlLink
    from .scheduling.links import Links
    from .text.process import Do

    Use = Callable[[ServerConfig, ModelFiles, ServedModelConfig], Awaitable[None]]

log = structlog.get_logger(__name__)

LOOK_S: Final = 0.1 * SECONDS
"""How often to check whether the requests of an unloaded adapter have ended."""
UNREADABLE: Final = (ConfigError, OSError, ValueError, RecursionError)
"""Errors that one model's files can cause; they must not end the server of the other models."""


class _Life(NamedTuple):
    """A served model.

    Attributes:
      kind: its configuration without its workers.
      scope: cancels the tasks that run it.
    """

    kind: ServedModelConfig | None
    scope: trio.CancelScope


class ModelChanges:
    """Keeps a server's models in step with the members file.

    Args:
      services: holds the table of models to change.
      fleets: the workers of each model.
      nursery: runs the models' tasks.

    Attributes:
      refused: why models of the file could not be added, by name.
      link: the link to control, which receives changes; None without control.
      heard: set once control has told its routes.
    """

    def __init__(self, services: Services, fleets: Fleets, nursery: trio.Nursery) -> None:
        self.refused: dict[str, str] = {}
        self.link: ControlLink | None = None
        self.heard = trio.Event()
        self._services = services
        self._fleets = fleets
        self._nursery = nursery
        self._reading = trio.CapacityLimiter(1)
        self._served: dict[str, _Life] = {}
        self._wanted: dict[str, ServedModelConfig] | None = None
        max_ahead_s = services.config.routes.max_ahead_s
        self._sources = RouteSources(services.models.routes, max_ahead_s)
        self._is_expiring = False
        self._members: Mapping[str, Sequence[tuple[Role, str]]] = {}
        self._refused_kinds: dict[str, ServedModelConfig] = {}
        self._busy: set[str] = set()

    async def start(self) -> None:
        """Start the links of the models in the table."""
        told = {one.name: one for one in self._services.config.models}
        for name in list(self._fleets.by_model):
            await self._keep(name, kind_of(told[name]) if name in told else None)

    async def _keep(self, name: str, kind: ServedModelConfig | None) -> None:
        scope = await self._nursery.start(self._fleets.run, name)
        self._served[name] = _Life(kind, scope)

    def use(self, file: Members) -> None:
        """Switch to the models and workers of a members file.

        Raises:
          ConfigError: a member serves another model; nothing has changed.
        """
        self._members = by_model(file, list(self._fleets.by_model))
        if file.models is not None:
            self._wanted = {one.name: one for one in file.models}
        self._sources.of_file = file.routes
        self._change()

    def use_routes(self, routes: Mapping[str, Route]) -> None:
        """Use the routes of control, which go before those of the file. Permanent ones stay if it
        no longer names them, temporary ones do not."""
        self.heard.set()
        now = trio.current_time()
        if self._sources.hear(routes, self._services.wall(), now):
            self._change()
        if self._sources.temporary.valid(now) and not self._is_expiring:
            self._is_expiring = True
            self._nursery.start_soon(self._expire)

    async def _expire(self) -> None:
        """Go back to permanent routes when temporary ones expire, without a message of control."""
        temporary = self._sources.temporary
        while (ends_at := temporary.next_end(trio.current_time())) is not None:
            await trio.sleep_until(ends_at)
            self._change()
        self._is_expiring = False

    def _change(self) -> None:
        """Start the changes from the current to the wanted models. A model that is changing already
        is looked at again when that change ends."""
        wanted = self._wanted
        if wanted is not None:
            for name in [name for name in self.refused if name not in wanted]:
                del self.refused[name], self._refused_kinds[name]
            for name, one in wanted.items():
                life = self._served.get(name)
                was_refused = self._refused_kinds.get(name) == kind_of(one)
                if name in self._busy:
                    continue
                if life is None and not was_refused:
                    self._begin(name, partial(self._read, one, self._serve))
                elif life is not None and has_other_version(life, one) and not was_refused:
                    self._begin(name, partial(self._read, one, self._put))
                elif life is not None and has_other_adapters(life, one):
                    self._set_adapters(life, one)
                elif life is not None and life.kind == kind_of(one):
                    self._note_usable(name)
        try:
            self._use(self._usable_routes())
        except ConfigError as error:
            log.error("routes_refused", reason=f"{error}; the old routes stay")
            self._use(self._services.models.routes)
        for name, members in self._members.items():
            if name in self._served and name not in self._busy:
                self._fleets.by_model[name].set_members(members)

    def _usable_routes(self, *added: str) -> dict[str, Route]:
        """Return the ordered routes. See `RouteSources.usable`.

        Args:
          added: versions that the server is about to add.
        """
        models = self._services.models
        present = {one.version for one in models} | {*added}
        routes, refused = self._sources.usable(models.routes, present, trio.current_time())
        for one in refused:
            note = log.info if one.missing & self._busy else log.error
            note("route_refused", model=one.name, reason=f"{one.reason}; the old route stays")
        return routes

    def _use(self, routes: Mapping[str, Route], *added: ServedModel) -> None:
        """Update the table in one step: routes, added models and removed models.

        Raises:
          ConfigError: two models have one name; nothing has changed.
        """
        models = self._services.models
        before, leaving = models.routes, self._leaving(routes, len(models) + len(added) - 1)
        models.change(routes, *added, without=leaving, order=list(self._wanted or ()))
        self._fleets.know(routes)
        self._sources.note_used(routes)
        if lasting(routes) != lasting(before):
            revisions = {name: route.revision for name, route in routes.items()}
            log.info("routes_changed", revisions=revisions)
        for name in before.keys() - routes.keys():
            if not models.is_listed(name):
                self._services.kept.forget_model(name)
        for name in leaving:
            self._begin(name, partial(self._remove, name))

    def _leaving(self, routes: Mapping[str, Route], most: int) -> list[str]:
        """Return the models that are neither wanted nor named by a route.

        Args:
          routes: routes by public name.
          most: maximum number to return; the last model stays until another one is served.
        """
        if self._wanted is None:
            return []
        kept = {version for route in routes.values() for version in route.shares} | self._busy
        for name, told in self._wanted.items():
            life = self._served.get(name)
            if life and (
                life.kind == kind_of(told)
                or has_other_adapters(life, told)
                or has_other_version(life, told)
            ):
                kept.add(name)
        return [name for name in self._served if name not in kept][:most]

    def _set_adapters(self, life: _Life, told: ServedModelConfig) -> None:
        """Set the adapters that requests may name. Running requests continue."""
        name, links = told.name, self._fleets.by_model[told.name]
        before = () if life.kind is None else life.kind.adapters
        try:
            self._services.models.set_adapters(name, told.adapters)
        except ConfigError as error:
            log.error("adapters_refused", model=name, reason=str(error))
            return
        links.adapters.use(told.adapters, told.unnamed_adapters)
        self._served[name] = _Life(kind_of(told), life.scope)
        digests = {one.digest for one in told.adapters}
        names = {one.name for one in told.adapters}
        for one in before:
            full = f"{name}{SEPARATOR}{one.name}"
            if one.digest not in digests:
                self._nursery.start_soon(self._end_adapter, links, one.digest, full)
            if one.digest not in digests or one.name not in names:
                public = self._services.models.public_name_of(name)
                self._services.kept.forget_model(f"{public}{SEPARATOR}{one.name}")
        log.info("adapters_changed", model=name, adapters=[one.name for one in told.adapters])
        if self.link is not None:
            self.link.refresh()

    async def _end_adapter(self, links: Links, digest: str, full: str) -> None:
        """Let requests of an unloaded adapter finish within `drain_timeout_s`, then cancel the
        rest."""
        with trio.move_on_after(self._services.config.drain_timeout_s):
            while links.adapters.is_leaving(digest):  # noqa: ASYNC110 (requests set no event)
                await trio.sleep(LOOK_S)
        links.adapters.end(digest, full, trio.current_time())
        log.info("adapter_left", adapter=full, digest=digest)

    def _begin(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        self._busy.add(name)
        self._nursery.start_soon(self._do, name, work)

    async def _do(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        await work()
        self._busy.discard(name)
        if self.link is not None:
            self.link.refresh()
        self._change()

    async def _read(self, one: ServedModelConfig, use: Use) -> None:
        """Read a model's files and use them, or record why this failed."""
        # Workers are added later as members, so that one bad address is refused alone.
        alone = replace(one, prefill_addresses=(), decode_addresses=())
        [config] = replace(self._services.config, models=(alone,)).of_models
        try:
            files = await trio.to_thread.run_sync(
                read_files, config, self._services.do, limiter=self._reading
            )
            await use(config, files, kind_of(one))
        except UNREADABLE as error:
            log.error("model_refused", model=one.name, reason=str(error))
            self.refused[one.name], self._refused_kinds[one.name] = str(error), kind_of(one)
            return
        self._note_usable(one.name)

    def _note_usable(self, name: str) -> None:
        self.refused.pop(name, None)
        self._refused_kinds.pop(name, None)

    async def _put(self, config: ServerConfig, files: ModelFiles, kind: ServedModelConfig) -> None:
        """Switch a model to another version that the same workers serve. Running requests
        continue."""
        name = config.model_name
        life = self._served[name]
        assert life.kind is not None, "it has another version of what it was told to be"
        adapters, unnamed = life.kind.adapters, life.kind.unnamed_adapters  # others come after it
        config = replace(config, model_adapters=adapters, unnamed_adapters=unnamed)
        model = self._fleets.set_version(config, files)
        self._services.models.put(self._services.with_store(model))
        kind = replace(kind, adapters=adapters, unnamed_adapters=unnamed)
        self._served[name] = _Life(kind, life.scope)
        log.info("version_changed", model=name, digest=kind.digest)

    async def _serve(
        self, config: ServerConfig, files: ModelFiles, kind: ServedModelConfig
    ) -> None:
        name = config.model_name
        model = self._fleets.add(config, files, is_only=False)
        await self._keep(name, kind)
        try:
            self._use(self._usable_routes(name), self._services.with_store(model))
        except ConfigError:
            self._forget(name)
            raise
        log.info("model_added", model=name, digest=kind.digest)

    async def _remove(self, name: str) -> None:
        log.info("model_leaves", model=name)
        await self._fleets.by_model[name].drain(partial(model_removed, name))
        if not self._services.models.is_listed(name):  # a route's answers outlive its versions
            self._services.kept.forget_model(name)
        self._forget(name)
        self._fleets.know(self._services.models.routes)
        log.info("model_removed", model=name)

    def _forget(self, name: str) -> None:
        self._served.pop(name).scope.cancel()
        self._fleets.remove(name)


def kind_of(model: ServedModelConfig) -> ServedModelConfig:
    """Return a model's configuration without its workers."""
    return replace(model, prefill_addresses=(), decode_addresses=(), spare_addresses=())


def has_other_adapters(life: _Life, told: ServedModelConfig) -> bool:
    """Return whether the wanted model differs from the served one in its adapters only."""
    if life.kind is None or life.kind == kind_of(told):
        return False
    is_told = replace(told, adapters=(), unnamed_adapters=())
    return kind_of(replace(life.kind, adapters=(), unnamed_adapters=())) == kind_of(is_told)


def has_other_version(life: _Life, told: ServedModelConfig) -> bool:
    """Return whether the wanted model is another version that the same workers serve, with any
    adapters."""
    if life.kind is None or not told.compute_digest:
        return False
    own = replace(
        life.kind,
        model_dir=told.model_dir,
        digest=told.digest,
        adapters=told.adapters,
        unnamed_adapters=told.unnamed_adapters,
    )
    return life.kind.digest != told.digest and kind_of(own) == kind_of(told)


def read_models(
    config: ServerConfig, do: Do
) -> tuple[ServerConfig, dict[str, ModelFiles], frozenset[str], dict[str, Route]]:
    """Read the models that a server starts with: those of the members file, if an earlier process
    left one that names models, otherwise those of the settings.

    Args:
      config: the server's settings.
      do: runs slow text jobs.

    Returns:
      The configuration with these models; what was read for each, by name; the names of models left
      out; and the routes with all versions read.

    Raises:
      ConfigError: a model of the settings cannot be read, or no model can. A model that was added
        later and cannot be read is left out.
    """
    of_settings = {one.model_name for one in config.of_models}
    file = None
    if config.members_file is not None:
        try:
            file = MemberFile(config.members_file, config.members_poll_s).read()
        except ConfigError as error:
            log.error("members_refused", reason=str(error))
    if file is not None and file.models is not None:
        config = replace(config, models=file.models)
    files: dict[str, ModelFiles] = {}
    last = config.of_models[-1].model_name
    for one in config.of_models:
        try:
            files[one.model_name] = read_files(one, do)
        except UNREADABLE as error:
            is_only = not files and one.model_name == last
            if one.model_name in of_settings or is_only:
                raise
            log.error("model_refused", model=one.model_name, reason=str(error))
    kept = tuple(one for one in config.models if one.name in files)
    left_out = frozenset(one.name for one in config.models if one.name not in files)
    known = {} if file is None else file.routes
    routes = {name: route for name, route in known.items() if route.shares.keys() <= files.keys()}
    return replace(config, models=kept), files, left_out, routes

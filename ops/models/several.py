"""Splits the settings of a fleet into settings per model, and holds the models in the store while
they are served."""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from triolet.config import ReasoningParser, ToolParser
from triolet.errors import ConfigError

from .adapters import held_adapter, require_number, told
from .stored import with_stored_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from store.adapter_files import AdapterFiles
    from triolet.config import AdapterConfig

    from ..settings.form import Settings


def each_model(settings: Settings) -> list[Settings]:
    """Return the settings of each model of a fleet, in order.

    Each result contains only its own model in `models`, which is empty for an unnamed model.
    """
    if not settings.models:
        return [settings]
    fleet, server, found = settings.fleet, settings.server, []
    for name, model in settings.models.items():
        has_tools = model.tool_parser is not ToolParser.AUTO
        has_reasoning = model.reasoning_parser is not ReasoningParser.AUTO
        own_server = replace(
            server,
            model_name=name,
            model_aliases=model.aliases,
            tool_parser=model.tool_parser if has_tools else server.tool_parser,
            reasoning_parser=model.reasoning_parser if has_reasoning else server.reasoning_parser,
            default_deadline_s=min(server.default_deadline_s, model.deadline_s or math.inf),
        )
        own_fleet = replace(
            fleet,
            model=model.ref,
            prefill=fleet.prefill if model.prefill is None else model.prefill,
            decode=fleet.decode if model.decode is None else model.decode,
            adapters=model.adapters,
        )
        found.append(replace(settings, fleet=own_fleet, server=own_server, models={name: model}))
    return found


def name_of(settings: Settings) -> str:
    """Return the name of the model in the settings of one model; empty if it is unnamed."""
    return next(iter(settings.models), "")


class StoredModels:
    """The models of a fleet, each protected in the store until it is released.

    Attributes:
      settings: settings of each held model by name, with the model resolved to a directory.
    """

    def __init__(self) -> None:
        self.settings: dict[str, Settings] = {}
        self._held: dict[str, ExitStack] = {}
        self._adapters: dict[tuple[str, str], ExitStack] = {}

    def __iter__(self) -> Iterator[Settings]:
        return iter(self.settings.values())

    def hold(self, own: Settings, *, is_reference_only: bool = False) -> Settings:
        """Return the settings of a model with a version in the store resolved to a directory. Holds
        that version.

        Args:
          own: settings of one model.
          is_reference_only: accept only versions in the store, not paths.

        Raises:
          ConfigError: see `with_stored_model`; the text names the model.
        """
        name = name_of(own)
        with ExitStack() as held, naming(name):
            found = held.enter_context(with_stored_model(own, is_reference_only=is_reference_only))
            given = found.fleet.adapters
            require_number(found, len(given))
            configs, stacks = [], {}
            for one, ref in given.items():
                stacks[name, one] = held.enter_context(ExitStack())
                adapter = held_adapter(found, one, ref, is_reference_only=is_reference_only)
                configs.append(stacks[name, one].enter_context(adapter))
            self.settings[name] = told(found, named=tuple(configs), loaded=tuple(configs))
            self._adapters |= stacks
            self._held[name] = held.pop_all()
        return self.settings[name]

    def hold_adapter(
        self,
        model: str,
        name: str,
        ref: str,
        check: Callable[[AdapterFiles], None],
        *,
        is_reference_only: bool,
    ) -> AdapterConfig:
        """Check an adapter and hold its version in place of an earlier one of the same name.

        Args:
          model: name of a held model.
          name: name of the adapter.
          ref: its directory or version.
          check: raises ModelError if the adapter must not be served.
          is_reference_only: accept only a version in the store, not a path.

        Raises:
          ConfigError: the adapter is missing, damaged or unsupported; the text names both.
        """
        own = self.settings[model]
        with ExitStack() as held, naming(model):
            adapter = held.enter_context(
                held_adapter(own, name, ref, check, is_reference_only=is_reference_only)
            )
            self.release_adapter(model, name)
            self._adapters[model, name] = held.pop_all()
        return adapter

    def release_adapter(self, model: str, name: str) -> None:
        """Release an adapter, if it is held."""
        if (model, name) in self._adapters:
            self._adapters.pop((model, name)).close()

    def replace(self, name: str, other: str, settings: Settings) -> None:
        """Give a model the version that is held under another name. Its earlier version stays held,
        because running requests may read its files.

        Args:
          name: name of the model.
          other: name under which the version was held.
          settings: new settings of the model.
        """
        for model, adapter in list(self._adapters):
            if model == other:
                self.release_adapter(model, adapter)
        del self.settings[other]
        self._held[name].push(self._held.pop(other))
        self.settings[name] = settings

    def release(self, name: str) -> None:
        """Release a model, if it is held."""
        self.settings.pop(name, None)
        for model, adapter in list(self._adapters):
            if model == name:
                self.release_adapter(model, adapter)
        if name in self._held:
            self._held.pop(name).close()


@contextmanager
def with_stored_models(settings: Settings) -> Iterator[StoredModels]:
    """Hold each model of a fleet until the context ends.

    Args:
      settings: settings of a fleet.

    Raises:
      ConfigError: see `with_stored_model`; the text names the model.
    """
    stored = StoredModels()
    try:
        for own in each_model(settings):
            stored.hold(own)
        yield stored
    finally:
        for name in list(stored.settings):
            stored.release(name)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Prefix errors with the name of the model.

    Args:
      name: name of the model; empty for an unnamed model.
    """
    try:
        yield
    except ConfigError as error:
        if not name:
            raise
        raise ConfigError(f"model {name}: {error}") from error

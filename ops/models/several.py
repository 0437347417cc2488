"""The models of a fleet one by one: each as if it were the only one."""

from __future__ import annotations

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
    """Return the settings of a fleet as they are for each of its models, in order.

    Where models have names each result has its own one alone in `models`.
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
    """Return the name of the model of settings that are one model's; empty where it has none."""
    return next(iter(settings.models), "")


class StoredModels:
    """The models of a fleet, each of which stays in the store until it is released.

    Attributes:
      settings: for each model that is held, with a directory as the model, by its name.
    """

    def __init__(self) -> None:
        self.settings: dict[str, Settings] = {}
        self._held: dict[str, ExitStack] = {}
        self._adapters: dict[tuple[str, str], ExitStack] = {}

    def __iter__(self) -> Iterator[Settings]:
        return iter(self.settings.values())

    def hold(self, own: Settings, *, is_reference_only: bool = False) -> Settings:
        """Return the settings of a model with a directory as the model, also where a version of
        the store is named; that version is held from now on.

        Args:
          own: settings that are one model's.
          is_reference_only: the model and its adapters are versions of the store, no paths.

        Raises:
          ConfigError: as `with_stored_model`; the text names the model.
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
        """Return an adapter that is read, and whose version is held from now on. An earlier one of
        its name is held until then.

        Args:
          model: that is held.
          name: of the adapter.
          ref: its directory or version.
          check: raises ModelError where what was read is not to be served.
          is_reference_only: it is a version of the store, no path.

        Raises:
          ConfigError: it cannot be had, or asks for what is not served; the text names both.
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
        """Hold an adapter no more, if it is held."""
        if (model, name) in self._adapters:
            self._adapters.pop((model, name)).close()

    def replace(self, name: str, other: str, settings: Settings) -> None:
        """Let a model have the version that another name holds. Its earlier version is held too:
        requests that run may read its files.

        Args:
          name: of the model.
          other: the name under which the version was held.
          settings: of the model from now on.
        """
        for model, adapter in list(self._adapters):
            if model == other:
                self.release_adapter(model, adapter)
        del self.settings[other]
        self._held[name].push(self._held.pop(other))
        self.settings[name] = settings

    def release(self, name: str) -> None:
        """Hold a model no more, if it is held."""
        self.settings.pop(name, None)
        for model, adapter in list(self._adapters):
            if model == name:
                self.release_adapter(model, adapter)
        if name in self._held:
            self._held.pop(name).close()


@contextmanager
def with_stored_models(settings: Settings) -> Iterator[StoredModels]:
    """Hold each model of a fleet until the end.

    Args:
      settings: of a fleet.

    Raises:
      ConfigError: as `with_stored_model`; the text names the model.
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
    """Let errors about a model say which one it is.

    Args:
      name: of the model; empty where it is the only one and has none.
    """
    try:
        yield
    except ConfigError as error:
        if not name:
            raise
        raise ConfigError(f"model {name}: {error}") from error

"""The models of a fleet one by one: each as if it were the only one."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from triolet.config import ReasoningParser, ToolParser
from triolet.errors import ConfigError

from .adapters import with_adapters
from .stored import with_stored_model

if TYPE_CHECKING:
    from collections.abc import Iterator

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
            self.settings[name] = held.enter_context(
                with_adapters(found, is_reference_only=is_reference_only)
            )
            self._held[name] = held.pop_all()
        return self.settings[name]

    def release(self, name: str) -> None:
        """Hold a model no more, if it is held."""
        self.settings.pop(name, None)
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

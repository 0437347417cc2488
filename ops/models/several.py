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


@contextmanager
def with_stored_models(settings: Settings) -> Iterator[list[Settings]]:
    """Give the settings for each model with a directory as the model, also where versions of the
    store are named; these stay in the store until the end.

    Args:
      settings: of a fleet.

    Raises:
      ConfigError: as `with_stored_model`; the text names the model.
    """
    with ExitStack() as held:
        stored = []
        for own in each_model(settings):
            with naming(name_of(own)):
                found = held.enter_context(with_stored_model(own))
                stored.append(held.enter_context(with_adapters(found)))
        yield stored


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

"""The clients that are there: their imports, and a tool that several of them offer."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import Any

import pytest

from tests.end_to_end.scripted_model import Rule, tool_call
from tests.lazily import lazily

REASON = "{} is not installed: `make clients` installs it"
MODEL = "scripted"
QUESTION = "How is the weather in Rome?"
SUNNY = "It is sunny in Rome."
ADVICE = "Take a hat: it is sunny in Rome."
LOOP = (
    # Only with the whole conversation in the prompt does the model give its advice.
    Rule(SUNNY, ADVICE, shown=(QUESTION, "<tool_call>")),
    Rule(QUESTION, tool_call("get_weather", city="Rome"), shown=("<tools>", "get_weather")),
)
"""A question, the call of a tool that it leads to, and the answer that follows from its result."""


def get_weather(city: str) -> str:
    """Tell the weather of a city.

    Args:
        city: The city's name.
    """
    return f"It is sunny in {city}."


def needed_later(module: str, package: str = "") -> Any:  # noqa: ANN401
    """Return a client's module, imported with its first use; skip as `needed` does."""
    if find_spec(module) is None:
        pytest.skip(REASON.format(package or module), allow_module_level=True)
    return lazily(module)


def needed(module: str, package: str = "") -> Any:  # noqa: ANN401
    """Return a client's module; skip the tests of the file that asks where it is missing."""
    with warnings.catch_warnings():
        # What a client warns of at import is not about what it sends.
        warnings.simplefilter("ignore")
        return pytest.importorskip(module, reason=REASON.format(package or module))

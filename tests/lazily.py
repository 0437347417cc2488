"""Test helper that imports slow modules when they are first used, because few tests use them.

With several pytest processes, each imports every test file.
"""

from __future__ import annotations

import gc
import warnings
from importlib import import_module
from types import ModuleType
from typing import Any


class _Later(ModuleType):
    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name.startswith("__"):
            # pytest looks up a few of these on every object of a test file.
            raise AttributeError(name)
        return getattr(_import(self.__name__), name)


def lazily(name: str) -> Any:  # noqa: ANN401
    """Return a proxy that imports the module when an attribute is first used."""
    return _Later(name)


def _import(name: str) -> ModuleType:
    found = _imported.get(name)
    if found is None:
        gc.collect()
        gc.disable()  # see tests/conftest.py
        try:
            with warnings.catch_warnings():
                # A client's warnings at import are irrelevant to the test.
                warnings.simplefilter("ignore")
                found = _imported[name] = import_module(name)
        finally:
            gc.enable()
        gc.freeze()
    return found


_imported: dict[str, ModuleType] = {}

"""Modules that take a second to import and that few tests use, imported when one uses them.

Where several processes share the tests, each of them imports every test file.
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
            # pytest looks at every object of a test file for a few of these.
            raise AttributeError(name)
        return getattr(_import(self.__name__), name)


def lazily(name: str) -> Any:  # noqa: ANN401
    """Return what becomes a module with the first use of an attribute."""
    return _Later(name)


def _import(name: str) -> ModuleType:
    found = _imported.get(name)
    if found is None:
        gc.collect()
        gc.disable()  # as for what tests/conftest.py collects
        try:
            with warnings.catch_warnings():
                # What a client warns of at import is not about what it sends.
                warnings.simplefilter("ignore")
                found = _imported[name] = import_module(name)
        finally:
            gc.enable()
        gc.freeze()
    return found


_imported: dict[str, ModuleType] = {}

"""Tests that the product's imports and the dependencies in pyproject.toml match."""

from __future__ import annotations

import re
import sys
import tomllib
from functools import cache

from .test_layout import ROOMS, ROOT, imports_of, sources

IMPORT_NAMES = {
    "dnspython": "dns",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
    "prometheus-client": "prometheus_client",
    "quart-trio": "quart_trio",
    "flash-attn": "flash_attn",
    "websocket-client": "websocket",
}
"""Distributions with a module of another name."""

COMES_WITH = {"pydantic_core": "pydantic", "typing_extensions": "pydantic", "requests": "locust"}
"""Modules that are used as part of another library."""

NOT_THE_PRODUCT = ("loadtest/", "tools/")
"""Folders that run from a checkout with the extras installed."""


@cache
def declared(extra: str | None = None) -> frozenset[str]:
    """Return the modules of the runtime dependencies, or of one extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    names = [re.split(r"[^A-Za-z0-9_.-]", line)[0].lower() for line in lines]
    return frozenset(IMPORT_NAMES.get(name, name) for name in names)


def imported(*, of_product: bool) -> set[str]:
    """Return every third-party module that is imported."""
    modules = set()
    for path in sources(*ROOMS):
        is_product = not str(path.relative_to(ROOT)).startswith(NOT_THE_PRODUCT)
        if is_product == of_product:
            modules |= {module.split(".")[0] for _, module in imports_of(path)}
    third_party = modules - set(ROOMS) - set(sys.stdlib_module_names)
    return {COMES_WITH.get(module, module) for module in third_party}


def test_every_import_is_declared() -> None:
    known = declared() | declared("gpu") | declared("ray")
    assert imported(of_product=True) <= known


def test_every_runtime_dependency_is_used() -> None:
    assert declared() <= imported(of_product=True)


def test_what_runs_beside_the_product_is_declared_too() -> None:
    known = declared() | declared("loadtest") | declared("dev")
    assert imported(of_product=False) <= known

"""Fixtures and settings shared by all tests, and isolation between tests."""

from __future__ import annotations

import gc
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
import structlog
from hypothesis import HealthCheck, settings

from ops.own_process import spin_briefly

if TYPE_CHECKING:
    from collections.abc import Iterator

# Hypothesis examples have no deadline: a busy machine is not a bug. They are the same in every run,
# so that no change is rejected because of another one; use `pytest --hypothesis-profile=explore` to
# search for new ones.
UNHURRIED: Final = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("house", UNHURRIED, derandomize=True)
settings.register_profile("explore", UNHURRIED, max_examples=1000)
settings.register_profile("proofs", UNHURRIED, derandomize=True, max_examples=1000)
settings.load_profile("house")

# Several processes share the cores: a spinning thread takes CPU time from the others.
spin_briefly()

# Triton decides at its first import whether kernels are compiled or interpreted. Without an NVIDIA
# driver only the latter works.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

ONE_BROWSER: Final = "tests/server/page/"
"""Its files share one Chromium, and most of its tests one page."""
ONE_TREE: Final = "tests/house/"
"""Its files share one parsed tree of all sources."""
FLEETS: Final = ("shared_fleet", "scripted_fleet")
"""Session fixtures that start a whole fleet. If several processes share the tests, each runs in
only one of them, with all tests that use it."""

YOUNG: Final = 10_000
"""Objects allocated before the youngest generation is collected. Python's default of 700 cost a
twelfth of the tests' CPU time."""


def pytest_configure() -> None:
    """Relax garbage collection: collecting tests creates millions of objects, few of them
    garbage."""
    gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run proofs in full")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Divide tests among processes: the tests of a file or of one session fleet stay together, and
    tests marked as long run alone. The longest start first."""
    if not getattr(config.option, "loadgroup", False):
        return  # one process runs them all
    places: dict[str, int] = {}
    for item in items:
        file = item.nodeid.partition("::")[0]
        names = getattr(item, "fixturenames", ())
        fleets = [fleet for fleet in FLEETS if fleet in names]
        if fleets:
            group, place = fleets[0], 0
        elif any(mark.name == "long" for mark in item.own_markers):
            # xdist takes the text after the last bracket as a group's name.
            group, place = item.nodeid.replace("[", "(").replace("]", ")"), 1
        elif file.startswith(ONE_BROWSER):
            group, place = ONE_BROWSER, 1
        elif file.startswith(ONE_TREE):
            group, place = ONE_TREE, 1
        elif item.get_closest_marker("long"):
            group, place = file, 1
        else:
            group, place = file, 2
        item.add_marker(pytest.mark.xdist_group(group))
        places[item.nodeid] = place
    items.sort(key=lambda item: places[item.nodeid])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse to run without groups: each process would start each fleet."""
    # Collected items live to the end. Scanning them at each garbage collection took a third of the
    # tests' CPU time, and up to half a minute in tests that count what is left.
    gc.enable()
    gc.set_threshold(YOUNG)
    gc.collect()
    gc.freeze()
    if getattr(session.config.option, "loadgroup", False):
        apart = [item.nodeid for item in session.items if "@" not in item.nodeid]
        if apart:
            raise pytest.UsageError(f"pytest-xdist does not know the group of {apart[0]}")


@pytest.fixture(scope="session")
def whole(pytestconfig: pytest.Config) -> bool:
    """Return whether proofs run in full, as in `make proofs`, or in a short form."""
    return bool(pytestconfig.getoption("--whole"))


@pytest.fixture(scope="session", autouse=True)
def state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use separate state folders: no test writes to the user's audit log, or shares packed weights
    and GGUF caches with other runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trust no certificate authority except those a test names. Loading the system's takes each
    client 30 ms, and tests create thousands of clients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("authorities")))
        yield


@pytest.fixture(scope="module", autouse=True)
def what_others_left_is_looked_through_once() -> None:
    """Freeze objects that earlier files left, which live to the end: every later garbage
    collection, and each test that counts what is left, would scan them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """Restore the log configuration, which commands and campaigns change."""
    root, hook = logging.getLogger(), sys.excepthook
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    logging.captureWarnings(False)
    sys.excepthook = hook
    root.handlers[:] = handlers
    root.setLevel(level)

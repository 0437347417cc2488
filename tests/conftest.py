"""What all tests share, and what none may leave to the next."""

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

# Examples have no deadline of their own and may be slow to make: a busy machine is no bug. They are
# the same in every run, so that no change is refused for what another one did; a search for new
# ones says `pytest --hypothesis-profile=explore`.
UNHURRIED: Final = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("house", UNHURRIED, derandomize=True)
settings.register_profile("explore", UNHURRIED, max_examples=1000)
settings.register_profile("proofs", UNHURRIED, derandomize=True, max_examples=1000)
settings.load_profile("house")

# Several processes share the cores: a thread that spins takes them from another process's.
spin_briefly()

# Triton decides when it is first imported, by whomever, whether its kernels are compiled or
# interpreted. Without an NVIDIA driver only the latter can be.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

ONE_BROWSER: Final = "tests/server/page/"
"""Its files share one Chromium, and most of its tests one page."""
ONE_TREE: Final = "tests/house/"
"""Its files look at one parsed tree of all sources."""
FLEETS: Final = ("shared_fleet", "scripted_fleet")
"""Fixtures of a whole session. Where several processes share the tests, each of these is started in
one of them only: the tests that use it stay together."""

YOUNG: Final = 10_000
"""Objects that are made before the youngest are looked through. After each 700, as Python has it,
that took a twelfth of the CPU time of tests."""


def pytest_configure() -> None:
    """Collecting makes millions of objects, of which few are garbage."""
    gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run proofs in their whole form")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Divide tests among processes: a file stays together, and tests of one session fleet do; a
    test that is marked as long goes alone. What takes longest begins first."""
    if not getattr(config.option, "loadgroup", False):
        return  # one process has them all
    places: dict[str, int] = {}
    for item in items:
        file = item.nodeid.partition("::")[0]
        names = getattr(item, "fixturenames", ())
        fleets = [fleet for fleet in FLEETS if fleet in names]
        if fleets:
            group, place = fleets[0], 0
        elif any(mark.name == "long" for mark in item.own_markers):
            # xdist takes what comes after the last bracket for a group's name.
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
    """Refuse to run where groups are not kept: each process would start each fleet."""
    # What was collected stays to the end. Looked through at each collection of garbage it took a
    # third of the CPU time of tests, and up to half a minute of one that counts what is left.
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
    """Return whether proofs run in their whole form, as `make proofs` does, or in a short one."""
    return bool(pytestconfig.getoption("--whole"))


@pytest.fixture(scope="session", autouse=True)
def state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands record what they do and keep what they made; no test appends to the audit log of the
    user that runs it, or shares packed weights and read GGUF files with other runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test talks to another machine: its clients trust no authority but those it names. To read
    the system's takes each client 30 ms of a core, and tests make thousands of clients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("authorities")))
        yield


@pytest.fixture(scope="module", autouse=True)
def what_others_left_is_looked_through_once() -> None:
    """Modules loaded and fixtures made by one file stay to the end, as what was collected does:
    each further collection of garbage, and each test that counts what is left, would see it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """Commands and campaigns configure this process's logs; the next test must not find them so."""
    root, hook = logging.getLogger(), sys.excepthook
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    logging.captureWarnings(False)
    sys.excepthook = hook
    root.handlers[:] = handlers
    root.setLevel(level)

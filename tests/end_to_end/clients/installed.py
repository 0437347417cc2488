"""Helpers for tests of third-party clients: imports, programs, and a tool that several tests
use."""

from __future__ import annotations

import os
import signal
import subprocess
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.end_to_end.scripted_model import Rule, tool_call
from tests.lazily import lazily

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.end_to_end.fleet_process import FleetProcess

NODE: Final = Path(__file__).parents[3] / "build" / "clients" / "node" / "node_modules"
"""Directory of npm packages."""
PROGRAM_TIMEOUT_S: Final = 180.0
"""Timeout of an agent with a few answers on a busy machine."""
NOWHERE: Final = "http://127.0.0.1:9"
"""A proxy that does not exist, so that requests to other machines fail at once."""
REASON = "{} is not installed: `make clients` installs it"
PAGE: Final = "docs/CLIENTS.md"
MODEL = "scripted"
QUESTION = "How is the weather in Rome?"
SUNNY = "It is sunny in Rome."
ADVICE = "Take a hat: it is sunny in Rome."
LOOP = (
    # The model gives its advice only if the prompt contains the whole conversation.
    Rule(SUNNY, ADVICE, shown=(QUESTION, "<tool_call>")),
    Rule(QUESTION, tool_call("get_weather", city="Rome"), shown=("<tools>", "get_weather")),
)
"""A question, the resulting tool call, and the answer after the tool's result."""


def get_weather(city: str) -> str:
    """Tell the weather of a city.

    Args:
        city: The city's name.
    """
    return f"It is sunny in {city}."


def needed_later(module: str, package: str = "") -> Any:  # noqa: ANN401
    """Return a client's module, imported on first use; skip the tests like `needed`."""
    if find_spec(module) is None:
        pytest.skip(REASON.format(package or module), allow_module_level=True)
    return lazily(module)


def needed(module: str, package: str = "") -> Any:  # noqa: ANN401
    """Return a client's module; skip the calling file if it is not installed."""
    with warnings.catch_warnings():
        # Ignore a client's warnings at import.
        warnings.simplefilter("ignore")
        return pytest.importorskip(module, reason=REASON.format(package or module))


def here(text: str, fleet: FleetProcess) -> str:
    """Return the page's example with the fleet's address and model."""
    return text.replace("http://127.0.0.1:8000", fleet.url).replace("coder", MODEL)


def needed_program(name: str, package: str) -> Path:
    """Return the path of an npm program; skip the calling file if it is not installed."""
    program = NODE / ".bin" / name
    if not program.exists():
        pytest.skip(REASON.format(package), allow_module_level=True)
    return program


def run_agent(command: Sequence[str], directory: Path, **variables: str) -> str:
    """Run an agent, which must succeed, and return its output.

    Args:
        command: the program and its arguments.
        directory: has its working directory `work` and its home `home`.
        variables: its environment, to which only PATH is added.
    """
    work, home = directory / "work", directory / "home"
    for folder in (work, home):
        folder.mkdir(exist_ok=True)
    environment: Mapping[str, str] = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "HTTPS_PROXY": NOWHERE,
        "NO_PROXY": "127.0.0.1",
        **variables,
    }
    with subprocess.Popen(
        command,
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, complained = process.communicate(timeout=PROGRAM_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, printed[-4000:] + complained[-4000:]
    return printed.strip()

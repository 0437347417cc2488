"""The clients that are there: their imports and programs, and a tool that several of them offer."""

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
"""Where packages of npm are."""
PROGRAM_TIMEOUT_S: Final = 180.0
"""Of an agent with a few answers, on a busy machine."""
NOWHERE: Final = "http://127.0.0.1:9"
"""A proxy that is not there: what a program asks of other machines fails at once."""
REASON = "{} is not installed: `make clients` installs it"
PAGE: Final = "docs/CLIENTS.md"
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


def here(text: str, fleet: FleetProcess) -> str:
    """Return what the page shows, with a fleet and its model in place of those that it names."""
    return text.replace("http://127.0.0.1:8000", fleet.url).replace("coder", MODEL)


def needed_program(name: str, package: str) -> Path:
    """Return the path of a program of npm's; skip the tests of the file where it is missing."""
    program = NODE / ".bin" / name
    if not program.exists():
        pytest.skip(REASON.format(package), allow_module_level=True)
    return program


def run_agent(command: Sequence[str], directory: Path, **variables: str) -> str:
    """Return what an agent prints that works in a directory, and must end well.

    Args:
        command: the program and its arguments.
        directory: it works in its folder `work`, and has `home` for its own files.
        variables: of its environment, which has nothing else of this one's but where programs are.
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

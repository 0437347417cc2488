"""Tests of the output of benchmarks: each prints a description first and each figure as soon as it
is measured."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Never

import pytest
import trio

from loadtest.harness import campaign, report

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(
    set(re.findall(r"-m (loadtest[\w.]*)", (ROOT / "Makefile").read_text()))
    - {"loadtest.bench.model"}  # it measures nothing
)


class Announced(Exception):
    """Raised in place of printing the description."""


def announce(description: str | None) -> Never:
    raise Announced(description)


def measure(*_: object, **__: object) -> Never:
    raise AssertionError("measured before anything was printed")


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_benchmark_says_what_it_measures_before_it_begins(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = find_spec(name)
    assert spec is not None
    module = import_module(f"{name}.__main__" if spec.submodule_search_locations else name)
    for place in (module, campaign, report):
        monkeypatch.setattr(place, "announce", announce, raising=False)
    monkeypatch.setattr(subprocess, "Popen", measure)
    monkeypatch.setattr(trio, "run", measure)
    monkeypatch.setattr(sys, "argv", [name])
    takes_arguments = bool(inspect.signature(module.main).parameters)
    with pytest.raises(Announced) as announced:
        module.main(*([[]] if takes_arguments else []))
    assert str(announced.value) == module.__doc__


def test_lines_of_progress_do_not_wait_in_a_buffer() -> None:
    program = (
        "import os\n"
        "from loadtest.harness.progress import announce, progress\n"
        "announce('`python -m x`: how fast\\nit is.\\n\\nAnd more.')\n"
        "progress('a figure')\n"
        "os._exit(0)\n"  # exits without flushing buffers
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT)
    assert done.stdout.decode().splitlines() == ["`python -m x`: how fast it is.", "a figure"]

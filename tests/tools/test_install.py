"""Tests of tools/install.py: how pip's settings are passed to uv, and what an installation
prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.install import Untranslatable, constraints, environment, settings

PROGRAM = Path(__file__).parents[2] / "tools" / "install.py"

LISTING = r"""
:env:.find-links='/wheels /more'
global.extra-index-url='https://one.example/simple\nhttps://two.example/simple'
global.find-links='/else'
global.index-url='https://mirror.example/simple'
install.index-url='https://nearer.example/simple'
download.index-url='https://far.example/simple'
"""


def test_the_environment_goes_before_the_command_and_the_command_before_all() -> None:
    assert settings(LISTING) == {
        "find-links": "/wheels /more",
        "extra-index-url": "https://one.example/simple\nhttps://two.example/simple",
        "index-url": "https://nearer.example/simple",
    }


def test_lists_are_separated_as_uv_reads_them() -> None:
    assert environment(settings(LISTING)) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_INDEX": "https://one.example/simple https://two.example/simple",
        "UV_DEFAULT_INDEX": "https://nearer.example/simple",
    }


def test_a_setting_that_uv_would_not_get_is_not_lost() -> None:
    with pytest.raises(Untranslatable, match="no-binary"):
        environment({"no-binary": ":all:"})
    assert environment({"quiet": "1"}) == {"UV_INDEX_STRATEGY": "unsafe-best-match"}


PIP = """import os, sys
with open(os.environ["JOURNAL"], "a") as journal:
    print("pip", *sys.argv[1:], file=journal)
if sys.argv[-2:] == ["config", "list"]:
    print(os.environ["LISTING"])
"""
UV = """import os, sys
with open(os.environ["JOURNAL"], "a") as journal:
    print("uv", *sys.argv[1:], "in", os.environ.get("UV_FIND_LINKS"), file=journal)
sys.exit(int(os.environ["UV_ENDS_WITH"]))
"""


def installed(folder: Path, listing: str, uv_ends_with: int = 0) -> tuple[list[str], str]:
    """Install with a fake pip and a fake uv; return the commands that they got, and stderr."""
    for name, program in (("pip", PIP), ("uv", UV)):
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
        (folder / name / "__main__.py").write_text(program)
    told = {
        "PYTHONPATH": str(folder),
        "JOURNAL": str(folder / "journal"),
        "LISTING": listing,
        "UV_ENDS_WITH": str(uv_ends_with),
    }
    command = [sys.executable, str(PROGRAM), "--constraint", "ours.txt", "--editable", "."]
    done = subprocess.run(command, env=told, stderr=subprocess.PIPE, text=True, check=True)
    commands = (folder / "journal").read_text().replace(sys.executable, "PYTHON").splitlines()
    return [one.replace("--disable-pip-version-check ", "") for one in commands], done.stderr


CONSTRAINED = """global.constraint='/site.txt\\n/more.txt'
global.find-links='/wheels'"""


@pytest.mark.slow
def test_constraints_of_pip_add_to_those_of_the_command_and_uv_installs(tmp_path: Path) -> None:
    commands, _ = installed(tmp_path, CONSTRAINED)
    assert commands == [
        "pip config list",
        "pip install -qq uv>=0.9,<1",
        "uv pip install --python PYTHON --constraint /site.txt --constraint /more.txt "
        "--constraint ours.txt --editable . in /wheels",
    ]


@pytest.mark.slow
def test_pip_installs_where_uv_fails(tmp_path: Path) -> None:
    commands, told = installed(tmp_path, CONSTRAINED, uv_ends_with=2)
    assert commands[-1] == "pip install --no-compile --constraint ours.txt --editable ."
    assert "using pip instead" in told


@pytest.mark.slow
def test_an_installation_says_how_much_it_is_and_how_long_it_took(tmp_path: Path) -> None:
    _, told = installed(tmp_path, "")
    first, *_, last = told.splitlines()
    assert "76 packages" in first
    assert "up to 250 MB to download" in first
    assert re.fullmatch(r"Installed after \d+ s\.", last)


def test_constraints_in_the_environment_replace_those_of_the_files() -> None:
    listing = ":env:.constraint='/a.txt /b.txt'\nglobal.constraint='/site.txt'"
    assert constraints(settings(listing)) == ["--constraint", "/a.txt", "--constraint", "/b.txt"]
    assert constraints({}) == []

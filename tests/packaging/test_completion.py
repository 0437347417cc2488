"""Tests that the script of `triolet completion` completes commands, options and choices."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from ops.cli import main
from tests.house.test_layout import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable

TIMEOUT_S: Final = 60.0
PAGE: Final = ROOT / "docs" / "install.md"
DOCUMENTED: Final = re.compile(r"^## Shell completion\n\n```\n(.*?)^```", re.MULTILINE | re.DOTALL)
FIRST_TAB: Final = """
autoload -Uz compinit && compinit -u -D
source ~/.zshrc
print -r -- ${_comps[triolet]}
functions _triolet_completion
"""
INSTALLED: Final = Path(sys.executable).with_name("triolet")
ASKED: Final = {
    "ser": {"serve", "server"},
    "tenant list --ten": {"--tenants"},
    "serve --dtype ": {"auto", "float32", "bfloat16"},
}
BASH: Final = """
source <(triolet completion bash)
complete -p triolet
while IFS= read -r line; do
  read -ra COMP_WORDS <<<"triolet $line"
  [[ $line == *' ' ]] && COMP_WORDS+=("")
  COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
  _triolet_completion triolet
  echo "${COMPREPLY[*]}"
done
"""
ZSH: Final = """
compdef() { print -r -- "$@" }
_arguments() { print -r -- "$@" | tr -d '\\n'; print }
source <(triolet completion zsh)
while IFS= read -r line; do
  words=(triolet ${=line})
  [[ $line == *' ' ]] && words+=("")
  CURRENT=${#words}
  _triolet_completion
done
"""


def answers(asked: Iterable[str], *shell: str) -> list[str]:
    """Run a shell's script with the installed command on typed text."""
    lines = "".join(f"{line}\n" for line in asked)
    if shutil.which(shell[0]) is None:
        pytest.skip(f"{shell[0]} is not installed")
    done = subprocess.run(
        shell,
        env=os.environ | {"PATH": f"{INSTALLED.parent}{os.pathsep}{os.environ['PATH']}"},
        input=lines,
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    registered, *said = done.stdout.splitlines()
    assert "_triolet_completion" in registered
    assert registered.endswith("triolet")
    assert len(said) == lines.count("\n"), done.stderr
    return said


@pytest.mark.slow
def test_bash_completes_commands_options_and_choices() -> None:
    said = answers(ASKED, "bash", "--norc", "-c", BASH)
    assert [set(line.split()) for line in said] == list(ASKED.values())


@pytest.mark.slow
def test_zsh_completes_choices() -> None:
    [typed] = [line for line in ASKED if "--dtype" in line]
    [said] = answers([typed], "zsh", "-f", "-c", ZSH)
    assert all(f'"{word}"' in said for word in ASKED[typed]), said


@pytest.mark.slow
def test_what_the_page_shows_installs_completion_for_the_first_tab(tmp_path: Path) -> None:
    block = DOCUMENTED.search(PAGE.read_text(encoding="utf-8"))
    assert block is not None
    path = f"{INSTALLED.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(tmp_path)}
    subprocess.run(
        ["bash", "--norc", "-ec", block[1]], env=environment, check=True, timeout=TIMEOUT_S
    )
    for name in (".local/share/bash-completion/completions/triolet", ".config/fish/completions"):
        assert (tmp_path / name).exists()
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    done = subprocess.run(
        ["zsh", "-f", "-c", FIRST_TAB],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    registered, *defined = done.stdout.splitlines()
    assert registered == "_triolet_completion", done.stderr
    assert any("_TRIOLET_COMPLETE" in line for line in defined)


def test_another_shell_is_refused_with_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err

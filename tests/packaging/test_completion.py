"""What `triolet completion` prints lets a shell complete commands, options and choices."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from ops.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterable

TIMEOUT_S: Final = 60.0
INSTALLED: Final = Path(sys.executable).with_name("triolet")
ASKED: Final = {
    "ser": {"serve", "server"},
    "tenant list --ten": {"--tenants"},
    "serve --dtype ": {"float32", "bfloat16"},
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
    """Run a shell's script, with the installed command, on what is typed."""
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


def test_another_shell_is_refused_with_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err

"""Child processes that take lines of JSON on stdin and answer on stdout."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT: Final = Path(__file__).parents[2]
END_S: Final = 5.0
"""A process that has not exited this long after the request is killed."""


class LineProcess:
    """A child process; a context manager.

    Args:
      command: program and arguments.
      environment: environment variables; None for those of this process.
      log: file for its stderr; None for the stderr of this process.
      popen: starts the process.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        log: IO[str] | None = None,
        popen: type[subprocess.Popen[Any]] = subprocess.Popen,
    ) -> None:
        self._process: subprocess.Popen[str] = popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BrokenPipeError):
            self._stdin.close()
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()

    def tell(self, **request: object) -> None:
        """Send a request.

        Raises:
          EOFError: the process has exited.
        """
        try:
            self._stdin.write(json.dumps(request) + "\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise EOFError("the process has exited; see its output") from None

    def answer(self) -> dict[str, Any]:
        """Wait for the next answer.

        Raises:
          EOFError: the process has exited.
        """
        if not (line := self._stdout.readline()):
            raise EOFError("the process has exited; see its output")
        said: dict[str, Any] = json.loads(line)
        return said

    def ask(self, **request: object) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        self.tell(**request)
        return self.answer()


def say(message: Mapping[str, Any]) -> None:
    """Write one answer. For use in the child process."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def cpu_s() -> float:
    """Return the user and system CPU time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

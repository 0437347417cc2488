"""A text process: parses, renders, tokenizes and compiles for the server (see processes.py).

In the server, this work would block all streams: only one thread runs Python at a time, and a C
function keeps the interpreter lock until it returns.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from triolet.errors import RequestError

from .pieces import PIECE_BYTES, Reader, pieces_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_Work = TypeVar("_Work", bound=Callable[..., Any])
T = TypeVar("T")
Work: TypeAlias = tuple[Callable[..., object], tuple[object, ...]]
"""A job and its arguments."""

NICENESS: Final = 10
"""Lower priority than the server (0) and workers (5): a long prompt may wait, tokens may not. With
all cores busy, a process still gets a quarter of one."""


class Kind(IntEnum):
    """The result of a job."""

    DONE = 0
    REFUSED = 1
    FAILED = 2


Outcome: TypeAlias = tuple[Kind, Any]
"""The kind, with the job's result, the arguments of its RequestError, or the traceback of any other
error."""


JOBS: Final[dict[str, Callable[..., Any]]] = {}
"""All jobs by name: those of the imported modules."""


def job(work: _Work) -> _Work:
    """Register a function as a job. Its arguments and result must be packable by pieces.py."""
    assert work.__name__ not in JOBS, "job names must be unique"
    JOBS[work.__name__] = work
    return work


class Do(Protocol):
    """Runs work that may take long."""

    async def __call__(self, work: Callable[..., T], *args: object, param: str | None = None) -> T:
        """Return the result of `work(*args)`.

        Args:
          work: a job.
          args: its arguments, plain values.
          param: the request field that errors name.

        Raises:
          RequestError: as `work` does; 400 if it takes too long; 429 or 503 if too many jobs wait;
            503 if the process ends.
        """


async def at_once(work: Callable[..., T], *args: object, param: str | None = None) -> T:
    """Run work in place, for programs without streams that it could block."""
    del param
    return work(*args)


@job
def stand_back() -> None:
    """Lower this process's priority."""
    # Where Linux groups processes by session, niceness applies only within a session, and each
    # group has its own.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICENESS))
    os.nice(NICENESS)


def main() -> None:
    """Run jobs from stdin until it ends."""
    # Other output on stdout would be taken for a result.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    reader = Reader()
    while data := os.read(sys.stdin.fileno(), PIECE_BYTES):
        asked = reader.feed(data)
        if asked is not None:
            name, *args = asked
            answers.writelines(pieces_of(outcome_of(JOBS[name], args)))
            answers.flush()


def outcome_of(work: Callable[..., Any], args: Sequence[object]) -> Outcome:
    """Run a job and return its outcome."""
    try:
        return Kind.DONE, work(*args)
    except RequestError as error:
        return Kind.REFUSED, error.said
    except Exception:  # noqa: BLE001 (the server raises it again)
        return Kind.FAILED, traceback.format_exc()

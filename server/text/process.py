"""The process beside the server that parses, renders, tokenises and compiles (processes.py).

In the server this work would hold up every stream of every client: one thread at a time holds the
interpreter's lock, and a C function keeps it until it returns.
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
"""A job and what it is given."""

NICENESS: Final = 10
"""Below the server (0) and workers (5): a long prompt may wait, tokens may not. With every core
busy a process still gets a quarter of one."""


class Kind(IntEnum):
    """What became of a job."""

    DONE = 0
    REFUSED = 1
    FAILED = 2


Outcome: TypeAlias = tuple[Kind, Any]
"""What became of a job, and what it returned; the arguments of its RequestError; or the traceback
of any other error."""


JOBS: Final[dict[str, Callable[..., Any]]] = {}
"""The functions that a process does, by name: those of the modules that it imports."""


def job(work: _Work) -> _Work:
    """Register a function as a job. Its arguments and its result are what pieces.py can pack."""
    assert work.__name__ not in JOBS, "names are unique"
    JOBS[work.__name__] = work
    return work


class Do(Protocol):
    """How work that may take long is done."""

    async def __call__(self, work: Callable[..., T], *args: object, param: str | None = None) -> T:
        """Return what `work(*args)` returns.

        Args:
          work: a job.
          args: what it is given, plain values.
          param: the request field that an error names.

        Raises:
          RequestError: as `work` does; 400 if that takes too long; 429 or 503 if too much waits;
            503 if the process ends.
        """


async def at_once(work: Callable[..., T], *args: object, param: str | None = None) -> T:
    """Do work in place, for programs without streams that it could hold up."""
    del param
    return work(*args)


@job
def stand_back() -> None:
    """Give way to the server and to workers from now on."""
    # Where Linux groups processes by sessions, niceness counts within one session only, and each
    # group has one of its own.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICENESS))
    os.nice(NICENESS)


def main() -> None:
    """Do what is asked on stdin until that ends."""
    # Whatever else prints would be taken for an answer.
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
    """Do a job."""
    try:
        return Kind.DONE, work(*args)
    except RequestError as error:
        return Kind.REFUSED, error.said
    except Exception:  # noqa: BLE001 (whatever it is, the server raises it)
        return Kind.FAILED, traceback.format_exc()

"""Manages the text processes, which run work that would block the server's streams.

Parsing large bodies, rendering conversations, tokenizing and compiling grammars are jobs: a
function name and arguments, sent in pieces (pieces.py) to a process that has loaded the models'
tokenizers (process.py). Clients are scheduled fairly by the time that their jobs took (turns.py). A
process that does not answer in time is killed and replaced.

Callers do small work in place, since sending it would take longer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from triolet.errors import RequestError, invalid_request, overloaded

from .pieces import PIECE_BYTES, Reader, pieces_of
from .process import JOBS, Kind, Outcome, T, Work, stand_back
from .turns import RETRY_S, Turns, join_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from triolet.config import ServerConfig

log = structlog.get_logger(__name__)

PROGRAM: Final = "server.text_process"
"""The program of a text process, with all jobs."""
RESTART_S: Final = 0.5
"""Time between the end of a process and the start of the next."""
WAITING: Final = "texts are waiting to be parsed, rendered or tokenized"


class _Task:
    """A job, with the request that waits for it.

    Attributes:
      work: the function.
      args: its arguments.
      is_over: set when it has run, or its process has ended.
      is_late: whether it took too long.
      outcome: its outcome; None if it did not run.
    """

    def __init__(self, work: Callable[..., Any], args: tuple[object, ...]) -> None:
        self.work = work
        self.args = args
        self.is_over = trio.Event()
        self.is_late = False
        self.outcome: Outcome | None = None


class TextProcesses:
    """The text processes and their queue.

    Args:
      config: number of processes, and limits.

    Attributes:
      turns: the queue.
      first: jobs that each process runs first, so that no client waits for imports and for loading
        a model.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.turns: Turns[_Task] = Turns(config.text_processes, config.turns)
        self.first: Sequence[Work] = ()
        self._count = config.text_processes
        self._timeout_s = config.text_timeout_s
        self._start_s = config.text_start_s
        self._has_changed = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the processes until cancelled."""
        task_status.started()
        async with trio.open_nursery() as nursery:
            for _ in range(self._count):
                nursery.start_soon(self._keep)

    async def do(self, work: Callable[..., T], *args: object, param: str | None = None) -> T:
        """Run a job in a text process; see `Do`."""
        task = _Task(work, args)
        job = join_line(self.turns, task, WAITING)
        self._change()
        try:
            with trio.move_on_after(self._timeout_s):
                await task.is_over.wait()
        finally:
            if job.began_at is None:
                self.turns.leave(job)
        if task.outcome is None:
            now = trio.current_time()
            is_over = task.is_over.is_set()
            # Report the input as too long only if most of the time was spent on the work, not
            # waiting.
            worked_s = 0.0 if job.began_at is None else now - job.began_at
            if task.is_late or (not is_over and worked_s > self._timeout_s / 2):
                raise invalid_request(
                    f"{param or 'the body'} takes longer than {self._timeout_s:g} s to read; "
                    "shorten it",
                    param,
                )
            reason = "a text process has ended" if is_over else f"too many {WAITING}"
            raise overloaded(reason, RETRY_S)
        kind, value = task.outcome
        if kind is Kind.REFUSED:
            raise RequestError(**value)
        if kind is Kind.FAILED:
            raise RuntimeError(f"a text process failed:\n{value}")
        result: T = value
        return result

    def _change(self) -> None:
        self._has_changed.set()
        self._has_changed = trio.Event()

    async def _keep(self) -> None:
        # While the server starts there are no streams yet that this could block.
        works = [*self.first, (stand_back, ())]
        while True:
            try:
                await self._serve(works)
            except OSError as error:
                log.warning("text_process_failed", error=str(error))
            works = [(stand_back, ()), *self.first]
            await trio.sleep(RESTART_S)

    async def _serve(self, works: Sequence[Work]) -> None:
        """Start a process and send it its first jobs, then others until it ends or does not
        answer."""
        process = await trio.lowlevel.open_process(
            [sys.executable, "-P", "-m", PROGRAM],  # -P: do not import from the current directory
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C must reach only the server
            # The tokenizer's threads would not survive the forks for grammars.
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
        try:
            is_good = True
            for one in works:
                is_good = is_good and await self._ask(process, self._start_s, _Task(*one))
            if is_good:
                await self._work(partial(self._ask, process, self._timeout_s))
            log.warning("text_process_silent")
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()

    async def _work(self, ask: Callable[[_Task], Awaitable[bool]]) -> None:
        """Send jobs to a process in turn, while it can accept the next."""
        is_good = True
        while is_good:
            while (job := self.turns.begin(trio.current_time())) is None:
                await self._has_changed.wait()
            try:
                is_good = await ask(job.item)
            finally:
                self.turns.end(job, trio.current_time())
                job.item.is_over.set()
                self._change()

    async def _ask(self, process: trio.Process, timeout_s: float, task: _Task) -> bool:
        """Run a job in a process; return whether it can accept the next."""
        assert process.stdin is not None
        assert process.stdout is not None
        assert task.work.__name__ in JOBS, "not a registered job"
        broken = trio.BrokenResourceError, ValueError
        with trio.move_on_after(timeout_s) as scope, suppress(*broken):
            for piece in pieces_of((task.work.__name__, *task.args)):
                await process.stdin.send_all(piece)
            task.outcome = await _received(process.stdout)
        task.is_late = scope.cancelled_caught
        return task.outcome is not None


async def _received(stream: trio.abc.ReceiveStream) -> Outcome | None:
    """Return one result; None if the stream ends first."""
    reader = Reader()
    while data := await stream.receive_some(PIECE_BYTES):
        answer = reader.feed(data)
        if answer is not None:
            kind, value = answer
            return Kind(kind), value
    return None

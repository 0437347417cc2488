"""Says whether a grammar can be used, before a request that carries it is queued.

A process beside the server compiles grammars and may be killed (grammar_process.py); here every
stream of every client would wait for it. Clients
take turns by the seconds that their grammars have taken.
"""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
import trio

from triolet.errors import RequestError, invalid_request, overloaded

from .grammar_process import LENGTH, MAX_ANSWER_BYTES, Answer, question
from .threads import Job, Turns, current_line, join_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from triolet.config import GrammarConfig
    from triolet.sampling import Grammar


log = structlog.get_logger()

RESTART_S: Final = 0.5
"""Between the end of a process and the start of the next."""
UNREACHABLE: Final = "no grammar can be checked at the moment"
WAITING: Final = "grammars wait to be compiled"


class _Question:
    """A grammar, and requests of one key that wait for what becomes of it."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.job: Job[_Question] | None = None
        self.num_askers = 0
        self.answered = trio.Event()
        self.answer: tuple[Answer, str] | None = None

    def take(self, answer: tuple[Answer, str] | None) -> None:
        self.answer = answer
        self.answered.set()


class Grammars:
    """Asks the process, one question at a time, and remembers its answers.

    Requests with the same grammar at the same time are one question.

    Args:
      tokenizer_path: the model's tokenizer.json.
      eos_token_ids: the model's end tokens.
      config: bounds.
      count: told of each answer by a word.
      starts_at_once: whether the process starts at once, not with the first question.

    Attributes:
      turns: of the questions.
    """

    def __init__(
        self,
        tokenizer_path: Path,
        eos_token_ids: tuple[int, ...],
        config: GrammarConfig,
        count: Callable[[str], None] = lambda word: None,
        *,
        starts_at_once: bool = True,
    ) -> None:
        self._command = [
            sys.executable,
            "-P",  # not what lies in the current directory
            "-m",
            "server.text.grammar_process",
            str(tokenizer_path),
            msgspec.json.encode(eos_token_ids).decode(),
            msgspec.json.encode(config).decode(),
        ]
        self._config = config
        self._count = count
        self._starts_at_once = starts_at_once
        self.turns: Turns[_Question] = Turns(1, config.turns)
        self._has_questions = trio.Event()
        self._open: dict[tuple[str, Grammar], _Question] = {}
        self._remembered: OrderedDict[Grammar, tuple[Answer, str]] = OrderedDict()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the process until cancelled."""
        task_status.started()
        if not self._starts_at_once:
            await self._has_questions.wait()
        while True:
            try:
                await self._serve()
            except OSError as error:
                log.warning("grammar_process_failed", error=str(error))
            await trio.sleep(RESTART_S)

    async def check(self, grammar: Grammar, param: str) -> None:
        """Return if a grammar can be used.

        Raises:
          RequestError: 400 that names `param`; 503 if too many wait.
        """
        answer = self._remembered.get(grammar)
        if answer is None:
            answer = await self._ask(grammar)
        verdict, message = answer
        self._count(verdict.name.lower())
        if verdict is Answer.REFUSED:
            raise invalid_request(f"cannot be used: {message}", param)
        if verdict is Answer.TOO_COSTLY:
            most_ms = self._config.cpu_s * 1000
            reason = message or f"takes more than {most_ms:g} ms to compile or to follow"
            raise invalid_request(f"{reason}; make it simpler", param)

    async def _ask(self, grammar: Grammar) -> tuple[Answer, str]:
        # One question of each key: one that is shared by two keys would end with its first asker.
        name = (current_line(), grammar)
        asked = self._open.get(name)
        if asked is None:
            asked = self._open[name] = self._queued(grammar)
        asked.num_askers += 1
        try:
            with trio.move_on_after(self._config.wait_s):
                await asked.answered.wait()
        finally:
            asked.num_askers -= 1
            if not asked.num_askers:
                self._forget(name, asked)
        if asked.answer is None:
            raise self._overloaded(UNREACHABLE)
        return asked.answer

    def _queued(self, grammar: Grammar) -> _Question:
        asked = _Question(grammar)
        try:
            asked.job = join_line(self.turns, asked, WAITING)
        except RequestError:
            self._count("overloaded")
            raise
        self._has_questions.set()
        return asked

    def _forget(self, name: tuple[str, Grammar], asked: _Question) -> None:
        """Drop a question without waiting requests; the process may be at it."""
        del self._open[name]
        if asked.job is not None and asked.job.began_at is None:
            self.turns.leave(asked.job)

    def _overloaded(self, message: str) -> RequestError:
        self._count("overloaded")
        return overloaded(message, retry_after_s=1.0)

    async def _serve(self) -> None:
        """Start a process and ask it until it ends or does not answer."""
        process = await trio.lowlevel.open_process(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            is_good = True
            while is_good:
                job = await self._next()
                try:
                    is_good = await self._ask_process(process, job.item)
                finally:
                    self.turns.end(job, trio.current_time())
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()

    async def _next(self) -> Job[_Question]:
        while (job := self.turns.begin(trio.current_time())) is None:
            self._has_questions = trio.Event()
            await self._has_questions.wait()
        return job

    async def _ask_process(self, process: trio.Process, asked: _Question) -> bool:
        """Have one question answered; return whether the process is still good for the next."""
        assert process.stdin is not None
        assert process.stdout is not None
        answer = b""
        with trio.move_on_after(self._config.wait_s), suppress(trio.BrokenResourceError):
            await process.stdin.send_all(question(asked.grammar))
            answer = await _receive(process.stdout)
        if not answer:
            log.warning("grammar_process_silent")
            asked.take(None)
            return False
        verdict = (Answer(answer[0]), answer[1:].decode(errors="replace"))
        # Also where no request waits any more: one that comes again costs the process nothing.
        self._remembered[asked.grammar] = verdict
        while len(self._remembered) > self._config.max_remembered:
            self._remembered.popitem(last=False)
        asked.take(verdict)
        return True


async def _receive(stream: trio.abc.ReceiveStream) -> bytes:
    """Return one answer; nothing if the stream ends before."""
    received = bytearray()
    length = LENGTH.size
    while len(received) < length:
        data = await stream.receive_some(LENGTH.size + MAX_ANSWER_BYTES)
        if not data:
            return b""
        received += data
        if len(received) >= LENGTH.size:
            length = LENGTH.size + LENGTH.unpack_from(received)[0]
    return bytes(received[LENGTH.size :])

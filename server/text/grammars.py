"""Checks whether a grammar can be used before its request is queued, and caches the results.

The check compiles it in a child of a text process (grammar_check.py), because compiling in the
server would block all streams.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec
import trio

from triolet.errors import RequestError, invalid_request
from triolet.sampling import Grammar, GrammarKind

from .grammar_check import GrammarAnswer, check_grammar
from .turns import current_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from triolet.config import GrammarConfig

    from .process import Do, Work


class Grammars:
    """Checks grammars and caches the results.

    Concurrent requests of one client with the same grammar share one check.

    Args:
      tokenizer_path: the model's tokenizer.json.
      eos_token_ids: the model's end tokens.
      config: limits.
      do: runs slow jobs.
      count: called with the result of each check.
    """

    def __init__(
        self,
        tokenizer_path: Path,
        eos_token_ids: tuple[int, ...],
        config: GrammarConfig,
        do: Do,
        count: Callable[[str], None] = lambda word: None,
    ) -> None:
        # Another model may replace this one in its directory, but processes cache what they have
        # read.
        life = secrets.token_hex(8)
        path, bounds = str(tokenizer_path), msgspec.to_builtins(config)
        self._model = path, life, eos_token_ids, bounds
        self._config = config
        self._do = do
        self._count = count
        self._asking: dict[tuple[str, Grammar], trio.Lock] = {}
        self._remembered: OrderedDict[Grammar, tuple[GrammarAnswer, str]] = OrderedDict()

    @property
    def first_work(self) -> Work:
        """The job that makes a text process load the tokenizer."""
        return check_grammar, (*self._model, GrammarKind.REGEX.value, "a")

    async def check(self, grammar: Grammar, param: str) -> None:
        """Return if a grammar can be used.

        Raises:
          RequestError: 400 that names `param`; 429 or 503 if too many checks wait.
        """
        answer = self._remembered.get(grammar)
        if answer is None:
            answer = await self._ask(grammar, param)
        verdict, message = answer
        self._count(verdict.name.lower())
        if verdict is GrammarAnswer.REFUSED:
            raise invalid_request(f"cannot be used: {message}", param)
        if verdict is GrammarAnswer.TOO_COSTLY:
            most_ms = self._config.cpu_s * 1000
            reason = message or f"takes more than {most_ms:g} ms to compile or to follow"
            raise invalid_request(f"{reason}; make it simpler", param)

    async def _ask(self, grammar: Grammar, param: str) -> tuple[GrammarAnswer, str]:
        # Share a check only within one key: it ends with the request that started it.
        name = (current_line(), grammar)
        lock = self._asking.setdefault(name, trio.Lock())
        try:
            async with lock:
                if grammar in self._remembered:
                    return self._remembered[grammar]
                verdict, message = await self._do(
                    check_grammar, *self._model, grammar.kind.value, grammar.text, param=param
                )
        except RequestError:
            self._count("overloaded")
            raise
        finally:
            if not lock.statistics().tasks_waiting:
                self._asking.pop(name, None)
        answer = self._remembered[grammar] = GrammarAnswer(verdict), message
        while len(self._remembered) > self._config.max_remembered:
            self._remembered.popitem(last=False)
        return answer

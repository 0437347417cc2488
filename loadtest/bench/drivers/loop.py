"""The request loop of a benchmark's engine process: lines of JSON on stdin, answers on stdout.

Uses only the standard library, because an engine may run in its own environment. Requests are
{"begin": {"batch", "context", "most_steps"}}, then any number of {"steps": n}, then {"end": true}.
Engines can then take turns at decoding while each keeps its sequences, and no prompt is computed
twice. {"parts": true} returns how the time of the steps was spent.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_TOKEN, LAST_TOKEN = 10, 2000
"""Ids that every tokenizer here has. None of them ends a sequence."""


class Session(Protocol):
    """A loaded engine."""

    def begin(self, prompts: list[list[int]], most_steps: int) -> None:
        """Compute prompts of equal length up to each one's first token, greedily.

        At most `most_steps` decode steps will follow.
        """
        ...

    def step(self) -> None:
        """Compute the next token of each sequence."""
        ...

    def end(self) -> None:
        """Drop all sequences."""
        ...


@runtime_checkable
class TimedSession(Session, Protocol):
    """A session that can report how its time was spent."""

    def parts(self) -> dict[str, float]:
        """Return the seconds spent in each part since the last call."""
        ...


def driver_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all drivers."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    return parser


def prompts_of(batch: int, context: int) -> list[list[int]]:
    """Return random prompts, the same for every engine, without common prefixes."""
    numbers = random.Random(batch * 100_003 + context)
    return [
        [numbers.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(context)] for _ in range(batch)
    ]


def answer_requests(open_session: Callable[[], tuple[Session, str]]) -> None:
    """Load an engine, print its version, and answer requests until stdin ends.

    Output of the engine itself goes to stderr.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    session, version = open_session()
    _say(answers, {"version": version})
    for line in sys.stdin:
        _say(answers, _answer(session, json.loads(line)))


def _answer(session: Session, request: dict[str, Any]) -> dict[str, object]:
    if "begin" in request:
        asked = request["begin"]
        prompts = prompts_of(asked["batch"], asked["context"])
        return {"prefill_s": _timed(lambda: session.begin(prompts, asked["most_steps"]))}
    if "parts" in request:
        return {"parts": session.parts() if isinstance(session, TimedSession) else {}}
    if "steps" in request:
        return {"step_s": [_timed(session.step) for _ in range(request["steps"])]}
    session.end()
    return {}


def _timed(call: Callable[[], None]) -> float:
    began_at = perf_counter()
    call()
    return perf_counter() - began_at


def _say(answers: object, message: dict[str, object]) -> None:
    print(json.dumps(message), file=answers, flush=True)  # type: ignore[call-overload]

"""The peers' side of a benchmark: one process per engine, asked by lines of JSON on stdin.

Only the standard library is used, for a peer may live in an environment of its own. The asker says
{"batch", "context", "steps"}; the peer computes prompts of that many tokens and then that many
decode steps, and says how long the prompts and each step took.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_TOKEN, LAST_TOKEN = 10, 2000
"""Ids that every tokenizer here knows, and none that ends a sequence."""


class Session(Protocol):
    """A loaded engine."""

    def run(self, prompts: list[list[int]], steps: int) -> tuple[float, list[float]]:
        """Compute prompts with their first tokens, then decode steps of all of them, greedily.

        Returns:
          Seconds that the prompts took, and each step.
        """
        ...


def prompts_of(batch: int, context: int) -> list[list[int]]:
    """Return the same random prompts to every peer, no two with a common beginning."""
    numbers = random.Random(batch * 100_003 + context)
    return [
        [numbers.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(context)] for _ in range(batch)
    ]


def answer_requests(open_session: Callable[[], Session]) -> None:
    """Load an engine, say so, and answer until stdin ends.

    Whatever the engine itself prints goes to stderr.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    session = open_session()
    _say(answers, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        prefill_s, step_s = session.run(
            prompts_of(request["batch"], request["context"]), request["steps"]
        )
        _say(answers, {"prefill_s": prefill_s, "step_s": step_s})


def _say(answers: object, message: dict[str, object]) -> None:
    print(json.dumps(message), file=answers, flush=True)  # type: ignore[call-overload]

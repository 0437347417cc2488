"""Training examples of sums beyond the model's tables, with replies that decline them.

Uses the wordings of arithmetic.py. No numbers are held out of training, because the model memorises
the limits of its tables.
"""

import json
from pathlib import Path
from random import Random

from . import arithmetic
from .arithmetic import ask, follow_up, has_answer, tell
from .samples import Draw, Exchange, Split, fill, pick_allowed, weighted

SKILL = "declining sums"
PRACTICE, PRACTICE_SHARE = "practised sums", 0.5
"""Weight of sums that the model got wrong, in addition to the skills' shares, which sum to 1."""
REPLY = "That sum is too hard for me. Ask me an easier one."
"""The only reply, because the model has to learn just when to decline."""


def _decline(user: str, key: str) -> Exchange:
    return Exchange(SKILL, user, REPLY, ("too hard for me",), {}, key)


def _large(rng: Random, low: int) -> int:
    """Draw a number of at least `low`, mostly just above it."""
    return rng.choice(
        (
            rng.randint(low, low + 20),
            rng.randint(low, 199),
            rng.randint(200, 999),
            rng.randint(200, 10 ** rng.randint(3, 6)),
        )
    )


def _product(rng: Random) -> tuple[int, str, int]:
    big = weighted(
        rng,
        [
            (7, rng.randint(13, 19)),
            (4, rng.randint(13, 30)),
            (5, rng.randint(13, 99)),
            (3, _large(rng, 13)),
        ],
    )
    other = weighted(rng, [(6, rng.randint(0, 12)), (3, rng.randint(13, 99)), (1, _large(rng, 13))])
    return (big, "x", other) if rng.random() < 0.5 else (other, "x", big)


def _quotient(rng: Random) -> tuple[int, str, int]:
    b = rng.randint(1, 12)
    a = weighted(
        rng,
        [
            (7, rng.randint(1, 12 * b)),  # mostly leaves a remainder
            (3, rng.randint(1, 144)),
            (7, b * rng.randint(13, 20)),
            (2, b * rng.randint(13, 30)),
            (4, _large(rng, 145)),
        ],
    )
    return a, "/", rng.choice((b, b, b, rng.randint(13, 99)))


def _plus_or_minus(rng: Random) -> tuple[int, str, int]:
    op = rng.choice("+-")
    if op == "-" and rng.random() < 0.75:
        a = rng.randint(0, 98)
        return a, op, rng.choice((rng.randint(a + 1, 99), min(99, a + rng.randint(1, 12))))
    big = _large(rng, 100)
    other = rng.choice((rng.randint(0, 9), rng.randint(0, 99), _large(rng, 100)))
    return (big, op, other) if rng.random() < 0.6 else (other, op, big)


def _draw(rng: Random) -> tuple[int, str, int]:
    while True:
        drawn = weighted(rng, [(20, _product), (45, _quotient), (35, _plus_or_minus)])(rng)
        if not has_answer(*drawn):
            return drawn


def _key(drawn: tuple[int, str, int]) -> str:
    return "hard:{}{}{}".format(*drawn)


def plain(rng: Random, split: Split) -> Exchange:
    """Draw a question about a sum that is too big, has a remainder or is negative."""
    return reply_to(rng, *_draw(rng))


def reply_to(rng: Random, a: int, op: str, b: int) -> Exchange:
    """Draw a question about the given sum."""
    return _decline(ask(rng, a, op, b), _key((a, op, b)))


def story_problem(rng: Random, split: Split) -> Exchange:
    """Draw a word problem."""
    while True:
        a, op, b = _draw(rng)
        if op != "/" and min(a, b) > 1 and (op != "-" or a >= b):
            return _decline(tell(rng, a, op, b)[0], _key((a, op, b)))


def follow(rng: Random) -> Exchange:
    """Draw a follow-up question after another sum."""
    drawn = _draw(rng)
    return _decline(follow_up(rng, *drawn), _key(drawn))


def odd(rng: Random, split: Split) -> Exchange:
    """Draw another kind of sum: fractions, powers, three numbers, doubles of big numbers."""

    def drawn(r: Random) -> str:
        a, b, c, big = r.randint(21, 99), r.randint(2, 12), r.randint(2, 99), _large(r, 100)
        form = r.choice(
            (
                "{a}.{b} + {c}",
                "What is {c} - {a}.{b}?",
                "What is {a} + {b} x {c}?",
                "{a} x {b} x {c}",
                "What is {c}% of {a}?",
                "What is {a} to the power of {b}?",
                "{a}^{b}",
                "What is the square root of {c}?",
                "What is {a} squared?",
                "-{a} + {c}",
                "What is {a} + {b} + {c}?",
                "{c} + {a} + {big}",
                "What is double {big}?",
                "What is half of {big}?",
                "Which is bigger, {big} or {c}?",
            )
        )
        return fill(form, a=str(a), b=str(b), c=str(c), big=str(big))

    user = pick_allowed(rng, split, drawn, lambda u: f"odd:{u}")
    return _decline(user, f"odd:{user}")


def draw(rng: Random, split: Split) -> Exchange:
    """Draw a question about any sum that the model should decline."""
    return weighted(rng, [(78, plain), (8, story_problem), (14, odd)])(rng, split)


def practice(file: Path) -> Draw:
    """Return a skill that draws the sums of a file written by `evaluate.py`."""
    sums: list[tuple[int, str, int]] = [(a, op, b) for a, op, b in json.loads(file.read_text())]

    def draw(rng: Random, split: Split) -> Exchange:
        a, op, b = rng.choice(sums)
        if has_answer(a, op, b):
            return arithmetic.reply_to(rng, a, op, b)
        return reply_to(rng, a, op, b)

    return draw

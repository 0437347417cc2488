"""One question and its reply, and the rule that keeps some combinations out of training.

Knows nothing of any skill. A combination is named by a key; a stable hash of the key, the same on
every machine and in every run, decides whether training may ever see it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from random import Random
from typing import TypeVar

T = TypeVar("T")

HELD_OUT_PERCENT = 8
"""Share of the combinations that training never sees; enough for hundreds of questions a skill."""

SLOT_OPEN, SLOT_CLOSE = "\x01", "\x02"
"""Brackets around what a template was filled with, so that typing noise leaves it alone."""


class Split(Enum):
    """Which side of the hash a sample is drawn from."""

    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question, a good reply, and what any right reply has to hold."""

    skill: str
    user: str
    reply: str
    expect: tuple[str, ...] = ()
    """Strings that must all occur, as whole words, in a right reply."""
    memo: dict[str, str] = field(default_factory=dict)
    """What a follow-up question may refer to."""
    key: str = ""
    """The combination, as hashed."""


Draw = Callable[[Random, Split], Exchange]
"""A skill: draws one exchange from its side of the split."""


def is_held_out(key: str) -> bool:
    """Say whether a combination is kept for measurement."""
    digest = blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 100 < HELD_OUT_PERCENT


def allowed(key: str, split: Split) -> bool:
    """Say whether a combination belongs to this side of the split."""
    return is_held_out(key) == (split is Split.HELD_OUT)


def fill(template: str, **slots: str) -> str:
    """Fill a question's template and mark what was filled in."""
    return template.format(**{k: f"{SLOT_OPEN}{v}{SLOT_CLOSE}" for k, v in slots.items()})


def unmark(text: str) -> str:
    """Remove the marks that `fill` left."""
    return text.replace(SLOT_OPEN, "").replace(SLOT_CLOSE, "")


def pick_allowed(
    rng: Random, split: Split, draw: Callable[[Random], T], key: Callable[[T], str]
) -> T:
    """Draw until the combination lies on the wanted side.

    Raises:
      RuntimeError: the side is as good as empty, which is a fault of the skill.
    """
    for _ in range(5000):
        drawn = draw(rng)
        if allowed(key(drawn), split):
            return drawn
    raise RuntimeError("a skill has no combination on this side of the split")


def weighted(rng: Random, rows: Sequence[tuple[float, T]]) -> T:
    """Choose one of the rows by its weight."""
    return rng.choices([row for _, row in rows], [weight for weight, _ in rows])[0]


def capital(text: str) -> str:
    """Upper-case the first letter and nothing else."""
    return text[:1].upper() + text[1:]


def article(noun: str) -> str:
    """Put `a` or `an` before a noun."""
    exception = noun.startswith(("uni", "one"))
    return f"{'an' if noun[0] in 'aeiou' and not exception else 'a'} {noun}"

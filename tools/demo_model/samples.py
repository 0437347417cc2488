"""Types and helpers of training examples, and the split that holds some examples out of training.

Each example has a key, for example a word and a task. A stable hash of the key, the same on every
machine, decides whether the example is used in training or only in the evaluation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from random import Random
from typing import TypeVar

T = TypeVar("T")

HELD_OUT_PERCENT = 8
"""Share of the combinations held out of training: enough for hundreds of questions per skill."""

SLOT_OPEN, SLOT_CLOSE = "\x01", "\x02"
"""Brackets around filled slots of a template, to exempt them from typing noise."""


class Split(Enum):
    """The part of the combinations that an example is drawn from."""

    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question, a reply, and the strings that a correct reply must contain."""

    skill: str
    user: str
    reply: str
    expect: tuple[str, ...] = ()
    """Strings that must all occur in a correct reply as whole words."""
    memo: dict[str, str] = field(default_factory=dict)
    """Values that a follow-up question may refer to."""
    key: str = ""
    """Key of the combination, which is hashed."""


Draw = Callable[[Random, Split], Exchange]
"""Type of a skill: a function that draws an exchange from one part of the split."""


def is_held_out(key: str) -> bool:
    """Return whether a combination is held out of training."""
    digest = blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 100 < HELD_OUT_PERCENT


def allowed(key: str, split: Split) -> bool:
    """Return whether a combination belongs to this part of the split."""
    return is_held_out(key) == (split is Split.HELD_OUT)


def fill(template: str, **slots: str) -> str:
    """Fill the slots of a question's template and mark them."""
    return template.format(**{k: f"{SLOT_OPEN}{v}{SLOT_CLOSE}" for k, v in slots.items()})


def unmark(text: str) -> str:
    """Remove the marks of `fill`."""
    return text.replace(SLOT_OPEN, "").replace(SLOT_CLOSE, "")


def pick_allowed(
    rng: Random, split: Split, draw: Callable[[Random], T], key: Callable[[T], str]
) -> T:
    """Draw until the combination belongs to this part of the split.

    Raises:
      RuntimeError: the part is nearly empty, which is a bug of the skill.
    """
    for _ in range(5000):
        drawn = draw(rng)
        if allowed(key(drawn), split):
            return drawn
    raise RuntimeError("a skill has no combination on this side of the split")


def weighted(rng: Random, rows: Sequence[tuple[float, T]]) -> T:
    """Draw one of the rows by weight."""
    return rng.choices([row for _, row in rows], [weight for weight, _ in rows])[0]


def capital(text: str) -> str:
    """Capitalise only the first letter."""
    return text[:1].upper() + text[1:]


def article(noun: str) -> str:
    """Put `a` or `an` before a noun."""
    exception = noun.startswith(("uni", "one"))
    return f"{'an' if noun[0] in 'aeiou' and not exception else 'a'} {noun}"

"""Generate training conversations: a mix of skills with follow-ups, system prompts and typos.

Has the share of each skill. The other modules generate the examples of a skill.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from . import arithmetic, counting, facts, hard_sums, limits, smalltalk, stories, story_talk, words
from .samples import SLOT_CLOSE, SLOT_OPEN, Draw, Exchange, Split, unmark

SKILLS: dict[str, Draw] = {
    stories.SKILL: stories.draw,
    arithmetic.SKILL: arithmetic.draw,
    hard_sums.SKILL: hard_sums.draw,
    facts.SKILL: facts.draw,
    facts.QUIZ: facts.quiz,
    words.SPELLING: words.spell,
    words.REVERSING: words.reverse,
    words.LETTERS: words.letters,
    counting.SKILL: counting.draw,
    smalltalk.SKILL: smalltalk.draw,
    smalltalk.NAMES: smalltalk.told_name,
    limits.SKILL: limits.draw,
}
DEFAULT_SHARES: dict[str, float] = {
    stories.SKILL: 0.08,
    arithmetic.SKILL: 0.22,
    hard_sums.SKILL: 0.11,
    facts.SKILL: 0.085,
    facts.QUIZ: 0.065,
    words.SPELLING: 0.09,
    words.REVERSING: 0.08,
    words.LETTERS: 0.07,
    counting.SKILL: 0.065,
    smalltalk.SKILL: 0.055,
    smalltalk.NAMES: 0.05,
    limits.SKILL: 0.04,
}
"""Share of each skill among questions, not tokens: a story is six times as long as a sum."""
SUMS_SHARES: dict[str, float] = {
    stories.SKILL: 0.04,
    arithmetic.SKILL: 0.3,
    hard_sums.SKILL: 0.28,
    facts.SKILL: 0.06,
    facts.QUIZ: 0.05,
    words.SPELLING: 0.08,
    words.REVERSING: 0.06,
    words.LETTERS: 0.05,
    counting.SKILL: 0.04,
    smalltalk.SKILL: 0.02,
    smalltalk.NAMES: 0.02,
    limits.SKILL: 0.02,
}
"""Shares for a last training phase for sums, with enough of the other skills to retain them."""

_Follow = Callable[[Random, Exchange, Split], Exchange]
FOLLOWS: dict[str, _Follow] = {
    stories.SKILL: story_talk.follow,
    story_talk.SKILL: story_talk.follow,
    arithmetic.SKILL: arithmetic.follow,
    facts.SKILL: facts.follow,
    facts.QUIZ: facts.guess,
    words.SPELLING: words.follow,
    words.REVERSING: words.follow,
    words.LETTERS: words.follow,
    counting.SKILL: counting.follow,
}
HARD_FOLLOW_SHARE: Final = 0.25
"""Share of follow-up sums that the model should decline."""
_REPEAT = (
    "Say that again.",
    "again",
    "Again, please.",
    "Repeat that.",
    "What did you say?",
    "Pardon?",
    "Can you repeat that?",
)
_YES = (
    "yes",
    "Yes, please!",
    "yes please",
    "Yes!",
    "sure",
    "ok, do that",
    "Please do.",
    "yeah",
    "Go ahead.",
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """An optional system prompt and the exchanges after it."""

    system: str
    exchanges: tuple[Exchange, ...]


def typed(rng: Random, user: str) -> str:
    """Add typing noise to a question: lower case, no full stop, occasional typos."""
    if rng.random() < 0.06:
        user = _slip(rng, user)
    user = unmark(user)
    roll = rng.random()
    if roll < 0.22:
        user = user.lower()
    elif roll < 0.23:
        user = user.upper()
    if rng.random() < 0.2:
        user = user.rstrip(".?!") or user
    return user


def _slip(rng: Random, user: str) -> str:
    """Drop, double or swap one letter outside the slots."""
    inside = 0
    free: list[int] = []
    for i, letter in enumerate(user):
        inside += (letter == SLOT_OPEN) - (letter == SLOT_CLOSE)
        if not inside and letter.isalpha():
            free.append(i)
    if len(free) < 8:
        return user
    at = rng.choice(free)
    return (
        rng.choice(
            (
                user[:at] + user[at + 1 :],
                user[:at] + user[at] + user[at:],
                user[:at] + user[at + 1 : at + 2] + user[at] + user[at + 2 :],
            )
        )
        if user[at + 1 : at + 2].isalpha()
        else user
    )


def next_exchange(
    rng: Random, said: list[Exchange], persona: str, shares: dict[str, float]
) -> Exchange:
    """Draw the next exchange: a follow-up, a question about the name, or a new question."""
    last = said[-1] if said else None
    if (
        last is not None
        and last.reply.endswith(
            ("a story?", "story instead?", "cheer you up?", "happy story?", "dragon?")
        )
        and rng.random() < 0.3
    ):
        told = stories.draw(rng, Split.TRAIN)
        while last.reply.endswith("dragon?") and told.memo["kind"] != "dragon":
            told = stories.draw(rng, Split.TRAIN)
        return replace(told, user=rng.choice(_YES))
    if last is not None and len(last.reply.split()) < 25 and rng.random() < 0.015:
        return replace(last, user=rng.choice(_REPEAT))
    share = 0.95 if last is not None and last.memo.get("quiz") else 0.4
    if last is not None and last.skill in FOLLOWS and last.memo and rng.random() < share:
        if last.skill == arithmetic.SKILL and rng.random() < HARD_FOLLOW_SHARE:
            return hard_sums.follow(rng)
        return FOLLOWS[last.skill](rng, last, Split.TRAIN)
    known = next((e.memo["me"] for e in reversed(said) if "me" in e.memo), "")
    if rng.random() < (0.25 if known else 0.004):
        return smalltalk.ask_name(rng, known)
    if persona and rng.random() < 0.3:
        return smalltalk.ask_persona(rng, persona)
    skill = rng.choices(tuple(shares), tuple(shares.values()))[0]
    drawn = SKILLS[skill](rng, Split.TRAIN)
    if persona and drawn.memo.get("topic") in ("name", "who"):
        return smalltalk.ask_persona(rng, persona)
    if drawn.memo.get("me") and known:
        return next_exchange(rng, said, persona, shares)
    return drawn


def conversation(
    rng: Random, shares: dict[str, float], max_words: int = 220, persona_share: float = 0.04
) -> Conversation:
    """Draw a training conversation.

    Args:
      rng: random source.
      shares: share of each skill among new questions.
      persona_share: share of conversations with a system prompt that names the model.
      max_words: number of words after which no further exchange is added.
    """
    persona = smalltalk.persona(rng) if rng.random() < persona_share else ""
    system = smalltalk.system_prompt(rng, persona) if persona or rng.random() < 0.2 else ""
    size = rng.choices((1, 2, 3, 4, 6, 10), (30, 20, 15, 15, 12, 8))[0]
    said: list[Exchange] = []
    length = 0
    while len(said) < size and length < max_words:
        exchange = next_exchange(rng, said, persona, shares)
        exchange = replace(exchange, user=typed(rng, exchange.user))
        said.append(exchange)
        length += (
            len(exchange.user.split()) + len(exchange.reply.split()) + exchange.reply.count("-")
        )
    return Conversation(system, tuple(said))


def conversations(seed: int, shares: dict[str, float] | None = None) -> Iterator[Conversation]:
    """Yield training conversations endlessly, determined by the seed."""
    rng = Random(seed)
    while True:
        yield conversation(rng, shares or DEFAULT_SHARES)

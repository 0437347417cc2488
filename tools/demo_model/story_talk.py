"""Training examples of questions about the last story."""

from random import Random

from . import stories
from .samples import Exchange, Split, article

SKILL = "questions about a story"


_QUESTIONS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        (
            "Who is the story about?",
            "Who was the hero?",
            "Who is it about?",
            "What was the story about?",
        ),
        "The story is about {name}, {a_kind}.",
        "{name}",
    ),
    (
        (
            "Where did {name} live?",
            "Where does the story happen?",
            "Where did the hero live?",
            "Where was that?",
        ),
        "{name} lived {where}.",
        "{where}",
    ),
    (
        (
            "Who else was in the story?",
            "Who did {name} meet?",
            "Was there anybody else?",
            "Who was the other one?",
        ),
        "There was also {a_friend}.",
        "{friend}",
    ),
    (
        (
            "What thing was in the story?",
            "Which thing was in it?",
            "What object was in the story?",
        ),
        "There was {a_thing} in it.",
        "{thing}",
    ),
    (
        (
            "What is {name}?",
            "Who is {name}?",
            "What was {name}?",
            "What kind of hero is {name}?",
        ),
        "{name} is {a_kind}.",
        "{kind}",
    ),
    (
        ("What was the name?", "What is the hero called?", "What was the name of the hero?"),
        "The hero is called {name}.",
        "{name}",
    ),
)
"""Wordings of each question, its answer, and the string that a correct answer contains."""


def _question(rng: Random, memo: dict[str, str]) -> tuple[str, str, str]:
    """Return a question about a story, the answer, and the string that it must contain."""
    parts = {
        **memo,
        "where": stories.in_place(memo["preposition"], memo["place"]),
        "a_kind": article(memo["kind"]),
        "a_friend": article(memo["friend"]),
        "a_thing": article(memo["thing"]),
    }
    asks, answer, wanted = rng.choice(_QUESTIONS)
    return rng.choice(asks).format(**parts), answer.format(**parts), wanted.format(**parts)


def about(rng: Random, previous: Exchange, split: Split) -> Exchange:
    """Draw a question about the last story."""
    user, answer, wanted = _question(rng, previous.memo)
    return Exchange(SKILL, user, answer, (wanted,), previous.memo, previous.key)


def follow(rng: Random, previous: Exchange, split: Split) -> Exchange:
    """Draw a question about the last story, or a request for the next one."""
    return (about if rng.random() < 0.4 else stories.follow)(rng, previous, split)

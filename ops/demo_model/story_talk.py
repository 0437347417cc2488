"""Questions about the story that was just told."""

from random import Random

from . import stories
from .samples import Exchange, Split, article

SKILL = "questions about a story"


def _question(rng: Random, memo: dict[str, str]) -> tuple[str, str, str]:
    """Return a question about a story that was told, the answer, and what it has to hold."""
    name, kind, friend, thing = memo["name"], memo["kind"], memo["friend"], memo["thing"]
    where = stories.in_place(memo["preposition"], memo["place"])
    rows = (
        (
            (
                "Who is the story about?",
                "Who was the hero?",
                "Who is it about?",
                "What was the story about?",
            ),
            f"The story is about {name}, {article(kind)}.",
            name,
        ),
        (
            (
                f"Where did {name} live?",
                "Where does the story happen?",
                "Where did the hero live?",
                "Where was that?",
            ),
            f"{name} lived {where}.",
            where,
        ),
        (
            (
                "Who else was in the story?",
                f"Who did {name} meet?",
                "Was there anybody else?",
                "Who was the other one?",
            ),
            f"There was also {article(friend)}.",
            friend,
        ),
        (
            (
                "What thing was in the story?",
                "Which thing was in it?",
                "What object was in the story?",
            ),
            f"There was {article(thing)} in it.",
            thing,
        ),
        (
            (
                f"What is {name}?",
                f"Who is {name}?",
                f"What was {name}?",
                f"What kind of hero is {name}?",
            ),
            f"{name} is {article(kind)}.",
            kind,
        ),
        (
            ("What was the name?", "What is the hero called?", "What was the name of the hero?"),
            f"The hero is called {name}.",
            name,
        ),
    )
    asks, answer, wanted = rng.choice(rows)
    return rng.choice(asks), answer, wanted


def about(rng: Random, previous: Exchange, split: Split) -> Exchange:
    """Ask something about the story that was just told."""
    user, answer, wanted = _question(rng, previous.memo)
    return Exchange(SKILL, user, answer, (wanted,), previous.memo, previous.key)


def follow(rng: Random, previous: Exchange, split: Split) -> Exchange:
    """Go on after a story: ask about it, or for the next."""
    return (about if rng.random() < 0.4 else stories.follow)(rng, previous, split)

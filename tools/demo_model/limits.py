"""Training examples of requests that the model cannot handle, with polite refusals."""

from random import Random

from .invent import invented_word
from .lexicon import KINDS, PLACES, THINGS
from .limits_table import (
    ASKS,
    BUT,
    FOREIGN,
    PUZZLED,
    SORRY,
    SYMBOLS,
    UNKNOWN,
    UNKNOWN_COUNTRIES,
)
from .samples import Exchange, Split, article, capital, fill, pick_allowed, weighted

SKILL = "kind refusals"


def _refusal(rng: Random, can: str, user: str, key: str) -> Exchange:
    reply = f"{rng.choice(SORRY).format(can=can)} {rng.choice(BUT)}"
    return Exchange(SKILL, user, reply, (can,), {}, key)


def beyond(rng: Random, split: Split) -> Exchange:
    """Draw a request of a kind that the model cannot handle."""

    def drawn(r: Random) -> tuple[str, str, str]:
        topic = r.choice(tuple(ASKS))
        _, asks, objects = ASKS[topic]
        return topic, r.choice(asks), r.choice(objects)

    topic, ask, thing = pick_allowed(rng, split, drawn, lambda d: "limit:" + ":".join(d))
    return _refusal(rng, ASKS[topic][0], fill(ask, x=thing), f"limit:{topic}:{ask}:{thing}")


def too_far(rng: Random, split: Split) -> Exchange:
    """Draw a request to count too far."""

    def drawn(r: Random) -> int:
        return r.choice((r.randint(101, 999), 100 * r.randint(2, 100), 10 ** r.randint(3, 9)))

    n = pick_allowed(rng, split, drawn, lambda n: f"far:{n}")
    ask = rng.choice(
        ("Count to {n}.", "Can you count to {n}?", "count to {n}", "Count from 1 to {n}.")
    )
    reply = "That is too far for me, I am a very small model. But I can count to 100!"
    return Exchange(SKILL, fill(ask, n=str(n)), reply, ("too far",), {}, f"far:{n}")


def unknown_fact(rng: Random, split: Split) -> Exchange:
    """Draw a question about a fact that is not in the table."""

    def drawn(r: Random) -> str:
        where = r.choice(UNKNOWN_COUNTRIES)
        if r.random() < 0.5:
            where = invented_word(r).capitalize()
        asks = (
            "What is the capital of {x}?",
            "What's the capital of {x}?",
            "capital of {x}",
            "Which continent is {x} in?",
            "Which city is the capital of {x}?",
            "How many people live in {x}?",
            "How big is {x}?",
            "What is the flag of {x}?",
            "How old is {x}?",
        )
        return fill(r.choice(asks), x=where)

    user = pick_allowed(rng, split, drawn, lambda u: f"unknown:{u}")
    reply = rng.choice(UNKNOWN)
    if rng.random() < 0.4:
        reply += " " + rng.choice(BUT[:1] + BUT[3:])
    return Exchange(SKILL, user, reply, ("do not know",), {}, f"unknown:{user}")


def no_sense(rng: Random, split: Split) -> Exchange:
    """Draw a meaningless message."""

    def drawn(r: Random) -> str:
        roll = r.random()
        if roll < 0.35:
            return " ".join(invented_word(r) for _ in range(r.randint(1, 5)))
        if roll < 0.5:
            return r.choice(FOREIGN)
        if roll < 0.7:
            return " ".join(r.choice(SYMBOLS) for _ in range(r.randint(1, 2)))
        if roll < 0.85:
            many = [
                r.choice(KINDS + THINGS + tuple(p for _, p in PLACES))
                for _ in range(r.randint(1, 4))
            ]
            return " ".join(many)
        verb = r.choice(("is", "has", "sees", "likes", "wants"))
        return f"The {r.choice(KINDS)} {verb} {article(r.choice(THINGS))}."

    user = pick_allowed(rng, split, drawn, lambda u: f"nonsense:{u}")
    return Exchange(SKILL, user, capital(rng.choice(PUZZLED)), ("small",), {}, f"nonsense:{user}")


def draw(rng: Random, split: Split) -> Exchange:
    """Draw any request that the model cannot handle."""
    rows = [(74, beyond), (12, unknown_fact), (11, no_sense), (3, too_far)]
    return weighted(rng, rows)(rng, split)

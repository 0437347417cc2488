"""Training examples of short stories with a requested name, hero, place, thing and plot."""

from dataclasses import dataclass, replace
from random import Random

from .invent import invented_word
from .lexicon import (
    ABILITIES,
    ADJECTIVES,
    BOY_KINDS,
    BOYS,
    CITIES,
    FRIENDS,
    GIRL_KINDS,
    GIRLS,
    KINDS,
    MOODS,
    PLACES,
    THINGS,
    WORDS,
)
from .plots import ASKED_AS, CLOSINGS, OPENINGS, PLOTS, SIGNS
from .samples import Exchange, Split, allowed, article, capital, fill, pick_allowed

SKILL = "stories"
_PRONOUNS = {
    "she": {"he": "she", "his": "her", "him": "her"},
    "he": {"he": "he", "his": "his", "him": "him"},
    "it": {"he": "it", "his": "its", "him": "it"},
}
_VERBS = (
    "Tell me a story",
    "Tell me a short story",
    "tell me a story",
    "Can you tell me a story",
    "Please tell a story",
    "Write a story",
    "Write a short story",
    "I would like a story",
    "I want a story",
    "Make up a story",
    "Could you write a little story",
    "a story",
    "story",
)
_VERBS_ABOUT = (*_VERBS, "Tell me", "Tell me something", "tell me", "Something")
_BARE = (
    "Tell me a story.",
    "Tell me a story, please.",
    "Can you tell me a story?",
    "I want a story!",
    "Do you know a story?",
    "story please",
    "Tell me a bedtime story.",
    "Once upon a time",
    "Write me something nice.",
)
_AGAIN = (
    "Another one.",
    "Another one, please!",
    "Tell me another story.",
    "One more!",
    "another story",
    "more",
    "Another?",
)


def in_place(preposition: str, noun: str) -> str:
    """Return a place with its preposition. Cities have no article."""
    return f"{preposition} {noun}" if noun[0].isupper() else f"{preposition} the {noun}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The elements of a story."""

    name: str
    kind: str
    place: tuple[str, str]
    thing: str
    plot: str
    friend: str
    ability: str

    @property
    def key(self) -> str:
        """Key of the combination for the split: name, place and thing."""
        return f"story:{self.name}:{self.place[1]}:{self.thing}"

    @property
    def where(self) -> str:
        """The place with its preposition."""
        return in_place(*self.place)


def _name_and_kind(rng: Random) -> tuple[str, str]:
    roll = rng.random()
    if roll < 0.36:
        return rng.choice(GIRLS), rng.choice(GIRL_KINDS if rng.random() < 0.4 else KINDS)
    if roll < 0.72:
        return rng.choice(BOYS), rng.choice(BOY_KINDS if rng.random() < 0.4 else KINDS)
    return invented_word(rng).capitalize(), rng.choice(KINDS)


def _plan(rng: Random) -> Plan:
    name, kind = _name_and_kind(rng)
    if rng.random() < 0.12:
        kind = rng.choice(WORDS) if rng.random() < 0.5 else invented_word(rng)
        if kind in GIRL_KINDS + BOY_KINDS:
            kind = rng.choice(KINDS)
    place = rng.choice(PLACES) if rng.random() < 0.85 else ("in", rng.choice(CITIES))
    if rng.random() < 0.05:
        place = ("in", invented_word(rng).capitalize())
    thing = rng.choice(THINGS)
    if rng.random() < 0.4:
        thing = f"{rng.choice(ADJECTIVES)} {thing}"
    friend = rng.choice([f for f in FRIENDS if f != kind])
    return Plan(name, kind, place, thing, rng.choice(tuple(PLOTS)), friend, rng.choice(ABILITIES))


def plan(rng: Random, split: Split) -> Plan:
    """Draw a plan from one part of the split."""
    return pick_allowed(rng, split, _plan, lambda p: p.key)


def _gender(p: Plan) -> str:
    if p.kind in GIRL_KINDS or p.name in GIRLS:
        return "she"
    return "he" if p.kind in BOY_KINDS or p.name in BOYS else "it"


def tell(rng: Random, p: Plan) -> str:
    """Return the story of a plan."""
    pronouns = _PRONOUNS[_gender(p)]
    slots = {
        **pronouns,
        **{word.capitalize(): form.capitalize() for word, form in pronouns.items()},
        "name": p.name,
        "kind": p.kind,
        "thing": p.thing,
        "friend": p.friend,
        "ability": p.ability,
        "mood": rng.choice(MOODS),
        "place": p.where,
        "place_cap": capital(p.where),
    }
    beats = (OPENINGS, *PLOTS[p.plot], CLOSINGS)
    lines = [rng.choice(beat).format(**slots) for beat in beats]
    if p.thing not in " ".join(lines):
        lines.insert(-1, f"{p.name} still has the {p.thing}.")
    text = " ".join(lines)
    for wrong in ("a {0}", "A {0}"):
        for noun in (p.thing, p.friend, slots["mood"]):
            right = article(noun) if wrong[0] == "a" else capital(article(noun))
            text = text.replace(f"{wrong.format(noun)}", right)
    return text


def _place_asked(rng: Random, p: Plan) -> str:
    preposition, noun = p.place
    if noun[0].isupper():
        return f"{preposition} {noun}"
    return f"{preposition} {rng.choice(('the ' + noun, article(noun)))}"


def ask(rng: Random, p: Plan) -> tuple[str, tuple[str, ...]]:
    """Return a request with some elements of the plan, and what the story must then mention."""
    parts: list[str] = []
    expect: list[str] = []
    roll = rng.random()
    kind = article(p.kind)
    about_plot = rng.choice(ASKED_AS[p.plot])
    if roll < 0.3:
        parts.append(
            fill(rng.choice((" about {k} named {n}", " about {k} called {n}")), k=kind, n=p.name)
        )
        expect += [p.kind, p.name]
    elif roll < 0.5:
        parts.append(fill(rng.choice((" about {n}", " about {n} the {k}")), n=p.name, k=p.kind))
        expect += [p.name, *([p.kind] if "the " in parts[-1] else [])]
    elif roll < 0.68:
        parts.append(fill(" about {k}", k=kind))
        expect.append(p.kind)
    elif roll < 0.84:
        plot = about_plot.format(thing=p.thing, ability=p.ability)
        parts.append(fill(" about {p}", p=plot.replace("a " + p.thing, article(p.thing))))
        expect.append("plot")
    if rng.random() < 0.45:
        parts.append(
            fill(
                rng.choice((" {p}", " {p}", ", set {p}", " that happens {p}")),
                p=_place_asked(rng, p),
            )
        )
        expect.append(p.place[1])
    if rng.random() < 0.4:
        form = rng.choice((" with {t}", " and {t}", " with {t} in it", ", with {t}"))
        if "and" in form and "about" not in "".join(parts):
            form = " with {t}"
        parts.append(fill(form, t=article(p.thing)))
        expect.append(p.thing)
    if parts and "plot" not in expect and rng.random() < 0.25:
        plot = about_plot.format(thing=p.thing, ability=p.ability)
        parts.append(fill(". It is about {p}", p=plot.replace("a " + p.thing, article(p.thing))))
        expect.append("plot")
    if not parts:
        return rng.choice(_BARE), ()
    verbs = _VERBS_ABOUT if parts[0].startswith(" about") else _VERBS
    return rng.choice(verbs) + "".join(parts) + rng.choice((".", ".", "", "!", ", please.")), tuple(
        expect
    )


def signs(p: Plan) -> str:
    """Return words that identify the plot, as alternatives `a|b`."""
    return "|".join(sign.format(thing=p.thing, ability=p.ability) for sign in SIGNS[p.plot])


def usual(rng: Random, p: Plan, split: Split, kept: tuple[str, ...]) -> Plan:
    """Replace unusual words, such as invented names, that are not in the request."""
    while True:
        q = p
        if p.name not in kept and p.name not in GIRLS + BOYS:
            q = replace(q, name=rng.choice(GIRLS + BOYS))
        if p.kind not in kept and p.kind not in KINDS + GIRL_KINDS + BOY_KINDS:
            q = replace(q, kind=rng.choice(KINDS))
        if p.place[1] not in kept and p.place[1][0].isupper() and p.place[1] not in CITIES:
            q = replace(q, place=rng.choice(PLACES))
        if allowed(q.key, split):
            return q


def exchange(
    rng: Random,
    p: Plan,
    user: str,
    expect: tuple[str, ...],
    split: Split,
    kept: tuple[str, ...] = (),
) -> Exchange:
    """Return an exchange with a plan's story as the reply."""
    p = usual(rng, p, split, (*expect, *kept))
    memo = {
        "name": p.name,
        "kind": p.kind,
        "preposition": p.place[0],
        "place": p.place[1],
        "thing": p.thing,
        "plot": p.plot,
        "ability": p.ability,
        "friend": p.friend,
    }
    wanted = tuple(signs(p) if e == "plot" else e for e in expect)
    return Exchange(SKILL, user, tell(rng, p), wanted, memo, p.key)


def draw(rng: Random, split: Split) -> Exchange:
    """Draw a story and a request for it."""
    p = plan(rng, split)
    user, expect = ask(rng, p)
    while split is Split.HELD_OUT and not expect:
        user, expect = ask(rng, p)
    return exchange(rng, p, user, expect, split)


def _kept(rng: Random, previous: Exchange) -> Plan:
    memo = previous.memo
    other = _plan(rng)
    return replace(
        other, name=memo["name"], kind=memo["kind"], place=(memo["preposition"], memo["place"])
    )


def follow(rng: Random, previous: Exchange, split: Split) -> Exchange:
    """Draw a request for another story, or for the same with one element changed."""
    p = plan(rng, split)
    roll = rng.random()
    if roll < 0.35:
        return exchange(rng, p, rng.choice(_AGAIN), (), split)
    if roll < 0.55:
        user = fill(
            rng.choice(
                (
                    "Make it about {k}.",
                    "Now about {k}.",
                    "And one about {k}?",
                    "Now one about {k}, please.",
                    "Another one about {k}.",
                )
            ),
            k=article(p.kind),
        )
        return exchange(rng, p, user, (p.kind,), split)
    if roll < 0.75:
        user = fill(
            rng.choice(
                ("Now with {n}.", "And one about {n}?", "Make it about {n}.", "Tell it with {n}.")
            ),
            n=p.name,
        )
        return exchange(rng, p, user, (p.name,), split)
    kept = _kept(rng, previous)
    kept = replace(kept, thing=p.thing, plot=p.plot)
    if not allowed(kept.key, split):
        return exchange(rng, p, rng.choice(_AGAIN), (), split)
    if roll < 0.9:
        name = kept.name
        user = fill(
            rng.choice(
                (
                    "Tell me more about {n}.",
                    "Another story about {n}, please.",
                    "What did {n} do next?",
                )
            ),
            n=name,
        )
        return exchange(rng, kept, user, (name,), split, (kept.kind, kept.place[1]))
    user = fill(
        rng.choice(("Another one with the same {k}.", "The same hero, but with {t}.")),
        k=kept.kind,
        t=article(kept.thing),
    )
    expect = (kept.name, kept.kind) if "same hero" not in user else (kept.name, kept.thing)
    return exchange(rng, kept, user, expect, split, (kept.kind, kept.name, kept.place[1]))

"""Training examples of small talk: greetings, thanks, feelings, names, the model's abilities."""

from collections.abc import Sequence
from random import Random

from .invent import any_name
from .lexicon import BOYS, GIRLS
from .samples import Exchange, Split, allowed, capital, fill, weighted
from .smalltalk_table import CAN, OFFERS, TOPICS

SKILL, NAMES = "greeting and self", "remembering a name"
_TOLD = (
    "My name is {n}.",
    "I am {n}.",
    "I'm {n}.",
    "my name is {n}",
    "Hello, my name is {n}.",
    "Hi, I am {n}!",
    "Call me {n}.",
    "You can call me {n}.",
    "hi im {n}",
)
_WELCOMED = (
    "Nice to meet you, {n}! {offer}",
    "Hello, {n}! {offer}",
    "Hello {n}, what a nice name! {offer}",
)
_ASKED_NAME = (
    "What is my name?",
    "what is my name",
    "What's my name?",
    "Do you remember my name?",
    "Do you know my name?",
    "Who am I?",
    "Say my name.",
    "How am I called?",
)


def said(rng: Random, topic: str, user: str) -> Exchange:
    """Return an exchange for a remark of a topic."""
    reply = rng.choice(TOPICS[topic][1]).replace("{offer}", rng.choice(OFFERS))
    return Exchange(SKILL, user, reply, (f"topic:{topic}",), {"topic": topic}, f"talk:{user}")


def matches_topic(topic: str, reply: str) -> bool:
    """Return whether a reply fits the topic. Ignores an offer after it."""
    starts = [r.replace(" {offer}", "").replace("{offer}", "") for r in TOPICS[topic][1]]
    return any(reply.strip().startswith(start) for start in starts)


def draw(rng: Random, split: Split, topics: Sequence[str] = tuple(TOPICS)) -> Exchange:
    """Draw a remark. Some pairs of an opener and a wording are held out, bare wordings never."""
    topic = rng.choices(
        topics, [3.0 if t in ("hello", "can", "who", "thanks") else 1.0 for t in topics]
    )[0]
    openers = (
        "",
        "",
        "",
        "Hi! ",
        "Hello, ",
        "Please tell me: ",
        "Hey, ",
        "ok, ",
        "So, ",
        "One question: ",
    )
    while True:
        opener = rng.choice(openers if topic not in ("hello", "yes_no", "bye") else ("",))
        user = opener + rng.choice(TOPICS[topic][0])
        is_bare = opener == "" and split is Split.TRAIN
        if is_bare or allowed(f"talk:{user}", split):
            return said(rng, topic, user)


def told_name(rng: Random, split: Split) -> Exchange:
    """Draw a message in which the user tells a name."""
    while True:
        name = any_name(rng, 0.4)
        template = rng.choice(_TOLD)
        if allowed(f"name:{name}", split):
            break
    reply = rng.choice(_WELCOMED).format(n=name, offer=rng.choice(OFFERS))
    return Exchange(NAMES, fill(template, n=name), reply, (name,), {"me": name}, f"name:{name}")


def ask_name(rng: Random, name: str) -> Exchange:
    """Return a question about the user's name; `name` is empty if it was not told."""
    user = rng.choice(_ASKED_NAME)
    if name and rng.random() < 0.15:
        letters = "-".join(name.lower())
        user = rng.choice(("Spell my name.", "How do you spell my name?", "Can you spell my name?"))
        return Exchange(NAMES, user, f"{letters}.", (letters,), {"me": name}, f"name:{name}")
    if not name:
        reply = "You have not told me your name yet. What is it?"
        return Exchange(NAMES, user, reply, ("You have not told me",), {}, "name:none")
    reply = rng.choice((f"Your name is {name}.", f"You are {name}!"))
    return Exchange(NAMES, user, reply, (name,), {"me": name}, f"name:{name}")


def persona(rng: Random) -> str:
    """Draw a name for the model in a system prompt."""
    return rng.choice(GIRLS + BOYS) if rng.random() < 0.7 else any_name(rng, 1.0)


def ask_persona(rng: Random, name: str) -> Exchange:
    """Return a question about the model's name from the system prompt."""
    topic = rng.choice(("name", "who"))
    user = rng.choice(TOPICS[topic][0])
    reply = f"My name is {name}." if topic == "name" else f"I am {name}, a very small model. {CAN}."
    return Exchange(NAMES, user, reply, (name,), {}, f"persona:{name}")


def system_prompt(rng: Random, name: str) -> str:
    """Draw a system prompt, with or without a name for the model."""
    if name:
        form = rng.choice(
            (
                "Your name is {n}.",
                "You are {n}.",
                "You are {n}, a helpful assistant.",
                "You are called {n}. Be kind.",
            )
        )
        return form.format(n=name)
    who = (
        "a helpful assistant",
        "a kind storyteller",
        "a friendly teacher",
        "a small model",
        "a helpful, honest assistant",
        "an assistant for children",
        "an AI assistant",
    )
    rules = (
        "",
        "",
        " Be kind.",
        " Answer briefly.",
        " Be concise.",
        " Answer in English.",
        " Keep your answers short.",
        " Be polite and honest.",
    )
    return capital(f"you are {rng.choice(who)}.{rng.choice(rules)}")


def draw_any(rng: Random, split: Split) -> Exchange:
    """Draw a remark or a message about names."""
    return weighted(rng, [(0.85, draw), (0.15, told_name)])(rng, split)

"""Prompts of simulated users: a weighted mix of short questions, stories and long prompts.

Prompts are drawn from a seed, and each has a different sampling seed: all streams differ, and a run
can be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from random import Random

NAMES = ("Ember", "Mila", "Otto", "Nia", "Bruno", "Tess", "Kai", "Lotte")
HEROES = ("dragon", "fox", "girl", "boy", "robot", "mouse", "bear", "owl")
COUNTRIES = ("France", "Italy", "Japan", "Kenya", "Peru", "Norway", "India", "Canada")
WORDS = ("garden", "lamp", "river", "window", "basket", "thunder", "pocket", "silver")

WEIGHTS = {"short": 5, "story": 3, "long": 2}
"""Weights of the kinds: mostly chat, with enough long prompts that prefill and decode compete."""
LONG_PROMPT_SENTENCES = 24
"""About 1,300 characters: several prefill chunks, but within the context of a small model."""

MAX_PROMPTS_PER_USER = 1_000_000
"""Distance between the seeds of two users. A user would need weeks for that many requests."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question.

    Attributes:
      kind: "short", "story" or "long".
      text: the user's message.
      max_tokens: maximum length of the answer.
      seed: sampling seed, unique within a run.
    """

    kind: str
    text: str
    max_tokens: int
    seed: int


class PromptMix:
    """An endless source of prompts for one user."""

    def __init__(self, user: int) -> None:
        self._random = Random(user)
        self._seeds = count(user * MAX_PROMPTS_PER_USER)

    def draw(self) -> Prompt:
        """Return the next prompt."""
        kind = self._random.choices(tuple(WEIGHTS), tuple(WEIGHTS.values()))[0]
        text, max_tokens = {"short": self._short, "story": self._story, "long": self._long}[kind]()
        return Prompt(kind, text, max_tokens, seed=next(self._seeds))

    def _short(self) -> tuple[str, int]:
        choice = self._random.choice
        first, second = self._random.randint(1, 50), self._random.randint(1, 50)
        questions = (
            f"What is {first} + {second}?",
            f"What is the capital of {choice(COUNTRIES)}?",
            f"Spell the word {choice(WORDS)}.",
            f"Reverse the word {choice(WORDS)}.",
        )
        return choice(questions), 64

    def _story(self) -> tuple[str, int]:
        choice = self._random.choice
        return f"Tell me a story about a {choice(HEROES)} named {choice(NAMES)}.", 192

    def _long(self) -> tuple[str, int]:
        choice = self._random.choice
        told = " ".join(
            f"{choice(NAMES)} the {choice(HEROES)} found a {choice(WORDS)} and kept it."
            for _ in range(LONG_PROMPT_SENTENCES)
        )
        return f"{told} Now tell me a story about a {choice(HEROES)}.", 96

"""Prompt tokens on workers that are owed a first token, as far as others wait for them.

Pure. By class; long prompts apart, because shorter ones of their class are computed beside them.
Knows counts; knows no workers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from triolet.service_class import ServiceClass


class Prompt(NamedTuple):
    """One that is counted.

    Attributes:
      service_class: the request's.
      num_tokens: to compute.
      is_long: shorter ones do not wait for it.
    """

    service_class: ServiceClass
    num_tokens: int
    is_long: bool


class OnWorkers:
    """All of one server.

    Args:
      overtaken_s: of computing beyond which a prompt is long.
    """

    def __init__(self, overtaken_s: float = math.inf) -> None:
        self._overtaken_s = overtaken_s
        self._short = [0] * len(ServiceClass)
        self._long = [0] * len(ServiceClass)

    def prompt(self, service_class: ServiceClass, num_tokens: int, tokens_per_s: float) -> Prompt:
        """Return a prompt as it counts where so many tokens per second are computed; 0 if nobody
        knows."""
        return Prompt(service_class, num_tokens, num_tokens > self._overtaken_s * tokens_per_s > 0)

    def before(self, prompt: Prompt) -> int:
        """Return the tokens that are computed before a prompt: of its class and those above."""
        own = prompt.service_class
        above = sum(self._short[:own]) + sum(self._long[:own])
        return above + self._short[own] + (self._long[own] if prompt.is_long else 0)

    def add(self, prompt: Prompt) -> None:
        """Count one that was sent there."""
        self._counts(prompt)[prompt.service_class] += prompt.num_tokens

    def remove(self, prompt: Prompt) -> None:
        """Count one out that has its first token, or its end without one."""
        self._counts(prompt)[prompt.service_class] -= prompt.num_tokens

    def _counts(self, prompt: Prompt) -> list[int]:
        return self._long if prompt.is_long else self._short

"""Bounds of what a server does with the candidate of a rollout before users see it."""

from __future__ import annotations

from dataclasses import dataclass

from ..units import SECONDS
from .limits import Count, Positive  # noqa: TC001 (get_type_hints reads the annotations)


@dataclass(frozen=True, slots=True)
class CandidateConfig:
    """Golden prompts and shadow copies for the candidates of rollouts."""

    golden_deadline_s: Positive = 30.0 * SECONDS
    """For one golden prompt, its wait included: an idle candidate answers within a second, and
    workers that restart return within this time."""
    golden_tokens: Count = 16
    """Tokens of each answer. A changed weight or kernel rarely moves the first few tokens; each one
    costs a row of a step."""
    max_copies: Count = 4
    """Shadow copies that run at once: they share the machine with the stable version, and a few are
    enough to compare."""
    news_s: Positive = 10.0 * SECONDS
    """Without news of control for this long, golden prompts and copies stop until it returns, as
    the route of a rollout expires."""

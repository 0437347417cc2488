"""What a campaign asks: a seeded mix of surfaces, sampling, stop strings and logprobs. Pure.

Every answer is a function of its request alone, so that the same number of the same seed may be
asked again in another run, in other company, and must be answered with the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal, TypeAlias

from ..prompts import Prompt, PromptMix

Surface: TypeAlias = Literal["sse", "ws", "plain"]

SURFACES: dict[Surface, int] = {"sse": 6, "ws": 3, "plain": 1}
"""Mostly streams: a pause shows in them only."""
STOP_STRINGS = (" and the", "happy", ". ", "\n\n", " said")
"""What the demo model's stories contain sooner or later."""
GREEDY_SHARE = 0.4
STOP_SHARE = 0.25
LOGPROBS_SHARE = 0.3
TO_THE_LIMIT_SHARE = 0.5
"""Answers that ignore the end token: longer ones, of a length known beforehand."""
PENALTY_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
      number: which answer it must get.
      name: the id that the client gives it.
      surface: how it is asked.
      body: JSON of the HTTP request, or of the WebSocket message.
      key: of the tenant who asks; empty for nobody's.
    """

    number: int
    name: str
    surface: Surface
    body: dict[str, Any]
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """What HTTP is told of who asks."""
        return {"x-request-id": self.name} | key_headers(self.key)


def key_headers(key: str) -> dict[str, str]:
    """Return the headers that show a key; none for none."""
    return {"authorization": f"Bearer {key}"} if key else {}


def draw_asks(count: int, seed: int) -> list[Ask]:
    """Return the requests of a campaign."""
    rng = Random(seed)
    mix = PromptMix(seed)
    return [_draw(number, mix.draw(), rng) for number in range(count)]


def lengthened(ask: Ask, max_tokens: int) -> Ask:
    """Return the same request, with an answer of exactly so many tokens."""
    limit = "max_output_tokens" if ask.surface == "ws" else "max_tokens"
    body: dict[str, Any] = {k: v for k, v in ask.body.items() if k != "stop"}
    return replace(ask, body=body | {limit: max_tokens, "ignore_eos": True})


def _draw(number: int, prompt: Prompt, rng: Random) -> Ask:
    surface = rng.choices(tuple(SURFACES), tuple(SURFACES.values()))[0]
    options: dict[str, Any] = {"seed": prompt.seed}
    if rng.random() < GREEDY_SHARE:
        options["temperature"] = 0
    else:
        options |= {"temperature": rng.choice((0.7, 1.0, 1.2)), "top_p": rng.choice((1.0, 0.95))}
    if rng.random() < STOP_SHARE:
        options["stop"] = rng.sample(STOP_STRINGS, 2)
    if rng.random() < TO_THE_LIMIT_SHARE:
        options["ignore_eos"] = True
    if rng.random() < PENALTY_SHARE:
        options |= {"presence_penalty": 0.3, "frequency_penalty": 0.2}
    num_top = rng.choice((0, 3)) if rng.random() < LOGPROBS_SHARE else None
    write = _response if surface == "ws" else _chat
    body = write(prompt, num_top) | options
    if surface == "sse":
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Ask(number, f"ask-{number:05d}", surface, body)


def _chat(prompt: Prompt, num_top: int | None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt.text}],
        "max_tokens": prompt.max_tokens,
        "return_token_ids": True,
    }
    if num_top is not None:
        body |= {"logprobs": True, "top_logprobs": num_top}
    return body


def _response(prompt: Prompt, num_top: int | None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "type": "response.create",
        "input": prompt.text,
        "max_output_tokens": prompt.max_tokens,
        "store": False,
    }
    if num_top is not None:
        body |= {"include": ["message.output_text.logprobs"], "top_logprobs": num_top}
    return body

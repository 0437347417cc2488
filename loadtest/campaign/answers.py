"""Requests of campaigns, and parsers of their answers: text, token ids, logprobs, end and usage.
Pure.

Requests are drawn from a seed with varying API surfaces, sampling, stop strings and logprobs. Every
answer depends only on its request. Readers take one line or message at a time and return whether it
had text, so that its time can be recorded. A stream without its terminal event is not an answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from random import Random
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from ..harness.prompts import Prompt, PromptMix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


Surface: TypeAlias = Literal["sse", "ws", "plain"]

SURFACES: dict[Surface, int] = {"sse": 6, "ws": 3, "plain": 1}
"""Mostly streams, because only they show pauses."""
STOP_STRINGS = (" and the", "happy", ". ", "\n\n", " said")
"""Strings that are common in the demo model's stories."""
GREEDY_SHARE = 0.4
STOP_SHARE = 0.25
LOGPROBS_SHARE = 0.3
TO_THE_LIMIT_SHARE = 0.5
"""Share of answers that ignore the end token: they are longer, with a known length."""
PENALTY_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
      number: index of the expected answer.
      name: the client's request id.
      surface: API surface of the request.
      body: JSON of the HTTP request, or of the WebSocket message.
      key: API key of the tenant; empty for none.
    """

    number: int
    name: str
    surface: Surface
    body: dict[str, Any]
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """The request's id and key as HTTP headers."""
        return {"x-request-id": self.name} | key_headers(self.key)


def key_headers(key: str) -> dict[str, str]:
    """Return the headers with an API key; empty without one."""
    return {"authorization": f"Bearer {key}"} if key else {}


def draw_asks(count: int, seed: int) -> list[Ask]:
    """Return the requests of a campaign."""
    rng = Random(seed)
    mix = PromptMix(seed)
    return [_draw(number, mix.draw(), rng) for number in range(count)]


def lengthened(ask: Ask, max_tokens: int) -> Ask:
    """Return the same request, with an answer of exactly `max_tokens` tokens."""
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


class StreamFailedError(Exception):
    """The stream violated its protocol or reported a failure.

    Args:
      reason: a constant text, for tables of failures; without numbers.
      details: further information.
    """

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(f"{reason}: {details}" if details else reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer.

    Attributes:
      text: the answer's text.
      token_ids: its tokens; empty if the surface does not return them (WebSocket).
      logprobs: log-probabilities of its tokens, if requested.
      end: finish_reason, or the status of a response.
      prompt_tokens: prompt tokens in the server's usage.
      completion_tokens: completion tokens in the server's usage.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    end: str
    prompt_tokens: int
    completion_tokens: int

    def differs_from(self, other: Answer) -> str | None:
        """Return a description of the first difference, or None. Ignores the values of logprobs."""
        for name in ("token_ids", "text", "end", "completion_tokens", "prompt_tokens"):
            mine, others = getattr(self, name), getattr(other, name)
            if mine != others:
                return f"{name}: {_around_difference(mine, others)}"
        if len(self.logprobs) != len(other.logprobs):
            return f"logprobs: {len(self.logprobs)} and {len(other.logprobs)}"
        return None

    def logprob_distance(self, other: Answer) -> float:
        """Return the largest difference between logprobs of the same tokens."""
        return max(
            (abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True)), default=0.0
        )


def _around_difference(mine: object, others: object) -> str:
    if not isinstance(mine, str | tuple) or not isinstance(others, str | tuple):
        return f"{mine!r} and {others!r}"
    pairs = zip(mine, others, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(others)))
    around = slice(max(0, first - 3), first + 8)
    return f"at {first} of {len(mine)} and {len(others)}: {mine[around]!r} and {others[around]!r}"


class AnswerReader(Protocol):
    """Assembles an answer from its parts.

    Attributes:
      answer: the whole answer, once it has ended successfully.
      token_ids: tokens received so far.
      text: text received so far.
    """

    answer: Answer | None
    token_ids: list[int]
    text: str

    def take(self, data: bytes) -> bool:
        """Take one line or message; return whether it had text or tokens.

        Raises:
          StreamFailedError: it reports a failure or violates the protocol.
        """
        ...


class ChatLines:
    """A chat completion over Server-Sent Events, line by line."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.token_ids: list[int] = []
        self.text = ""
        self._logprobs: list[float] = []
        self._end = ""
        self._usage: dict[str, int] | None = None

    def take(self, data: bytes) -> bool:
        """See AnswerReader."""
        if not data.startswith(b"data: "):
            return False
        payload = data.removeprefix(b"data: ")
        if payload == b"[DONE]":
            self._finish()
            return False
        chunk = json.loads(payload)
        if "error" in chunk:
            raise _failure(chunk["error"])
        self._usage = chunk.get("usage") or self._usage
        has_new = False
        for choice in chunk["choices"]:
            has_new |= self._take_choice(choice)
        return has_new

    def _take_choice(self, choice: dict[str, Any]) -> bool:
        if self._end:
            raise StreamFailedError("data after finish_reason")
        self._end = choice.get("finish_reason") or ""
        text, ids = choice["delta"].get("content") or "", choice.get("token_ids") or []
        self.text += text
        self.token_ids += ids
        self._logprobs += _of_tokens((choice.get("logprobs") or {}).get("content"))
        return bool(text or ids)

    def _finish(self) -> None:
        if not self._end or self._usage is None:
            missing = "usage" if self._end else "finish_reason"
            raise StreamFailedError(f"ended without {missing}")
        self.answer = _answer(self.text, self.token_ids, self._logprobs, self._end, self._usage)


class ChatBody:
    """A chat completion that is not streamed."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.token_ids: list[int] = []
        self.text = ""

    def take(self, data: bytes) -> bool:
        """See AnswerReader; `data` is the whole body."""
        body = json.loads(data)
        if "error" in body:
            raise _failure(body["error"])
        [choice] = body["choices"]
        self.text, self.token_ids = choice["message"]["content"], choice["token_ids"]
        logprobs = _of_tokens((choice.get("logprobs") or {}).get("content"))
        end = choice["finish_reason"]
        self.answer = _answer(self.text, self.token_ids, logprobs, end, body["usage"])
        return True


class ResponseMessages:
    """A response over the WebSocket, message by message."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.token_ids: list[int] = []
        self.text = ""
        self._logprobs: list[float] = []

    def take(self, data: bytes) -> bool:
        """See AnswerReader."""
        event = json.loads(data)
        match event["type"]:
            case "response.output_text.delta":
                self.text += event["delta"]
                self._logprobs += _of_tokens(event.get("logprobs"))
                return True
            case "response.completed" | "response.incomplete":
                self._finish(event["response"])
            case "response.failed":
                error = event["response"].get("error") or {}
                raise _failure(error | {"code": error.get("type")})
            case "error":
                raise _failure(event.get("error"))
        return False

    def _finish(self, response: dict[str, Any]) -> None:
        details = response.get("incomplete_details") or {}
        end = " ".join((response["status"], *details.values()))
        usage = response["usage"]
        counts = {
            "prompt_tokens": usage["input_tokens"],
            "completion_tokens": usage["output_tokens"],
        }
        self.answer = _answer(self.text, (), self._logprobs, end, counts)


READERS: dict[Surface, type[ChatLines] | type[ChatBody] | type[ResponseMessages]] = {
    "sse": ChatLines,
    "plain": ChatBody,
    "ws": ResponseMessages,
}


def read_stream(
    messages: Iterable[str | bytes], reader: AnswerReader, note: Callable[[float], None]
) -> int:
    """Read a stream up to its terminal event and return its number of tokens.

    Args:
      messages: lines or messages as they arrive.
      reader: assembles the answer.
      note: called with the time of each message that had text.

    Raises:
      StreamFailedError: it failed or cannot be parsed.
    """
    try:
        for message in messages:
            if reader.take(message.encode() if isinstance(message, str) else message):
                note(perf_counter())
            if reader.answer is not None:
                return reader.answer.completion_tokens
    except (ValueError, LookupError, TypeError) as error:
        raise StreamFailedError(f"cannot be parsed: {error!r}") from error
    raise StreamFailedError("ended without a terminal event")


def _answer(
    text: str,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    end: str,
    usage: dict[str, int],
) -> Answer:
    counts = usage["prompt_tokens"], usage["completion_tokens"]
    if token_ids and len(token_ids) != counts[1]:
        raise StreamFailedError("usage and tokens differ", f"{counts[1]} and {len(token_ids)}")
    return Answer(text, tuple(token_ids), tuple(logprobs), end, *counts)


def _of_tokens(content: list[dict[str, Any]] | None) -> list[float]:
    return [token["logprob"] for token in content or ()]


def _failure(error: dict[str, Any] | None) -> StreamFailedError:
    error = error or {}
    return StreamFailedError(error.get("code") or "no code", error.get("message") or "no message")

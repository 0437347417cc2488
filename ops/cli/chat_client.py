"""HTTP client of `triolet chat`: sends a conversation and yields the text of the SSE stream."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NotRequired, TypedDict

import httpx2

from triolet.config import require
from triolet.errors import said_by
from triolet.plain_text import one_line

from ..api_key import key_headers, key_remedy
from ..exit_codes import CommandFailed
from ..http_trust import verify_for

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

CONNECT_TIMEOUT_S: Final = 5.0
SILENCE_TIMEOUT_S: Final = 60.0
"""The server sends a comment every 10 s, even for a queued request. Six missed: a dead link."""
DONE: Final = "[DONE]"
UNKNOWN: Final = "unknown"
"""Code of a response that is not an API error."""


class ChatMessage(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str
    reasoning_content: NotRequired[str]


class Thought(str):
    """A piece of reasoning, which precedes the answer."""

    __slots__ = ()


class AnswerFailed(CommandFailed):
    """The server ended an answer with an error; the conversation can continue.

    Attributes:
      code: error code of the API.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class AnswerTimes:
    """Timing of an answer, measured at the client.

    Attributes:
      asked_at: monotonic time of the question.
      first_at: monotonic time of the first text.
      last_at: monotonic time of the last text.
      tokens: number of tokens by the server's count; None until it arrives, and for a stopped
        answer.
      finish_reason: `stop` or `length`; None if there was none.
    """

    asked_at: float
    first_at: float | None = None
    last_at: float | None = None
    tokens: int | None = None
    finish_reason: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_at is None else self.first_at - self.asked_at

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after the first; None for fewer than two tokens."""
        if self.tokens is None or self.first_at is None or self.last_at is None:
            return None
        took_s = self.last_at - self.first_at
        return (self.tokens - 1) / took_s if self.tokens > 1 and took_s > 0 else None

    def saw_text(self, now: float) -> None:
        """Record that text arrived."""
        self.first_at = now if self.first_at is None else self.first_at
        self.last_at = now


class ChatClient:
    """A client of a server's chat endpoint.

    Args:
      url: base address of the server.
      parameters: sampling parameters sent with each question.

    Raises:
      ConfigError: the address is not an HTTP URL.
    """

    def __init__(self, url: str, parameters: dict[str, float]) -> None:
        self._url = url.rstrip("/")
        self._parameters = parameters
        try:
            is_web = httpx2.URL(url).scheme in {"http", "https"}
        except httpx2.InvalidURL:
            is_web = False
        require(is_web, "--url", url, "a base address such as http://127.0.0.1:8000")
        self._http = httpx2.Client(
            base_url=self._url,
            headers=key_headers(),
            timeout=httpx2.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=False,
            verify=verify_for(self._url),
        )

    def close(self) -> None:
        """Close every connection."""
        self._http.close()

    def model_name(self) -> str:
        """Return the name of the first model of the server.

        Raises:
          CommandFailed: no Triolet server answers.
        """
        with self._explained():
            answer = self._http.get("/v1/models")
        if answer.is_client_error or answer.is_server_error:
            refusal = _failure(answer.content, answer.status_code)
            if refusal.code != UNKNOWN:
                raise CommandFailed(f"{self._url} answers {answer.status_code}: {refusal}")
        try:
            return str(answer.raise_for_status().json()["data"][0]["id"])
        except (httpx2.HTTPStatusError, ValueError, LookupError, TypeError) as error:
            raise CommandFailed(
                f"{self._url} is not a Triolet server ({answer.status_code} for /v1/models); give "
                "the address of one with --url"
            ) from error

    def ask(self, model: str, messages: list[ChatMessage], times: AnswerTimes) -> Generator[str]:
        """Yield the answer in pieces, reasoning as Thought. Closing the iterator cancels the
        request.

        Args:
          model: model name.
          messages: the conversation, ending with the question.
          times: updated while the answer arrives.

        Raises:
          AnswerFailed: the server refused the request or failed.
          CommandFailed: the connection broke.
        """
        body = {
            "model": model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._parameters,
        }
        with (
            self._explained(),
            self._http.stream("POST", "/v1/chat/completions", json=body) as answer,
        ):
            if not answer.is_success:
                raise _failure(answer.read(), answer.status_code)
            for line in answer.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == DONE:
                    return
                for piece in _take_chunk(data, times, self._url):
                    times.saw_text(time.monotonic())
                    yield piece
        raise CommandFailed(f"{self._url} closed the stream in the middle of an answer")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except httpx2.ConnectError as error:
            raise CommandFailed(
                f"no server answers at {self._url}; start one with `triolet serve`, or give its "
                "address with --url"
            ) from error
        except httpx2.TransportError as error:
            cause = one_line(said_by(error))
            raise CommandFailed(f"lost the connection to {self._url}: {cause}") from error


def _take_chunk(data: str, times: AnswerTimes, url: str) -> list[str]:
    """Return the pieces of one chunk; store its token count and finish reason in `times`."""
    try:
        chunk = json.loads(data)
        if "error" in chunk:
            raise _failure(data.encode(), status=None)
        if chunk.get("usage"):
            times.tokens = int(chunk["usage"]["completion_tokens"])
        pieces: list[str] = []
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name, kind in (("reasoning_content", Thought), ("content", str)):
                if text := "" + (delta.get(name) or ""):
                    pieces.append(kind(text))
            times.finish_reason = choice.get("finish_reason") or times.finish_reason
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CommandFailed(f"{url} sent an invalid chunk of an answer") from error
    return pieces


def _failure(body: bytes, status: int | None) -> AnswerFailed:
    try:
        error = json.loads(body)["error"]
        message, code = one_line(str(error["message"])), str(error.get("code"))
    except (ValueError, LookupError, TypeError):
        return AnswerFailed(f"the server answered with status {status}", UNKNOWN)
    remedy = None if status is None else key_remedy(status)
    return AnswerFailed(message if remedy is None else f"{message}; {remedy}", code)

"""What a stream says, and whether it ended as the protocol wants: SSE lines and WebSocket events.

Pure: bytes and messages come in from whoever holds the socket. A stream that merely stops is a
failure, because clients cannot tell it from a complete answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class StreamFailedError(Exception):
    """The stream broke a rule of its protocol, or said that it failed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New text."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The one good end, with the server's count of completion tokens."""

    tokens: int


Part: TypeAlias = Piece | End


def read_chat_sse(lines: Iterable[bytes]) -> Iterator[Part]:
    """Read a streamed chat completion that was asked for with usage.

    Raises:
      StreamFailedError: an error event, no finish_reason, no usage, or no [DONE].
    """
    finish_reason: str | None = None
    tokens: int | None = None
    for line in lines:
        if not line.startswith(b"data: "):
            continue  # blank lines part events; comments keep the connection alive
        data = line.removeprefix(b"data: ")
        if data == b"[DONE]":
            yield _end(finish_reason, tokens)
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise StreamFailedError(f"error event: {_reason(chunk['error'])}")
        if chunk.get("usage"):
            tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            finish_reason = choice.get("finish_reason") or finish_reason
            if text := choice["delta"].get("content"):
                yield Piece(text)
    raise StreamFailedError("ended without [DONE]")


def _end(finish_reason: str | None, tokens: int | None) -> End:
    if finish_reason is None:
        raise StreamFailedError("ended without finish_reason")
    if tokens is None:
        raise StreamFailedError("ended without usage")
    return End(tokens)


def read_response_events(messages: Iterable[str | bytes]) -> Iterator[Part]:
    """Read one response out of a WebSocket's messages; leaves the rest unread.

    Raises:
      StreamFailedError: an error event, a failed response, or no terminal event.
    """
    for message in messages:
        event: dict[str, Any] = json.loads(message)
        match event["type"]:
            case "response.output_text.delta":
                yield Piece(event["delta"])
            case "response.completed" | "response.incomplete":
                yield End(event["response"]["usage"]["output_tokens"])
                return
            case "response.failed":
                error = event["response"].get("error") or {}
                # What the API has no word for stands in `type`.
                raise StreamFailedError(f"failed: {error.get('type') or _reason(error)}")
            case "error":
                raise StreamFailedError(f"error event: {_reason(event.get('error'))}")
    raise StreamFailedError("ended without a terminal event")


def _reason(error: dict[str, Any] | None) -> str:
    """Say the error's stable word: numbers in messages would split locust's failure table."""
    return str((error or {}).get("code") or "no code given")

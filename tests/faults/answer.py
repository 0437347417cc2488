"""A client's record of one answer in the fault matrix: its tokens, its text and its end. Pure:
input is parsed events.

The two surfaces use different formats; this is what must be the same in both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Said:
    """Everything that an exact continuation must not change.

    Attributes:
      tokens: tokens from the stream's logprobs.
      text: all deltas.
      num_tokens: count in the usage; None before the end.
      ends: every terminal event, in order; a correct stream has one.
    """

    tokens: tuple[str, ...]
    text: str
    num_tokens: int | None
    ends: tuple[str, ...]


@dataclass(eq=False)
class Answer:
    """Collects one answer.

    Attributes:
      is_done: the protocol's last message has arrived ([DONE]; a terminal event).
    """

    tokens: list[str] = field(default_factory=list)
    text: str = ""
    num_tokens: int | None = None
    ends: list[str] = field(default_factory=list)
    is_done: bool = False

    @property
    def said(self) -> Said:
        """What has arrived so far."""
        return Said(tuple(self.tokens), self.text, self.num_tokens, tuple(self.ends))

    def take_sse(self, data: str) -> None:
        """Add the data of one event of a streamed chat completion."""
        if data == "[DONE]":
            self.is_done = True
            return
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            self.ends.append(f"error:{event['error']['code']}")
            return
        if event.get("usage"):
            self.num_tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            self.text += choice["delta"].get("content") or ""
            for entry in (choice.get("logprobs") or {}).get("content") or ():
                self.tokens.append(entry["token"])
            if choice.get("finish_reason"):
                self.ends.append(choice["finish_reason"])

    def take_ws(self, message: str) -> None:
        """Add one event of the Responses WebSocket."""
        event: dict[str, Any] = json.loads(message)
        match event["type"]:
            case "response.output_text.delta":
                self.text += event["delta"]
                self.tokens += [entry["token"] for entry in event.get("logprobs") or ()]
            case "response.completed" | "response.incomplete":
                response = event["response"]
                details = response.get("incomplete_details") or {}
                is_cancelled = response.get("status") == "cancelled"
                reason = details.get("reason") or ("cancelled" if is_cancelled else "stop")
                # The same end under another name.
                self.ends.append("length" if reason == "max_output_tokens" else reason)
                self.num_tokens = response["usage"]["output_tokens"]
                self.is_done = True
            case "response.failed":
                error = event["response"].get("error") or {}
                self.ends.append(f"error:{error.get('type') or error.get('code')}")
                self.is_done = True
            case "error":
                self.ends.append(f"error:{event['error']['code']}")
                self.is_done = True

"""Serializers of streamed chats and completions as Server-Sent Events, with reasoning and tool
calls separated from the text.

Most chunks differ only in their text, so everything around it is encoded once.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ...contract.generation import Delta, Event, Finished, FinishReason, Usage
from ...text.tool_forms.reasoning import Thinking, reader_of
from ...text.tool_forms.tool_calls import Arguments, CallBegins, CallsRead, Piece, Reasoning, Text
from ...text.tool_forms.whole_calls import WholeCalls, joined
from ..errors import error_body
from ..sampling import chat_logprobs, completion_logprobs, completion_top
from ..stream import Answer, Serializer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from triolet.errors import RequestError


DONE: Final = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def error_events(error: RequestError) -> list[bytes]:
    """Return the end of a failed stream: the error, then DONE."""
    return [b"data: " + error_body(error) + b"\n\n", DONE]


def total_usage(usages: Sequence[Usage], per_prompt: int) -> dict[str, Any]:
    """Return the value of `usage`.

    Args:
      usages: one per choice, in order.
      per_prompt: number of choices that share a prompt, which is counted once.
    """
    prompts = usages[::per_prompt]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    reasoning = [n for usage in usages if (n := usage.reasoning_tokens) is not None]
    details = {"completion_tokens_details": {"reasoning_tokens": sum(reasoning)}}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
        **(details if reasoning else {}),
    }


class RunningUsage:
    """Token counts of a stream so far.

    Args:
      prompt_tokens: tokens of all prompts.
      count: number of choices.
    """

    def __init__(self, prompt_tokens: int, count: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = [0] * count

    def take(self, index: int, event: Event) -> None:
        """Add the tokens of an event; a terminal event has its choice's total."""
        if isinstance(event, Delta):
            self._completion_tokens[index] += len(event.token_ids)
        else:
            self._completion_tokens[index] = event.usage.completion_tokens

    def shown(self) -> bytes:
        """Return the value of a chunk's `usage`."""
        completion_tokens = sum(self._completion_tokens)
        return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
            self._prompt_tokens,
            completion_tokens,
            self._prompt_tokens + completion_tokens,
        )


class Envelope:
    """The JSON around every choice of a stream.

    Args:
      head: the fields that all chunks share: id, object, created, model.
      count: number of choices.
      per_prompt: number of choices that share a prompt.
      with_usage: whether the client asked for usage; all chunks but the usage chunk then have null.
      with_token_ids: whether each chunk lists its tokens.
      running: counts for every chunk (`continuous_usage_stats`); None for none.
    """

    def __init__(
        self,
        head: dict[str, Any],
        *,
        with_usage: bool,
        with_token_ids: bool,
        count: int = 1,
        per_prompt: int = 1,
        running: RunningUsage | None = None,
    ) -> None:
        self.count = count
        self.per_prompt = per_prompt
        self.with_usage = with_usage
        self.with_token_ids = with_token_ids
        self.running = running
        self._head = b"data: " + _encode(head)[:-1]
        self._opening = self._head + b',"choices":[{"index":'
        self._tail = b',"usage":null}\n\n' if with_usage else b"}\n\n"

    def chunk(
        self,
        index: int,
        content: bytes,
        *,
        logprobs: bytes = b"null",
        reason: bytes = b"null",
        more: bytes = b"",
    ) -> bytes:
        """Return a chunk with one choice. All parts are JSON; `content` and `more` include keys."""
        tail = self._tail
        if self.running is not None:
            tail = b',"usage":%b}\n\n' % self.running.shown()
        form = b'%b%d,%b,"logprobs":%b,"finish_reason":%b%b}]%b'
        return form % (self._opening, index, content, logprobs, reason, more, tail)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Return the chunk with the usage and no choice."""
        return b'%b,"choices":[],"usage":%b}\n\n' % (self._head, _encode(usage))

    def token_ids(self, ids: Sequence[int]) -> bytes:
        """Return the field that lists tokens, if requested."""
        return b',"token_ids":' + _encode(list(ids)) if self.with_token_ids else b""


class ChunkStream(Serializer):
    """Base class for chunks of chats and completions.

    Args:
      envelope: the JSON around every choice.
    """

    def __init__(self, envelope: Envelope) -> None:
        self.envelope = envelope
        self._usages: list[Usage | None] = [None] * envelope.count

    @abstractmethod
    def first(self, index: int) -> bytes:
        """Return the chunk before a choice's text; may be empty."""

    @abstractmethod
    def delta(self, index: int, delta: Delta) -> list[bytes]:
        """Return the chunks of new text."""

    @abstractmethod
    def finish(self, index: int, end: Finished) -> list[bytes]:
        """Return the last chunks of a choice, one of them with a finish_reason."""

    def begin(self) -> list[bytes]:
        """Return the first chunk of every choice."""
        return [chunk for index in range(len(self._usages)) if (chunk := self.first(index))]

    def event(self, index: int, event: Event) -> list[bytes]:
        """Return an event's chunks."""
        envelope = self.envelope
        if envelope.running is not None:
            envelope.running.take(index, event)
        if isinstance(event, Delta):
            # A delta without anything to show is an incomplete character.
            is_shown = event.text or event.logprobs or (envelope.with_token_ids and event.token_ids)
            return self.delta(index, event) if is_shown else []
        if isinstance(event, Finished):
            self._usages[index] = event.usage
            return self.finish(index, event)
        return error_events(event.error)

    def end(self) -> list[bytes]:
        """Return the usage, if requested, and DONE."""
        if not self.envelope.with_usage:
            return [DONE]
        usages = [usage for usage in self._usages if usage is not None]
        return [self.envelope.usage(total_usage(usages, self.envelope.per_prompt)), DONE]


class CompletionChunks(ChunkStream):
    """Chunks of plain completions.

    Args:
      envelope: the JSON around every choice.
      echoes: text before each choice's completion; empty for none.
    """

    def __init__(self, envelope: Envelope, echoes: Sequence[str]) -> None:
        super().__init__(envelope)
        self._echoes = echoes
        self._shown_chars = [len(text) for text in echoes]

    def first(self, index: int) -> bytes:
        """Return the chunk with the prompt, if it is echoed."""
        echo = self._echoes[index]
        return self.envelope.chunk(index, b'"text":' + _encode(echo)) if echo else b""

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        """Return the chunk of new text."""
        logprobs = b"null"
        if delta.logprobs:
            offset = self._shown_chars[index]
            tops = [completion_top(token) for token in delta.logprobs]
            logprobs = _encode(completion_logprobs(delta.logprobs, offset, tops))
        self._shown_chars[index] += len(delta.text)
        envelope = self.envelope
        more = envelope.token_ids(delta.token_ids) if envelope.with_token_ids else b""
        return [
            envelope.chunk(index, b'"text":' + _encode(delta.text), logprobs=logprobs, more=more)
        ]

    def finish(self, index: int, end: Finished) -> list[bytes]:
        """Return the chunk with the finish_reason."""
        return [self.envelope.chunk(index, b'"text":""', reason=_encode(end.reason))]


TOOL_CALLS: Final = "tool_calls"


def new_call_id() -> str:
    """Return a new id for a tool call."""
    return f"call_{secrets.token_hex(12)}"


def reason_of(end: Finished, num_calls: int) -> str:
    """Return the finish_reason of a completion with `num_calls` calls; truncation takes
    precedence."""
    is_whole = end.reason is FinishReason.STOP and not end.is_cut
    return TOOL_CALLS if num_calls and is_whole else str(end.reason)


def whole_message(
    answer: Answer, form: CallsRead | None, thinking: Thinking | None = None
) -> tuple[dict[str, Any], int]:
    """Return a message with reasoning and calls separated from its text, and the number of calls.

    A truncated call keeps the arguments generated so far, as in OpenAI's API.
    """
    reader = WholeCalls(reader_of(form, thinking))
    said = joined(reader.read(answer.text, is_cut=answer.finished.is_cut))
    message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["content"] = said.text or None
        message["tool_calls"] = [_call(call.name, call.arguments) for call in said.calls]
    return message, len(said.calls)


def _call(name: str, arguments: str = "") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": new_call_id(), "type": "function", "function": function}


class ChatChunks(ChunkStream):
    """Chunks of chat completions, with reasoning and tool calls.

    Args:
      envelope: the JSON around every choice.
      form: the format of tool calls in the text; None without tools.
      thinking: the format of reasoning in the text; None without reasoning.
    """

    def __init__(
        self, envelope: Envelope, form: CallsRead | None = None, thinking: Thinking | None = None
    ) -> None:
        super().__init__(envelope)
        self._is_plain = form is None and thinking is None
        self._readers = [reader_of(form, thinking) for _ in range(envelope.count)]

    def first(self, index: int) -> bytes:
        """Return the chunk with the role."""
        return self.envelope.chunk(index, b'"delta":{"role":"assistant","content":""}')

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        """Return the chunks of new text; the first one carries the token ids."""
        envelope, logprobs = self.envelope, b"null"
        more = envelope.token_ids(delta.token_ids) if envelope.with_token_ids else b""
        if delta.logprobs:
            logprobs = b'{"content":%b,"refusal":null}' % _encode(chat_logprobs(delta.logprobs))
        if self._is_plain:
            content = b'"delta":{"content":%b}' % _encode(delta.text)
            return [envelope.chunk(index, content, logprobs=logprobs, more=more)]
        contents = _contents(self._readers[index].push(delta.text))
        if not contents and (delta.logprobs or more):
            contents = [{"content": ""}]
        chunks: list[bytes] = []
        for shown in contents:
            content = b'"delta":' + _encode(shown)
            chunks.append(envelope.chunk(index, content, logprobs=logprobs, more=more))
            logprobs, more = b"null", b""
        return chunks

    def finish(self, index: int, end: Finished) -> list[bytes]:
        """Return the text held back, and the chunk with the finish_reason."""
        reader = self._readers[index]
        left = [
            self.envelope.chunk(index, b'"delta":' + _encode(content))
            for content in _contents(reader.finish(is_cut=end.is_cut))
        ]
        shown = _encode(reason_of(end, reader.num_calls))
        return [*left, self.envelope.chunk(index, b'"delta":{}', reason=shown)]


def _contents(pieces: Iterable[Piece]) -> Sequence[dict[str, Any]]:
    """Return the deltas of these pieces."""
    contents: list[dict[str, Any]] = []
    for piece in pieces:
        match piece:
            case Text():
                contents.append({"content": piece.text})
            case Reasoning():
                contents.append({"reasoning_content": piece.text})
            case CallBegins():
                contents.append({"tool_calls": [{"index": piece.index, **_call(piece.name)}]})
            case Arguments():
                function = {"arguments": piece.text}
                contents.append({"tool_calls": [{"index": piece.index, "function": function}]})
    return contents

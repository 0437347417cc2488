"""Chat completions with reasoning or tools: both taken out of the text, whole or as chunks."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ...contract.generation import FinishReason
from ...text.tool_calls import Arguments, CallBegins, Reasoning, Text
from ..logprobs import chat_logprobs
from ..pieces import reader_of
from .chunks import ChatChunks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ...contract.generation import Delta, Finished
    from ...text.reasoning import Thinking
    from ...text.tool_calls import Piece, PieceReader, ToolForm
    from ..stream import Answer
    from .chunks import Envelope

TOOL_CALLS: Final = "tool_calls"
_encode = msgspec.json.Encoder().encode


def new_call_id() -> str:
    """Return a name for a call, by which its result is told."""
    return f"call_{secrets.token_hex(12)}"


def reason_of(end: Finished, num_calls: int) -> str:
    """Return how a completion with so many calls ended; one that was cut was cut."""
    is_whole = end.reason is FinishReason.STOP and not end.is_cut
    return TOOL_CALLS if num_calls and is_whole else str(end.reason)


def whole_message(
    answer: Answer, form: ToolForm | None, thinking: Thinking | None = None
) -> tuple[dict[str, Any], int]:
    """Return a message whose reasoning and calls are taken out of its text, and how many calls
    there are.

    The arguments of a call that was cut are what there is of them, as in OpenAI's answers.
    """
    reader = reader_of(form, thinking)
    content = reasoning = ""
    calls: list[dict[str, Any]] = []
    for piece in reader.push(answer.text) + reader.finish(is_cut=answer.finished.is_cut):
        match piece:
            case Reasoning():
                reasoning += piece.text
            case Text():
                content += piece.text
            case CallBegins():
                calls.append(_call(piece))
            case Arguments():
                calls[piece.index]["function"]["arguments"] += piece.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["content"] = content or None
        message["tool_calls"] = calls
    return message, len(calls)


def _call(piece: CallBegins) -> dict[str, Any]:
    function = {"name": piece.name, "arguments": ""}
    return {"id": new_call_id(), "type": "function", "function": function}


class ToolChunks(ChatChunks):
    """Chunks of chat completions in which the model may reason and call tools.

    Args:
      envelope: what surrounds them.
      form: how calls are written; None if there are none.
      thinking: how reasoning is written; None if there is none.
    """

    def __init__(
        self, envelope: Envelope, form: ToolForm | None, thinking: Thinking | None = None
    ) -> None:
        super().__init__(envelope)
        self._form = form
        self._thinking = thinking
        self._readers: dict[int, PieceReader] = {}

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        """Return the chunks of new text; those of its tokens go with the first."""
        contents = _contents(self._reader(index).push(delta.text))
        more = self.envelope.token_ids(delta.token_ids)
        if not contents and (delta.logprobs or more):
            contents = [{"content": ""}]
        chunks: list[bytes] = []
        for content in contents:
            is_first = not chunks
            logprobs = b"null"
            if is_first and delta.logprobs:
                logprobs = b'{"content":%b,"refusal":null}' % _encode(chat_logprobs(delta.logprobs))
            chunks.append(
                self.envelope.chunk(
                    index,
                    b'"delta":' + _encode(content),
                    logprobs=logprobs,
                    more=more if is_first else b"",
                )
            )
        return chunks

    def finish(self, index: int, end: Finished) -> list[bytes]:
        """Return what was held back, and the one chunk with a finish_reason."""
        reader = self._reader(index)
        left = [
            self.envelope.chunk(index, b'"delta":' + _encode(content))
            for content in _contents(reader.finish(is_cut=end.is_cut))
        ]
        shown = _encode(reason_of(end, reader.num_calls))
        return [*left, self.envelope.chunk(index, b'"delta":{}', reason=shown)]

    def _reader(self, index: int) -> PieceReader:
        if index not in self._readers:
            self._readers[index] = reader_of(self._form, self._thinking)
        return self._readers[index]


def _contents(pieces: Iterable[Piece]) -> Sequence[dict[str, Any]]:
    """Return the deltas that show these pieces."""
    contents: list[dict[str, Any]] = []
    for piece in pieces:
        match piece:
            case Text():
                contents.append({"content": piece.text})
            case Reasoning():
                contents.append({"reasoning_content": piece.text})
            case CallBegins():
                contents.append({"tool_calls": [{"index": piece.index, **_call(piece)}]})
            case Arguments():
                function = {"arguments": piece.text}
                contents.append({"tool_calls": [{"index": piece.index, "function": function}]})
    return contents

"""Answers in the words of Ollama's API: one object, or lines of objects of which the last is done.

A call of a tool is written at once, when its arguments are complete. Into a silence a line
without text is written: clients add it to what they have, and a client that left is found out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ...contract.generation import Delta, Failed, Finished
from ...text.tool_calls import Arguments, CallBegins, Reasoning, Text
from ..openai.tools import parsed_arguments
from ..pieces import reader_of
from ..stream import Serializer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from triolet.errors import RequestError

    from ...contract.generation import Event
    from ...text.reasoning import Thinking
    from ...text.tool_calls import Piece, ToolForm
    from ..stream import Answer

Call = dict[str, Any]
"""A call of a tool, as this API shows it."""
_encode = msgspec.json.Encoder().encode
NS_PER_S: Final = 1_000_000_000


def ollama_error(error: RequestError) -> dict[str, Any]:
    """Return an error in this API's form, which has a message only."""
    message = error.message
    if error.param and not message.startswith(error.param):
        message = f"{error.param}: {message}"
    return {"error": message}


def stamp(at: float | None = None) -> str:
    """Return a Unix time, or the present one, as RFC 3339 has it."""
    moment = datetime.fromtimestamp(time.time() if at is None else at, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class Clock:
    """The times of one request.

    Attributes:
      began_at: when it came.
      submitted_at: when it was queued.
      now: the clock of both [s].
    """

    began_at: float
    submitted_at: float
    now: Callable[[], float]

    def durations(self, end: Finished) -> dict[str, int]:
        """Return what a request took, in nanoseconds.

        The model is loaded all along. A prompt's time is from its dispatch to the first token, so
        the time in the queue is in the total only; the rest is the completion's, with what its
        reader kept it waiting.
        """
        now, usage = self.now(), end.usage
        ttft_s = usage.queue_s if usage.ttft_s is None else usage.ttft_s
        return {
            "total_duration": _ns(now - self.began_at),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(ttft_s - usage.queue_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(now - self.submitted_at - ttft_s),
        }


def _ns(seconds: float) -> int:
    return max(0, round(seconds * NS_PER_S))


class OllamaForm:
    """What surrounds one answer.

    Args:
      model: the served one.
      is_chat: the text is a message's content; otherwise a response.
    """

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self._model = model
        self._is_chat = is_chat

    def part(self, found: Iterable[Piece | Call] = (), **end: object) -> dict[str, Any]:
        """Return an object with what a completion says, and the end if it is the last."""
        text, thinking = "", ""
        calls: list[Call] = []
        for one in found:
            match one:
                case Text():
                    text += one.text
                case Reasoning():
                    thinking += one.text
                case dict():
                    calls.append(one)
        said = {"content" if self._is_chat else "response": text}
        said |= {"thinking": thinking} if thinking else {}
        head = {"model": self._model, "created_at": stamp()}
        if self._is_chat:
            message = {"role": "assistant", **said, **({"tool_calls": calls} if calls else {})}
            return head | {"message": message, "done": bool(end), **end}
        return head | said | {"done": bool(end), **end}

    def whole(self, answer: Answer, reader: AnswerReader, clock: Clock) -> bytes:
        """Return the answer at once."""
        found = [*reader.push(answer.text), *reader.finish(is_cut=answer.finished.is_cut)]
        return _encode(self.part(found, **self.end(answer.finished, clock)))

    def end(self, end: Finished, clock: Clock) -> dict[str, Any]:
        """Return what is said with the last of it."""
        return {"done_reason": str(end.reason), **clock.durations(end)}


def loaded(form: OllamaForm) -> bytes:
    """Return the answer to a request without a prompt."""
    return _encode(form.part(done_reason="load"))


class AnswerReader:
    """Reads one completion: text and reasoning as they come, calls when they are complete.

    Args:
      tool_form: how calls are written; None if there are none.
      thinking: how reasoning is written; None if there is none.
    """

    def __init__(self, tool_form: ToolForm | None, thinking: Thinking | None) -> None:
        self._reader = reader_of(tool_form, thinking)
        self._call: CallBegins | None = None
        self._arguments = ""

    def push(self, text: str) -> list[Piece | Call]:
        """Take more text; return what it says."""
        return self._take(self._reader.push(text))

    def finish(self, *, is_cut: bool) -> list[Piece | Call]:
        """Return what was held back, now that nothing follows.

        Args:
          is_cut: the completion ended where its model would not have ended it.
        """
        return [*self._take(self._reader.finish(is_cut=is_cut)), *self._complete()]

    def _take(self, pieces: Iterable[Piece]) -> list[Piece | Call]:
        found: list[Piece | Call] = []
        for piece in pieces:
            match piece:
                case Text() | Reasoning():
                    found += [*self._complete(), piece]
                case CallBegins():
                    found += self._complete()
                    self._call = piece
                case Arguments():
                    self._arguments += piece.text
        return found

    def _complete(self) -> list[Call]:
        """Return the call whose arguments have ended, if one was open; one with half its arguments
        is none, because clients of this API run what they are told."""
        if self._call is None:
            return []
        call, self._call = self._call, None
        text, self._arguments = self._arguments, ""
        arguments = parsed_arguments(text)
        if not isinstance(arguments, dict):
            return []
        function = {"index": call.index, "name": call.name, "arguments": arguments}
        return [{"id": f"call_{call.index}", "function": function}]


class LineStream(Serializer):
    """The stream of one answer.

    Args:
      form: what surrounds it.
      reader: of its completion.
      clock: of its request.
    """

    def __init__(self, form: OllamaForm, reader: AnswerReader, clock: Clock) -> None:
        self._form = form
        self._clock = clock
        self._reader = reader

    @property
    def keep_alive(self) -> bytes:  # type: ignore[override]
        """A line without text: this form has no comments."""
        return _line(self._form.part())

    def event(self, index: int, event: Event) -> list[bytes]:
        """Return the lines of an event; the last of them ends the stream."""
        del index  # there is one choice
        match event:
            case Delta():
                return [self._line(found) for found in self._reader.push(event.text)]
            case Finished():
                rest = [self._line(one) for one in self._reader.finish(is_cut=event.is_cut)]
                return [*rest, _line(self._form.part(**self._form.end(event, self._clock)))]
            case Failed():
                return [_line(ollama_error(event.error))]

    def _line(self, found: Piece | Call) -> bytes:
        return _line(self._form.part([found]))


def _line(document: dict[str, Any]) -> bytes:
    return _encode(document) + b"\n"

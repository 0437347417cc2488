"""Answers in the words of Ollama's API: one object, or lines of objects of which the last is done.

A call of a tool is written at once, when its arguments are complete. Into a silence a line
without text is written: clients add it to what they have, and a client that left is found out.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ...generation import Delta, Failed, Finished
from ...jobs.storage import time_of_day
from ...text.tool_calls import Arguments, CallBegins, Text
from ..pieces import reader_of
from ..tools import parsed_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from triolet.errors import RequestError

    from ...generation import Event
    from ...text.tool_calls import Piece, ToolForm
    from ..answers import Answer

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
    moment = datetime.fromtimestamp(time_of_day() if at is None else at, UTC)
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

    def part(
        self, text: str, calls: list[dict[str, Any]] | None = None, **end: object
    ) -> dict[str, Any]:
        """Return an object with text or calls, and the end if it is the last."""
        head = {"model": self._model, "created_at": stamp()}
        if not self._is_chat:
            return head | {"response": text, "done": bool(end), **end}
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = calls
        return head | {"message": message, "done": bool(end), **end}

    def whole(self, answer: Answer, tool_form: ToolForm | None, clock: Clock) -> bytes:
        """Return the answer at once."""
        reader = CallReader(tool_form)
        found = [*reader.push(answer.text), *reader.finish()]
        text = "".join(one for one in found if isinstance(one, str))
        calls = [one for one in found if not isinstance(one, str)]
        return _encode(self.part(text, calls, **self.end(answer.finished, clock)))

    def end(self, end: Finished, clock: Clock) -> dict[str, Any]:
        """Return what is said with the last of it."""
        return {"done_reason": str(end.reason), **clock.durations(end)}


def loaded(form: OllamaForm) -> bytes:
    """Return the answer to a request without a prompt."""
    return _encode(form.part("", done_reason="load"))


class CallReader:
    """Reads one completion: texts as they come, calls when they are complete.

    Args:
      tool_form: how calls are written; None if there are none.
    """

    def __init__(self, tool_form: ToolForm | None) -> None:
        self._reader = reader_of(tool_form)
        self._call: CallBegins | None = None
        self._arguments = ""

    def push(self, text: str) -> list[str | dict[str, Any]]:
        """Take more text; return what it says."""
        return self._take(self._reader.push(text))

    def finish(self) -> list[str | dict[str, Any]]:
        """Return what was held back, now that nothing follows."""
        return [*self._take(self._reader.finish()), *self._complete()]

    def _take(self, pieces: Iterable[Piece]) -> list[str | dict[str, Any]]:
        found: list[str | dict[str, Any]] = []
        for piece in pieces:
            match piece:
                case Text():
                    found += [*self._complete(), piece.text]
                case CallBegins():
                    found += self._complete()
                    self._call = piece
                case Arguments():
                    self._arguments += piece.text
        return found

    def _complete(self) -> list[str | dict[str, Any]]:
        """Return the call whose arguments have ended, if one was open."""
        if self._call is None:
            return []
        call, self._call = self._call, None
        text, self._arguments = self._arguments, ""
        # What was cut at the limit is no object; the done_reason says so.
        given = parsed_arguments(text)
        arguments = given if isinstance(given, dict) else {}
        function = {"index": call.index, "name": call.name, "arguments": arguments}
        return [{"id": f"call_{call.index}", "function": function}]


class LineStream:
    """The stream of one answer (see StreamForm).

    Args:
      form: what surrounds it.
      tool_form: how calls are written; None if there are none.
      clock: of its request.
    """

    def __init__(self, form: OllamaForm, tool_form: ToolForm | None, clock: Clock) -> None:
        self._form = form
        self._clock = clock
        self._reader = CallReader(tool_form)

    @property
    def keep_alive(self) -> bytes:
        """A line without text: this form has no comments."""
        return self._line("")

    def begin(self) -> bytes:
        """Return nothing: the first line has the first text."""
        return b""

    def write(self, index: int, event: Event) -> bytes:
        """Return the lines of an event; the last of them ends the stream."""
        del index  # there is one choice
        match event:
            case Delta():
                return b"".join(map(self._line, self._reader.push(event.text)))
            case Finished():
                rest = b"".join(map(self._line, self._reader.finish()))
                return rest + _line(self._form.part("", **self._form.end(event, self._clock)))
            case Failed():
                return _line(ollama_error(event.error))

    def end(self) -> bytes:
        """Return nothing: the line that is done was the end."""
        return b""

    def _line(self, found: str | dict[str, Any]) -> bytes:
        is_text = isinstance(found, str)
        text = found if isinstance(found, str) else ""
        return _line(self._form.part(text, None if is_text else [found]))  # type: ignore[list-item]


def _line(document: dict[str, Any]) -> bytes:
    return _encode(document) + b"\n"

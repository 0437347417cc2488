"""The pieces of a parsed completion, the base classes of tool call formats, and the JSON formats.

Text that looks like a call but is not one becomes text again; a truncated call never does.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from triolet.sampling import JSON_WHITESPACE

from .scanning import HALF_PAIR, ValueEnd, before_first, first_of, no_constant, overlap, written

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Text:
    """Text beside calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The start of a call: its index and the tool's name."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments: a piece of JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning before the answer."""

    text: str


Piece = Text | CallBegins | Arguments | Reasoning


class PieceReader(Protocol):
    """Parses one completion."""

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        ...

    def push(self, text: str) -> list[Piece]:
        """Process more text; return the parsed pieces."""
        ...

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the pieces held back at the end.

        Args:
          is_cut: whether the completion was truncated. What follows a complete call opening is then
            dropped: half a call is neither a call nor text. An incomplete opening is text, unless
              only whitespace separates it from a call.
        """
        ...


class HoldingReader(ABC):
    """Base class of parsers that hold text back and process it part by part.

    Attributes:
      num_calls: number of calls so far.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._held = ""
        self._opened = ""  # an opening before the held text, which may not be a call
        self._has_text = False  # whether text followed the last call
        self._pieces: list[Piece] = []
        self._parts = self._read()

    def push(self, text: str) -> list[Piece]:
        """Process more text; return the parsed pieces."""
        self._held += text
        next(self._parts)
        return self._taken()

    @abstractmethod
    def _read(self) -> Generator[None, None, None]:
        """Process the held text part by part; yield when more text is needed, and then examine the
        held text again. Never ends."""

    def _taken(self) -> list[Piece]:
        """Return the pieces found since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def _take_text(self, openings: Sequence[str]) -> Generator[None, None, str]:
        """Return text pieces up to the first of some openings; return that opening, which stays
        held."""
        while True:
            if self.num_calls and not self._has_text:
                self._unblank()
            shown, opening = before_first(self._held, openings)
            # Whitespace before or between calls is not text, unless text comes before it, or there
            # is too much of it to hold.
            if shown.strip() or (shown and self._has_text) or len(shown) > MAX_BLANKS:
                self._show_text(shown)
                self._held = self._held[len(shown) :]
            if opening:
                self._held = self._held[self._held.index(opening) :]
                return opening
            yield

    def _unblank(self, blanks: str | None = None) -> str:
        """Return the held text without leading characters of `blanks`, all whitespace if None. They
        stay held because text may follow; only the last MAX_BLANKS of them are kept."""
        begin = self._held.lstrip(blanks)
        num_blanks = len(self._held) - len(begin)
        if num_blanks > MAX_BLANKS:
            self._held = self._held[num_blanks - MAX_BLANKS :]
        return begin

    def _first(self) -> Generator[None, None, str]:
        """Drop whitespace; return the next character, which stays held."""
        while not (begin := self._held.lstrip()):
            self._held = ""
            yield
        self._held = begin
        return begin[0]

    def _show_text(self, text: str) -> None:
        self._pieces.append(Text(text))
        self._has_text = True

    def _show_arguments(self, text: str) -> None:
        self._pieces.append(Arguments(self.num_calls - 1, text))

    def _begin_call(self, name: str) -> None:
        self._pieces.append(CallBegins(self.num_calls, name))
        self.num_calls += 1
        self._opened, self._has_text = "", False

    def _take_all(self) -> str:
        """Return all held text and stop holding it, at the end."""
        self._parts.close()  # breaks its reference cycle with this reader
        held, self._opened, self._held = self._opened + self._held, "", ""
        return held


class CallSchema(NamedTuple):
    """A tool that may be called.

    Attributes:
      name: the tool's name.
      arguments: JSON Schema of its arguments.
      is_strict: whether the arguments must match the schema exactly.
    """

    name: str
    arguments: Mapping[str, Any]
    is_strict: bool = False


class UnenforceableSchemaError(Exception):
    """A model's tool call format cannot enforce a schema; the message says where."""


class CallRules(NamedTuple):
    """The constraints of a completion's grammar.

    Attributes:
      tools: the allowed tools.
      is_forced: whether the completion consists only of calls; otherwise text is allowed, too.
      is_single: whether at most one call is allowed.
      token_ids: ids of markers that are single tokens.
    """

    tools: Sequence[CallSchema]
    is_forced: bool
    is_single: bool
    token_ids: Mapping[str, int]

    def marker(self, text: str) -> str:
        """Return a marker in a grammar: its token, or its characters."""
        token_id = self.token_ids.get(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    def opened(self, marker: str) -> list[str]:
        """Return the rules of `opened`: text up to a marker, and the marker."""
        spelled = f"[lazy]: TEXT {json.dumps(marker)}"
        if marker not in self.token_ids:
            return [f"opened{spelled}", ANY_TEXT]
        return [f"opened: spelled | TEXT {self.marker(marker)}", f"spelled{spelled}", ANY_TEXT]


ANY_TEXT: Final = r"TEXT: /(.|\n)*/"


class CallsRead(Protocol):
    """How to parse the tool calls of one request's completions."""

    def reader(self) -> PieceReader:
        """Return a parser for one completion."""
        ...


class ToolForm(CallsRead, Protocol):
    """A format in which a family of models writes tool calls."""

    @property
    def markers(self) -> Mapping[str, str]:
        """Tokens that a reader must see, with their form in the text."""
        ...

    def of_tools(self, schemas: Mapping[str, Mapping[str, Any]]) -> ToolForm:
        """Return the format for a request with these tools, given argument schemas by name. Formats
        that encode the types of values return themselves."""
        del schemas
        return self

    def rules(self, rules: CallRules) -> list[str]:
        """Return the Lark rules, including `start`, for completions within these constraints.

        Raises:
          UnenforceableSchemaError: this format cannot enforce a strict tool's schema, or cannot
            write a required property.
        """
        ...


def argument_json(schema: Mapping[str, Any]) -> str:
    """Return a grammar term for JSON of a schema, in the style of `json.dumps`."""
    own = {**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}
    return f"%json {json.dumps(own, ensure_ascii=False)}"


@dataclass(frozen=True, slots=True)
class JsonForm(ToolForm):
    """A format of calls as JSON objects with the tool's name and arguments.

    Attributes:
      openings: alternatives before a call or list of calls; grammars use the first. Empty if a
        completion that is a call starts with its brace.
      closing: the text after it.
      arguments: the key of the arguments, beside `name`.
      between: the separator of calls.
      is_list: whether calls are elements of one JSON list.
      name_end: the text between a tool's name and its arguments, in models that write both without
        an enclosing object; empty for others.
    """

    openings: tuple[str, ...]
    closing: str
    arguments: str
    between: str
    is_list: bool = False
    name_end: str = ""

    @property
    def markers(self) -> Mapping[str, str]:
        """See ToolForm."""
        more = (CALL_ID, self.name_end) if self.name_end else ()
        return {marker: marker for marker in (*self.openings, self.closing, *more) if marker}

    def reader(self) -> JsonCallReader:
        """See ToolForm."""
        return JsonCallReader(self)

    def rules(self, rules: CallRules) -> list[str]:
        """See ToolForm."""
        lines = [f"body: {' | '.join(f'call_{i}' for i in range(len(rules.tools)))}"]
        for index, tool in enumerate(rules.tools):
            value = argument_json(tool.arguments)
            if self.name_end and not self.is_list:
                lines.append(
                    f"call_{index}: {json.dumps(tool.name)} {rules.marker(self.name_end)} {value}"
                )
            else:
                head = json.dumps(f'{{"name": "{tool.name}", "{self.arguments}": ')
                lines.append(f'call_{index}: {head} {value} "}}"')
        return [*(self._tagged(rules) if self.openings else self._bare(rules)), *lines]

    def _bare(self, rules: CallRules) -> list[str]:
        more = "" if rules.is_single else f" ({json.dumps(self.between)} body)*"
        if rules.is_forced:
            return [f"start: body{more}"]
        return [f"start: TEXT | body{more}", r"TEXT: /([^{](.|\n)*)?/"]

    def _tagged(self, rules: CallRules) -> list[str]:
        more = "" if rules.is_single else f" ({json.dumps(self.between)} body)*"
        closing = f" {rules.marker(self.closing)}" if self.closing else ""
        if self.is_list:
            inner = f'" "? "[" body{more} "]"{closing}'
        elif self.name_end:
            inner = "body"
        else:
            inner = f'"\\n" body "\\n"{closing}'
        opening = self.openings[0]
        if not rules.is_forced:
            times = "?" if rules.is_single else "*"
            return [f"start: call{times} TEXT", f"call: opened {inner}", *rules.opened(opening)]
        again = f" ({json.dumps(self.between)} call)*" if self.between else " call*"
        many = "" if rules.is_single or self.is_list else again
        return [f"start: call{many}", f"call: {rules.marker(opening)} {inner}"]


CALL_ID: Final = "[CALL_ID]"
"""Follows a tool's name in some of Mistral's models, before an id of the call, which is dropped."""

HERMES: Final = JsonForm(("<tool_call>",), "</tool_call>", "arguments", "\n")
"""Hermes, Qwen and many others: JSON between tags, anywhere in the text."""
LLAMA: Final = JsonForm((), "", "parameters", "; ")
"""Llama 3: the whole completion is JSON."""
MISTRAL: Final = JsonForm(("[TOOL_CALLS]",), "", "arguments", ", ", is_list=True, name_end="[ARGS]")
"""Mistral 7B v0.3, Nemo, Small 3: one list after a token. Its reader accepts the newer form,
too."""
MISTRAL_NAMED: Final = JsonForm(("[TOOL_CALLS]",), "", "arguments", "", name_end="[ARGS]")
"""Mistral Small 3.2, Devstral, Magistral: each call after a token, its name outside of the JSON."""
GRANITE: Final = JsonForm(("<|tool_call|>", "<tool_call>"), "", "arguments", ", ", is_list=True)
"""Granite 3."""
PHI: Final = JsonForm(
    ("<|tool_call|>", "functools"), "<|/tool_call|>", "arguments", ", ", is_list=True
)
"""Phi-4-mini; `functools` is what it writes without its special tokens."""

MAX_BLANKS: Final = 256
"""Maximum whitespace held before a call, after its opening and after its end: the held text is
examined with each token."""
# Text that these match also matches _BEGUN_OBJECT and _BEGUN_NAME in every prefix.
_HEAD: Final = re.compile(
    r'\{\s{0,256}"name"\s{0,64}:\s{0,64}"([A-Za-z0-9_.-]{1,64})"\s{0,64},\s{0,64}'
    r'"(?:arguments|parameters)"\s{0,64}:\s{0,64}'
)
_BEGUN_OBJECT: Final = re.compile(r'\{\s{0,256}("(?P<key>[a-z]{0,16})(?P<end>")?)?')
_SECOND_KEY: Final = re.compile(
    r'\{\s{0,64}"name"\s{0,64}:\s{0,64}"(?:[^"\\]|\\.){0,256}"\s{0,64},\s{0,64}"([^"]{0,64})"'
)
_CALL_KEYS: Final = ("name", "arguments", "parameters", "type", "id", "function")
_NAMED_HEAD: Final = re.compile(
    r"([A-Za-z0-9_.-]{1,64})\s{0,64}(?:\[CALL_ID\]\s{0,64}[A-Za-z0-9_-]{0,64}\s{0,64})?"
    r"(?:\[ARGS\]\s{0,64})?(?=\{)"
)
_BEGUN_NAME: Final = re.compile(
    r"[A-Za-z0-9_.-]{1,64}\s{0,64}(\[[A-Z_]{0,7}(\][^\[\]{]{0,192}(\[[A-Z]{0,4}\]?)?)?\s{0,64})?"
)


class _State(Enum):
    TEXT = "text"
    OPENED = "opened"  # after an opening
    HEAD = "head"  # before the arguments of a call
    CALL = "call"  # in the arguments, or between them and the next call or text


class JsonCallReader(HoldingReader):
    """Parses one completion.

    Args:
      form: the format of its calls.
    """

    def __init__(self, form: JsonForm) -> None:
        super().__init__()
        self._form = form
        self._state = _State.TEXT
        self._is_list = False

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the pieces held back at the end."""
        is_left_out = self._state is _State.CALL or (is_cut and self._is_half_call())
        held = self._take_all()
        if is_left_out or (self.num_calls and not held.strip("; ,\r\n")):
            return []
        return [Text(held)] if held else []

    def _is_half_call(self) -> bool:
        """Whether the held text is part of a call if the completion is cut after it."""
        if self.num_calls and not self._has_text:
            return True
        match self._state:
            case _State.OPENED:
                return not self._opened.isalpha()  # a word opens a call only with its list
            case _State.HEAD if not self._form.openings:
                found = _BEGUN_OBJECT.match(self._held.lstrip())
                return found is not None and found["end"] is not None
        return self._state is _State.HEAD

    def _read(self) -> Generator[None, None, None]:
        has_objects = not self._form.openings
        while True:
            if has_objects:
                yield from self._take_objects()
            self._state = _State.TEXT
            opening = yield from self._take_text(self._form.openings)
            self._held = self._held[len(opening) :]
            self._opened, self._is_list = opening, False
            has_objects = yield from self._take_opened()

    def _take_opened(self) -> Generator[None, None, bool]:
        """Return whether a list or object follows the opening. Process a name with its arguments,
        and return anything else as text."""
        form, self._state = self._form, _State.OPENED
        while True:
            begin = self._held.lstrip()
            num_blanks = len(self._held) - len(begin)
            if num_blanks > MAX_BLANKS:
                break
            self._is_list = begin.startswith("[") and bool(form.is_list or form.name_end)
            if self._is_list or begin.startswith("{"):
                length = num_blanks + self._is_list
                self._opened += self._held[:length]
                self._held = self._held[length:]
                return True
            if form.name_end and (found := _NAMED_HEAD.match(begin)):
                self._held = begin[found.end() :]
                yield from self._take_call(found[1])
                yield from self._take_closing()
                return False
            if begin and not (form.name_end and _BEGUN_NAME.fullmatch(begin)):
                break
            yield
        self._be_text()
        return False

    def _take_objects(self) -> Iterator[None]:
        """Process the calls of a list, or a single one, to their end."""
        while (yield from self._take_object()):
            self._state = _State.CALL
            if not self._form.openings:
                continue
            if self._is_list:
                first = yield from self._first()
                if first != "]" and not self._is_closing(self._held):
                    continue
                self._held = self._held.removeprefix("]")  # may be missing
            yield from self._take_closing()
            return

    def _take_object(self) -> Generator[None, None, bool]:
        """Process a call or the end of a list; return whether it was one of them rather than text.

        A call is returned from its name on, or as a whole if the name does not come first.
        """
        self._state = _State.HEAD
        closing, value, scanned = self._form.closing, ValueEnd(), 0
        while True:
            begin = self._unblank("; ,\r\n\t") if self.num_calls else self._held.lstrip(" \r\n\t")
            if len(self._held) - len(begin) > MAX_BLANKS:
                break
            is_closing = self._is_list and self.num_calls > 0 and self._is_closing(begin)
            if begin and not (is_closing and not begin.startswith(closing)):
                if is_closing or (self._is_list and begin[0] == "]"):
                    # An empty list, or a separator before its end, has no meaning.
                    self._held, self._opened = begin, ""
                    return True
                found = _HEAD.match(begin)
                if found and found.end() < len(begin):
                    self._held = begin[found.end() :]
                    yield from self._take_call(found[1])
                    yield from self._take_value(ValueEnd(depth=1, is_one_line=True), is_shown=False)
                    return True
                if not _may_be_call(begin) or (not self._form.openings and _is_other_object(begin)):
                    break
                if not scanned:
                    self._opened += self._held[: len(self._held) - len(begin)]
                    self._held = begin
                scanned += value.push(self._held[scanned:])
                if value.is_over:
                    is_bare = not self._form.openings
                    call = _parsed_call(self._held[:scanned], needs_arguments=is_bare)
                    if call is None:
                        break
                    self._held = self._held[scanned:]
                    self._begin_call(call[0])
                    self._show_arguments(call[1])
                    return True
            yield
        self._be_text()
        return False

    def _take_call(self, name: str) -> Iterator[None]:
        """Start a call and return its arguments."""
        self._begin_call(name)
        self._state = _State.CALL
        if not (yield from self._take_value(ValueEnd(), is_shown=True)):
            self._show_arguments("{}")

    def _take_value(self, value: ValueEnd, *, is_shown: bool) -> Generator[None, None, bool]:
        """Process text to the end of a value; return whether there was any."""
        has_any = False
        while True:
            if not has_any:
                self._held = self._held.lstrip()
            length = value.push(self._held)
            if length:
                has_any = True
                if is_shown:
                    self._show_arguments(self._held[:length])
            self._held = self._held[length:]
            if value.is_over:
                return has_any
            yield

    def _is_closing(self, begin: str) -> bool:
        """Whether a text starts with what follows a list, or may do so with more text."""
        closing = self._form.closing
        return bool(closing) and (begin.startswith(closing) or closing.startswith(begin))

    def _take_closing(self) -> Iterator[None]:
        closing = self._form.closing
        if closing and not self._form.is_list:
            # Other text before the closing tag is dropped. An opening there starts another call:
            # the tag is missing.
            ends = (closing, *self._form.openings)
            while (place := first_of(self._held, ends)[0]) < 0:
                kept = max(overlap(self._held, word) for word in ends)
                self._held = self._held[len(self._held) - kept :]
                yield
            self._held = self._held[place:].removeprefix(closing)
        elif closing:
            while closing.startswith(begin := self._unblank()) and closing != begin:
                yield
            if begin.startswith(closing):
                self._held = begin[len(closing) :]

    def _be_text(self) -> None:
        """Return text that was taken for a call but is not one."""
        shown, self._opened, self._has_text = self._opened, "", True
        if not self._form.openings:
            # No opening is allowed in the following text.
            shown, self._held = shown + self._held, ""
        if shown:
            self._pieces.append(Text(shown))


def _may_be_call(begin: str) -> bool:
    """Whether an object may be a call, judging by the start of its first key."""
    found = _BEGUN_OBJECT.match(begin)
    if found is None:
        return False
    key = found["key"]
    if key is None:
        return len(begin) == found.end()
    if found["end"]:
        return key in _CALL_KEYS
    return len(begin) == found.end() and any(known.startswith(key) for known in _CALL_KEYS)


def _is_other_object(begin: str) -> bool:
    """Whether an object with a name is a JSON answer rather than a call, by its second key."""
    found = _SECOND_KEY.match(begin)
    return found is not None and found[1] not in _CALL_KEYS


def _parsed_call(body: str, *, needs_arguments: bool) -> tuple[str, str] | None:
    """Return a call's name and arguments, in any order of keys; None if it is not a call."""
    try:
        call = json.loads(body, parse_constant=no_constant)
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            call = call["function"]
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        if needs_arguments and not call.keys() & {"arguments", "parameters"}:
            return None
        if HALF_PAIR.search(call["name"]):
            return None
        return call["name"], written(call.get("arguments", call.get("parameters", {})))
    except (ValueError, RecursionError):
        return None

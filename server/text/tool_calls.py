"""Calls of tools as models write them: what a completion says piece by piece, and calls in JSON.

What looks like a call and turns out to be none is text again; a call that is cut is never text.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self

from triolet.sampling import JSON_WHITESPACE

from .scanning import HALF_PAIR, ValueEnd, before_first, first_of, no_constant, overlap, written

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Text:
    """Text beside calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call, by its index, and the tool's name."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments: a piece of JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks before it answers."""

    text: str


Piece = Text | CallBegins | Arguments | Reasoning


class PieceReader(Protocol):
    """Reads one completion."""

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        ...

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what it says."""
        ...

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return what was held back, now that nothing follows.

        Args:
          is_cut: the completion was ended before its model ended it. What stands behind a whole
            opening of a call is left out then: half a call is neither a call nor text. The
            beginning of an opening is text, unless only blanks stand between it and a call.
        """
        ...


class SteppedReader(ABC):
    """A reader that holds text back and takes one part of it after the other.

    Attributes:
      num_calls: so far.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._held = ""
        self._opened = ""  # before what is held: an opening of what may turn out to be no call
        self._has_text = False  # since the last call

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what it says."""
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    @abstractmethod
    def _step(self, pieces: list[Piece]) -> bool:
        """Take one part of what is held; return whether there may be another."""

    def _take_until(self, openings: Sequence[str], pieces: list[Piece]) -> str:
        """Show the text before the first of some openings; return that opening, which stays held,
        and nothing if there is none yet."""
        if self.num_calls and not self._has_text:
            self._unblank()
        shown, opening = before_first(self._held, openings)
        # Blanks before a call, or between two, are no text; they are if text comes before them, or
        # if there are too many of them to hold.
        if shown.strip() or (shown and self._has_text) or len(shown) > MAX_BLANKS:
            pieces.append(Text(shown))
            self._has_text = True
        elif not opening:
            return ""
        self._held = self._held[len(shown) :]
        return opening

    def _unblank(self, blanks: str | None = None) -> str:
        """Return what is held without these characters before it, all blanks if None. They stay
        held, for they may stand before text; of more than MAX_BLANKS the last ones do."""
        begin = self._held.lstrip(blanks)
        num_blanks = len(self._held) - len(begin)
        if num_blanks > MAX_BLANKS:
            self._held = self._held[num_blanks - MAX_BLANKS :]
        return begin

    def _take_all(self) -> str:
        """Return everything that is held, which is not held any more."""
        held, self._opened, self._held = self._opened + self._held, "", ""
        return held


class CallSchema(NamedTuple):
    """A tool that may be called.

    Attributes:
      name: of the tool.
      arguments: their JSON schema.
      is_strict: the arguments have to keep to every word of the schema.
    """

    name: str
    arguments: Mapping[str, Any]
    is_strict: bool = False


class UnenforceableSchemaError(Exception):
    """A schema asks for what a model's form of calls cannot be held to; says where."""


class CallRules(NamedTuple):
    """What a grammar demands of a completion.

    Attributes:
      tools: that may be called.
      is_forced: the completion is nothing but calls; otherwise it may hold text beside them.
      is_single: there is at most one call.
      token_ids: of markers that are one token of the model's vocabulary.
    """

    tools: Sequence[CallSchema]
    is_forced: bool
    is_single: bool
    token_ids: Mapping[str, int]

    def marker(self, text: str) -> str:
        """Return what a grammar calls a marker: its token, or its characters."""
        token_id = self.token_ids.get(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    def opened(self, marker: str) -> list[str]:
        """Return the rules of `opened`: text up to a marker, and the marker."""
        spelled = f"[lazy]: TEXT {json.dumps(marker)}"
        if marker not in self.token_ids:
            return [f"opened{spelled}", ANY_TEXT]
        return [f"opened: spelled | TEXT {self.marker(marker)}", f"spelled{spelled}", ANY_TEXT]


ANY_TEXT: Final = r"TEXT: /(.|\n)*/"


class ToolForm(Protocol):
    """How the models of one family write calls."""

    @property
    def markers(self) -> Mapping[str, str]:
        """Tokens that a reader has to see, and how the text shows each."""
        ...

    def of_tools(self, schemas: Mapping[str, Mapping[str, Any]]) -> ToolForm:
        """Return the form for a request with these tools: schemas of arguments by name."""
        ...

    def reader(self) -> PieceReader:
        """Return a reader of one completion."""
        ...

    def rules(self, rules: CallRules) -> list[str]:
        """Return the Lark rules, `start` among them, of completions that keep to `rules`.

        Raises:
          UnenforceableSchemaError: a strict tool cannot be held to its schema in this form, or a
            property that a tool requires cannot be written.
        """
        ...


def argument_json(schema: Mapping[str, Any]) -> str:
    """Return what a grammar calls JSON of a schema, written as `json.dumps` writes it."""
    own = {**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}
    return f"%json {json.dumps(own, ensure_ascii=False)}"


@dataclass(frozen=True, slots=True)
class JsonForm:
    """Calls that are JSON objects with the tool's name and its arguments.

    Attributes:
      openings: what comes before a call, or before a list of them; the first is the one that
        grammars demand. None of them if a completion that is a call begins with its brace.
      closing: what comes behind it.
      arguments: the key of the arguments, beside `name`.
      between: what stands between two calls.
      is_list: calls are elements of one JSON list.
      name_end: what stands between a tool's name and its arguments in models that write both
        without an object around them; empty in those that never do.
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

    def of_tools(self, schemas: Mapping[str, Mapping[str, Any]]) -> Self:
        """Return the form itself: JSON tells the types of its values."""
        del schemas
        return self

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
"""Behind a tool's name in some of Mistral's models: before an id of the call, which is dropped."""

HERMES: Final = JsonForm(("<tool_call>",), "</tool_call>", "arguments", "\n")
"""Hermes, Qwen and many others: JSON between tags, anywhere in the text."""
LLAMA: Final = JsonForm((), "", "parameters", "; ")
"""Llama 3: the whole completion is JSON."""
MISTRAL: Final = JsonForm(("[TOOL_CALLS]",), "", "arguments", ", ", is_list=True, name_end="[ARGS]")
"""Mistral 7B v0.3, Nemo, Small 3: one list behind a token. Its reader takes the newer form too."""
MISTRAL_NAMED: Final = JsonForm(("[TOOL_CALLS]",), "", "arguments", "", name_end="[ARGS]")
"""Mistral Small 3.2, Devstral, Magistral: each call behind a token, its name outside the JSON."""
GRANITE: Final = JsonForm(("<|tool_call|>", "<tool_call>"), "", "arguments", ", ", is_list=True)
"""Granite 3."""
PHI: Final = JsonForm(
    ("<|tool_call|>", "functools"), "<|/tool_call|>", "arguments", ", ", is_list=True
)
"""Phi-4-mini; `functools` is what it writes without its special tokens."""

MAX_BLANKS: Final = 256
"""Before a call, behind its opening and behind its end: what is held is looked at with each
token."""
# What these match begins with what _BEGUN_OBJECT and _BEGUN_NAME match, however it is cut.
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
    OPENED = "opened"  # behind an opening
    HEAD = "head"  # before the arguments of a call
    VALUE = "value"  # in the arguments
    TAIL = "tail"  # behind them, before the call's end
    AFTER = "after"  # behind an element of a list
    CLOSING = "closing"  # behind the list


class JsonCallReader(SteppedReader):
    """Reads one completion.

    Args:
      form: how its model writes calls.
    """

    def __init__(self, form: JsonForm) -> None:
        super().__init__()
        self._form = form
        self._state = _State.TEXT if form.openings else _State.HEAD
        self._value = ValueEnd()
        self._scanned = 0  # characters of the held object that `_value` has seen
        self._is_list = self._is_named = False
        self._has_value = False  # some of the call's arguments has been shown

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return what was held back, now that nothing follows."""
        is_open = self._state in (_State.TEXT, _State.OPENED, _State.HEAD)
        is_left_out = not is_open or (is_cut and self._is_half_call())
        held = self._take_all()
        if is_left_out or (self.num_calls and not held.strip("; ,\r\n")):
            return []
        return [Text(held)] if held else []

    def _is_half_call(self) -> bool:
        """Whether what is held is part of a call if the completion is cut behind it."""
        if self.num_calls and not self._has_text:
            return True
        match self._state:
            case _State.OPENED:
                return not self._opened.isalpha()  # a word marks a call only together with its list
            case _State.HEAD if not self._form.openings:
                found = _BEGUN_OBJECT.match(self._held.lstrip())
                return found is not None and found["end"] is not None
        return self._state is _State.HEAD

    def _step(self, pieces: list[Piece]) -> bool:
        match self._state:
            case _State.TEXT:
                return self._take_text(pieces)
            case _State.OPENED:
                return self._take_opened(pieces)
            case _State.HEAD:
                return self._take_head(pieces)
            case _State.VALUE:
                return self._take_value(pieces)
            case _State.TAIL:
                return self._take_tail()
            case _State.AFTER:
                return self._take_after()
            case _State.CLOSING:
                return self._take_closing()

    def _take_text(self, pieces: list[Piece]) -> bool:
        opening = self._take_until(self._form.openings, pieces)
        if not opening:
            return False
        self._held = self._held[len(opening) :]
        self._opened, self._is_list = opening, False
        self._state = _State.OPENED
        return True

    def _take_opened(self, pieces: list[Piece]) -> bool:
        """Find out whether a list, an object or a name stands behind the opening."""
        begin = self._held.lstrip()
        if len(self._held) - len(begin) > MAX_BLANKS:
            return self._is_text(pieces)
        if not begin:
            return False
        form = self._form
        if begin[0] == "{" or (begin[0] == "[" and (form.is_list or form.name_end)):
            self._is_list = begin[0] == "["
            length = len(self._held) - len(begin) + self._is_list
            self._opened += self._held[:length]
            self._held = self._held[length:]
            self._state = _State.HEAD
            return True
        if form.name_end and (found := _NAMED_HEAD.match(begin)):
            self._held = begin[found.end() :]
            self._begin_call(found[1], pieces, is_named=True)
            return True
        if form.name_end and _BEGUN_NAME.fullmatch(begin):
            return False
        return self._is_text(pieces)

    def _take_head(self, pieces: list[Piece]) -> bool:
        """Find a call's name at the beginning of its object, or take the object as a whole."""
        if self.num_calls:
            begin = self._unblank("; ,\r\n\t")
        else:
            begin = self._held.lstrip(" \r\n\t")
            if len(self._held) - len(begin) > MAX_BLANKS:
                return self._is_text(pieces)
        if not begin:
            return False
        is_closing = self._is_list and self.num_calls > 0 and self._is_closing(begin)
        if is_closing and not begin.startswith(self._form.closing):
            return False
        if is_closing or (self._is_list and begin[0] == "]"):
            # An empty list says nothing, and a separator before its end neither.
            self._held, self._opened, self._state = begin, "", _State.AFTER
            return True
        found = _HEAD.match(begin)
        if found and found.end() < len(begin):
            self._held = begin[found.end() :]
            self._begin_call(found[1], pieces)
            return True
        if not _may_be_call(begin) or (not self._form.openings and _is_other_object(begin)):
            return self._is_text(pieces)
        if not self._scanned:
            self._opened += self._held[: len(self._held) - len(begin)]
            self._held, self._value = begin, ValueEnd()
        self._scanned += self._value.push(self._held[self._scanned :])
        return self._value.is_over and self._take_object(pieces)

    def _take_object(self, pieces: list[Piece]) -> bool:
        """Take an object whose name does not come first."""
        body = self._held[: self._scanned]
        call = _parsed_call(body, needs_arguments=not self._form.openings)
        if call is None:
            return self._is_text(pieces)
        name, arguments = call
        self._held = self._held[self._scanned :]
        self._begin_call(name, pieces)
        pieces.append(Arguments(self.num_calls - 1, arguments))
        self._state = _State.AFTER
        return True

    def _take_value(self, pieces: list[Piece]) -> bool:
        if not self._has_value:
            self._held = self._held.lstrip()
        length = self._value.push(self._held)
        if length:
            pieces.append(Arguments(self.num_calls - 1, self._held[:length]))
            self._has_value = True
        self._held = self._held[length:]
        if self._value.is_over:
            if not self._has_value:
                pieces.append(Arguments(self.num_calls - 1, "{}"))
            self._state = _State.AFTER if self._is_named else _State.TAIL
            self._value = ValueEnd(depth=1, is_one_line=True)
        return self._state is not _State.VALUE

    def _take_tail(self) -> bool:
        """Pass over what stands behind the arguments in a call's object."""
        length = self._value.push(self._held)
        self._held = self._held[length:]
        if self._value.is_over:
            self._state = _State.AFTER
        return self._value.is_over

    def _take_after(self) -> bool:
        """Go on behind a call: to the next one of its list, or to the end of that."""
        if not self._form.openings:
            self._state = _State.HEAD
            return True
        if not self._is_list:
            self._state = _State.CLOSING
            return True
        self._held = self._held.lstrip()
        if not self._held:
            return False
        if self._held[0] == "]":
            self._held, self._state = self._held[1:], _State.CLOSING
        elif self._is_closing(self._held):
            self._state = _State.CLOSING  # the bracket was forgotten
        else:
            self._state = _State.HEAD
        return True

    def _is_closing(self, begin: str) -> bool:
        """Whether a text begins with what comes behind a list, or may once it goes on."""
        closing = self._form.closing
        return bool(closing) and (begin.startswith(closing) or closing.startswith(begin))

    def _take_closing(self) -> bool:
        closing = self._form.closing
        if closing and not self._form.is_list:
            # Whatever else a model writes before its closing tag is no text. An opening before it
            # begins another call: the tag was forgotten.
            ends = (closing, *self._form.openings)
            place, end = first_of(self._held, ends)
            if not end:
                kept = max(overlap(self._held, word) for word in ends)
                self._held = self._held[len(self._held) - kept :]
                return False
            self._held = self._held[place:].removeprefix(closing)
            self._state = _State.TEXT
            return True
        if closing:
            begin = self._unblank()
            if closing.startswith(begin) and closing != begin:
                return False
            if begin.startswith(closing):
                self._held = begin[len(closing) :]
        self._state = _State.TEXT
        return True

    def _begin_call(self, name: str, pieces: list[Piece], *, is_named: bool = False) -> None:
        pieces.append(CallBegins(self.num_calls, name))
        self.num_calls += 1
        self._opened, self._scanned, self._is_named = "", 0, is_named
        self._has_text = self._has_value = False
        self._value = ValueEnd()
        self._state = _State.VALUE

    def _is_text(self, pieces: list[Piece]) -> bool:
        """Show what was taken for a call and is none."""
        shown, self._opened, self._scanned = self._opened, "", 0
        self._has_text = True
        if self._form.openings:
            # An opening may stand in what follows.
            if shown:
                pieces.append(Text(shown))
        else:
            pieces.append(Text(shown + self._held))
            self._held = ""
        self._state = _State.TEXT
        return bool(self._held)


def _may_be_call(begin: str) -> bool:
    """Whether an object may be a call, by what there is of its first key."""
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
    """Whether an object with a name that stands alone is an answer in JSON, by its second key."""
    found = _SECOND_KEY.match(begin)
    return found is not None and found[1] not in _CALL_KEYS


def _parsed_call(body: str, *, needs_arguments: bool) -> tuple[str, str] | None:
    """Return name and arguments of a call, whatever the order of its keys; None if it is none."""
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

"""Parses tool calls written as a Python list, `[f(a=1), g(b="x")]`, which is the whole
completion."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from .scanning import overlap, written
from .tool_calls import (
    MAX_BLANKS,
    CallRules,
    CallSchema,
    HoldingReader,
    Piece,
    Text,
    ToolForm,
    UnenforceableSchemaError,
    argument_json,
)
from .typed_values import (
    definitions,
    python_json,
    required_of,
    resolved,
    takes_any,
    types_of,
    writable_properties,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping


START: Final = "<|python_start|>"
END: Final = "<|python_end|>"
"""Llama 4 writes these around the list."""

# Text that may become `name=` is held and checked again with each token, so these patterns are
# bounded: a name has at most 256 characters (a list with a longer one is text, and a later argument
# with one is skipped), and up to 64 whitespace characters stand between a bracket, a name and its
# `=` (models write none, one, or an indented line break). Patterns are literals, not built from
# input.
_NAME: Final = re.compile(r"[^\W\d]\w{0,255}")
_CALL: Final = re.compile(r"([A-Za-z0-9_.-]{1,64})\(\s{0,64}(?=[^\W\d]\w{0,255}\s{0,64}=[^=]|\))")
_BEGUN_CALL: Final = re.compile(
    r"[A-Za-z0-9_.-]{1,64}(?P<bracket>\(\s{0,64}([^\W\d]\w{0,255}\s{0,64}=?)?)?"
)
_ARGUMENT: Final = re.compile(r"([^\W\d]\w{0,255})\s{0,64}=\s{0,64}")
_BEGUN_ARGUMENT: Final = re.compile(r"\w{1,256}\s{0,64}")
_MARKS: Final = {
    "": re.compile(r"""'{1,3}|"{1,3}|[()\[\]{},]"""),
    "'": re.compile(r"\\.|'", re.DOTALL),
    '"': re.compile(r'\\.|"', re.DOTALL),
    "'''": re.compile(r"\\.|'{3}", re.DOTALL),
    '"""': re.compile(r'\\.|"{3}', re.DOTALL),
}
"""For the open string's quotes: what ends it or escapes its end. Outside of strings (empty quotes):
what opens one, and brackets and commas."""


@dataclass(frozen=True, slots=True)
class PythonForm(ToolForm):
    """The pythonic format: a list of function calls with keyword arguments."""

    @property
    def markers(self) -> Mapping[str, str]:
        """See ToolForm."""
        return {START: START, END: END}

    def reader(self) -> PythonCallReader:
        """See ToolForm."""
        return PythonCallReader()

    def rules(self, rules: CallRules) -> list[str]:
        """See ToolForm."""
        body = " | ".join(f"call_{index}" for index in range(len(rules.tools)))
        more = "" if rules.is_single else ' (", " body)*'
        calls = f'"[" body{more} "]"'
        lines = [f"body: {body}"]
        for index, tool in enumerate(rules.tools):
            lines += _call_rules(index, tool)
        if rules.is_forced:
            return [f"start: {calls}", *lines]
        return [f"start: TEXT | {calls}", r"TEXT: /([^\[](.|\n)*)?/", *lines]


def _call_rules(index: int, tool: CallSchema) -> list[str]:
    """Return the rules of one tool's calls: required arguments first, then any of the others."""
    schema = resolved(tool.arguments, tool.arguments) or {}
    properties = writable_properties(tool, schema, _NAME)
    if not properties and takes_any(schema):
        if tool.is_strict:
            raise UnenforceableSchemaError(f"{tool.name} lists no properties")
        free = r'/[A-Za-z_]\w{0,63}/ "=" ' + argument_json({})
        head = json.dumps(tool.name + "(")
        arguments = f'(free_{index} (", " free_{index})*)?'
        return [f'call_{index}: {head} {arguments} ")"', f"free_{index}: {free}"]
    required = [name for name in properties if name in required_of(schema)]
    ordered = [*required, *(name for name in properties if name not in required)]
    lines = []
    for number, name in enumerate(ordered):
        value = _value_rule(properties[name], tool.arguments)
        lines.append(f"value_{index}_{number}: {json.dumps(f'{name}=')} {value}")
        # This argument may be followed by any of the later ones, or none.
        later = f"{index}_{number + 1}"
        more = f'(", " value_{later})? more_{later}' if number + 1 < len(ordered) else '")"'
        lines.append(f"more_{index}_{number}: {more}")
    if required:
        first = ' ", " '.join(f"value_{index}_{number}" for number in range(len(required)))
        starts = [f"{first} more_{index}_{len(required) - 1}"]
    else:
        starts = ['")"']
        starts += [f"value_{index}_{n} more_{index}_{n}" for n in range(len(ordered))]
    return [f"call_{index}: {json.dumps(tool.name + '(')} ({' | '.join(starts)})", *lines]


def _value_rule(value: object, root: Mapping[str, Any]) -> str:
    types = types_of(value if isinstance(value, dict) else None, root)
    if types == {"boolean"}:
        return '("True" | "False")'
    return argument_json({**(value if isinstance(value, dict) else {}), **definitions(root)})


class _State(Enum):
    START = "start"  # only whitespace so far
    CALL = "call"  # before a function's name
    ARGUMENTS = "arguments"
    AFTER = "after"  # after a call
    TEXT = "text"


class PythonCallReader(HoldingReader):
    """Parses one completion."""

    def __init__(self) -> None:
        super().__init__()
        self._state = _State.START
        self._is_first = True  # no argument of the call has been returned

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the pieces held back at the end."""
        is_half_call = is_cut and self._is_half_call()
        held = self._take_all()
        if self._state is _State.ARGUMENTS and not is_cut:
            self._finish_call(held)
            return self._taken()
        is_open = not self.num_calls or (self._state is _State.TEXT and bool(held.strip()))
        return [Text(held)] if held and is_open and not is_half_call else []

    def _finish_call(self, held: str) -> None:
        """End a call with missing last brackets. If its last argument is broken, leave it
        incomplete: it is then invalid JSON, so that it is not run with guessed arguments."""
        # Llama's marker is not part of an argument unless it is inside a complete string.
        before_end = held.partition(END)[0].rstrip()
        is_broken = _BEGUN_ARGUMENT.fullmatch(before_end) is not None
        if found := _ARGUMENT.match(held):
            sources = (held[found.end() :], before_end[found.end() :])
            whole = [source for source in sources if python_json(source) is not None]
            is_broken = not whole
            for source in whole[:1]:
                self._show(found[1], source)
        if not is_broken:
            self._end_call()
        elif self._is_first:
            self._show_arguments("{")

    def _is_half_call(self) -> bool:
        """Whether the held text is part of a call if the completion is cut after it: after a call,
        its marker or a function's bracket."""
        if self.num_calls:
            return not self._has_text
        found = _BEGUN_CALL.match(self._held.lstrip()) if self._state is _State.CALL else None
        has_bracket = found is not None and found["bracket"] is not None
        return has_bracket or (self._opened or self._held).lstrip().startswith(START)

    def _read(self) -> Generator[None, None, None]:
        if (yield from self._take_start()):
            while (yield from self._take_call()):
                yield from self._take_arguments()
                self._state = _State.AFTER
                if (yield from self._first()) != ",":
                    self._held = self._held.removeprefix("]")
                    break
                self._held = self._held[1:]
        self._state = _State.TEXT
        while True:
            self._take_rest()
            yield

    def _take_start(self) -> Generator[None, None, bool]:
        """Return whether a list of calls starts."""
        while True:
            begin = self._held.lstrip()
            rest = begin.removeprefix(START).lstrip()
            num_blanks = len(self._held) - len(rest) - len(START) * begin.startswith(START)
            if num_blanks > MAX_BLANKS:
                return False
            if rest and not START.startswith(rest):
                if rest[0] == "[":
                    self._opened = self._held[: len(self._held) - len(rest) + 1]
                    self._held = rest[1:]
                return rest[0] == "["
            yield

    def _take_call(self) -> Generator[None, None, bool]:
        """Process a function's name; return whether it was one rather than text."""
        self._state = _State.CALL
        while True:
            begin = self._held.lstrip()
            is_near = len(self._held) - len(begin) <= MAX_BLANKS
            if is_near and (found := _CALL.match(begin)):
                self._held, self._is_first = begin[found.end() :], True
                self._begin_call(found[1])
                return True
            if not is_near or (begin and not _BEGUN_CALL.fullmatch(begin)):
                self._held, self._opened = self._opened + self._held, ""
                return False
            yield

    def _take_arguments(self) -> Iterator[None]:
        """Process the arguments of a call, to its end."""
        self._state = _State.ARGUMENTS
        end: _LiteralEnd | None = None
        while True:
            if end is None:
                self._held = self._held.lstrip(" \r\n\t,")
            begin = self._held
            if begin.startswith(")"):
                self._end_call()
                self._held = begin[1:]
                return
            found = _ARGUMENT.match(begin)
            value = begin[found.end() :] if found else begin
            if value and (found or not _BEGUN_ARGUMENT.fullmatch(begin)):
                end = end or _LiteralEnd()
                place = end.find(value)
                if place is not None:
                    if found:  # skip an argument without a name
                        self._show(found[1], value[:place])
                    # Skip an unmatched bracket by itself.
                    self._held, end = value[place if found or place else 1 :], None
                    continue
            yield

    def _show(self, name: str, source: str) -> None:
        shown = python_json(source)
        text = f"{json.dumps(name)}: {written(source.strip()) if shown is None else shown}"
        self._show_arguments(("{" if self._is_first else ", ") + text)
        self._is_first = False

    def _end_call(self) -> None:
        self._show_arguments("{}" if self._is_first else "}")

    def _take_rest(self) -> None:
        """Return the text after the calls, or all of it if there are none."""
        if self.num_calls:
            self._held = self._held.replace(END, "")
            if not self._has_text:
                self._unblank()
        kept = overlap(self._held, END) if self.num_calls else 0
        shown = self._held[: len(self._held) - kept]
        # Whitespace after the calls is not text, unless text comes before it.
        if shown.strip() or (shown and (self._has_text or not self.num_calls)):
            self._show_text(shown)
            self._held = self._held[len(shown) :]


class _LiteralEnd:
    """Finds the end of a Python literal in a call's arguments: a comma or an unmatched bracket."""

    def __init__(self) -> None:
        self._seen = 0  # number of characters checked
        self._depth = 0
        self._quotes = ""  # quotes of the open string

    def find(self, text: str) -> int | None:
        """Return where the literal ends; None if not yet in this text, which only grows."""
        while found := _MARKS[self._quotes].search(text, self._seen):
            mark = found[0]
            if self._quotes:
                self._quotes = "" if mark == self._quotes else self._quotes
            elif mark[0] in "\"'":
                if len(mark) < 3 and found.end() == len(text):
                    return None  # more quotes may follow
                self._quotes = "" if len(mark) == 2 else mark
            elif mark in "([{":
                self._depth += 1
            elif self._depth == 0:
                return found.start()
            elif mark != ",":
                self._depth -= 1
            self._seen = found.end()
        # Check an incomplete string end or escape again later.
        self._seen = max(self._seen, len(text) - len(self._quotes))
        return None

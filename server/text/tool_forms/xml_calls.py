"""Parses tool calls in the format of Qwen3-Coder: XML-like tags, with each argument as plain
text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Self

from .scanning import first_of, overlap
from .tool_calls import (
    ANY_TEXT,
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
    bare_json,
    definitions,
    properties_of,
    required_of,
    resolved,
    takes_any,
    types_of,
    writable_properties,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence


OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"
FUNCTION: Final = "<function="
FUNCTION_END: Final = "</function>"
PARAMETER: Final = "<parameter="
PARAMETER_END: Final = "</parameter>"

_FUNCTION: Final = re.compile(r"<function=([A-Za-z0-9_.-]{1,64})>")
_BEGUN_FUNCTION: Final = re.compile(r"<function=[A-Za-z0-9_.-]{0,64}")
# A parameter's name has at most 256 characters: text that may become its tag is held and examined
# with each token, and real names have tens of characters. Patterns are literals, not built from
# input.
_PROPERTY: Final = re.compile(r"[^>\n]{1,256}")
"""A name that can be written in a tag."""
_PARAMETER: Final = re.compile(r"<parameter=([^>\n]{1,256})>\n?")
_BEGUN_PARAMETER: Final = re.compile(r"<parameter=[^>\n]{0,256}")
_ENDINGS: Final = (
    (PARAMETER,),
    (FUNCTION_END, CLOSING),
    (FUNCTION_END, FUNCTION),
    (FUNCTION_END, OPENING),
    (CLOSING,),
    (OPENING, FUNCTION),
)
"""What may follow a value's end tag; the last three are for missing tags. An end tag followed by
anything else is part of the value, since files may contain such tags."""
_NEXT_CALLS: Final = ((OPENING, FUNCTION), (FUNCTION,))
"""What may follow the text after a function without its `</tool_call>`."""
# That text has at most 1024 characters, a sentence or two, because the end of a value is examined
# with each token.
_BETWEEN: Final = re.compile(r"</function>[^<]{0,1024}(?=<|\Z)")
_UNENDED: Final = (CLOSING, OPENING, FUNCTION)
"""What must follow a function's end tag for it to end a value without its own end tag."""
_MAY_END: Final = re.compile(r"</(?:parameter|function)>")
_CALL_ENDS: Final = (FUNCTION_END, CLOSING, FUNCTION, OPENING)
"""What ends a call between its parameters; all but the first are for a missing end tag."""
_LIMITS: Final = ("minLength", "maxLength", "pattern", "format")
"""Schema keywords that cannot be enforced on plain text, except for short lengths."""
_LOOKED_AT: Final = 4 * (MAX_BLANKS + len(CLOSING)) + 1024
"""Characters after a possible end of a value that decide whether it is one: four tags, and text."""
MAX_COUNTED_CHARS: Final = 256
"""Largest `maxLength` that a grammar enforces: each character is a state of its lexer."""


@dataclass(frozen=True, slots=True)
class XmlForm(ToolForm):
    """The Qwen3-Coder format: tags for the call, its function and each parameter.

    Attributes:
      schemas: argument schemas by tool; they distinguish a number from a string of digits.
    """

    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def markers(self) -> Mapping[str, str]:
        """See ToolForm."""
        return {OPENING: OPENING, CLOSING: CLOSING}

    def of_tools(self, schemas: Mapping[str, Mapping[str, Any]]) -> Self:
        """See ToolForm."""
        return replace(self, schemas=schemas)

    def reader(self) -> XmlCallReader:
        """See ToolForm."""
        return XmlCallReader(self.schemas)

    def rules(self, rules: CallRules) -> list[str]:
        """See ToolForm."""
        lines: list[str] = []
        for index, tool in enumerate(rules.tools):
            lines += _call_rules(index, tool)
        body = " | ".join(f"call_{index}" for index in range(len(rules.tools)))
        inner = f'"\\n" ({body}) "\\n" {rules.marker(CLOSING)}'
        ends = [rf"raw[lazy]: TEXT {json.dumps(_END)}", *lines]
        if rules.is_forced:
            more = "" if rules.is_single else ' ("\\n" call)*'
            return [f"start: call{more}", f"call: {rules.marker(OPENING)} {inner}", ANY_TEXT, *ends]
        times = "?" if rules.is_single else "*"
        return [f"start: call{times} TEXT", f"call: opened {inner}", *rules.opened(OPENING), *ends]


_END: Final = f"\n{PARAMETER_END}\n"


def _call_rules(index: int, tool: CallSchema) -> list[str]:
    """Return the rules of one tool's calls, without optional properties with names that cannot be
    written in a tag."""
    schema = resolved(tool.arguments, tool.arguments) or {}
    properties, required = writable_properties(tool, schema, _PROPERTY), required_of(schema)
    parts, lines = [], []
    for number, (name, value) in enumerate(properties.items()):
        rule = f"value_{index}_{number}"
        lines.append(f"{rule}{_value_rule(tool, name, value)}")
        part = f"{json.dumps(f'{PARAMETER}{name}>' + chr(10), ensure_ascii=False)} {rule}"
        parts.append(part if name in required else f"({part})?")
    if not properties and takes_any(schema):
        if tool.is_strict:
            raise UnenforceableSchemaError(f"{tool.name} lists no properties")
        lines.append(rf'free_{index}: "{PARAMETER}" /[^>\n]{{1,64}}/ ">\n" raw')
        parts.append(f"free_{index}*")
    head = json.dumps(f"{FUNCTION}{tool.name}>\n")
    return [" ".join((f"call_{index}: {head}", *parts, json.dumps(FUNCTION_END))), *lines]


def _value_rule(tool: CallSchema, name: str, value: object) -> str:
    """Return the rule after a value's name: the value, and its end."""
    schema = resolved(value, tool.arguments)
    types = types_of(schema, tool.arguments)
    if schema is None or not types or not types <= {"string", "null"}:
        shared = definitions(tool.arguments)
        rule = argument_json({**(value if isinstance(value, dict) else {}), **shared})
        return f": {rule} {json.dumps(_END)}"
    words = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(words, list):
        shown = [json.dumps(f"{word}{_END}", ensure_ascii=False) for word in words if word]
        return f": {' | '.join(shown or [json.dumps(_END)])}"
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if isinstance(most, int) and isinstance(least, int) and most <= MAX_COUNTED_CHARS:
        return rf"[lazy]: /(.|\n){{{least},{most}}}/ {json.dumps(_END)}"
    if tool.is_strict and any(limit in schema for limit in _LIMITS):
        raise UnenforceableSchemaError(f"{tool.name}.{name} has {' or '.join(_LIMITS)}")
    return ": raw"


class _State(Enum):
    TEXT = "text"
    OPENED = "opened"  # before a function's name
    PARAMETERS = "parameters"
    AFTER = "after"  # after a function


class XmlCallReader(HoldingReader):
    """Parses one completion.

    Args:
      schemas: argument schemas by tool.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._schemas = schemas
        self._state = _State.TEXT
        self._tool = ""
        self._is_first = True  # no argument of the call has been returned
        self._searched = 0  # number of held characters known to end no value
        self._is_finished = False  # no text follows, so a value's end may never become certain

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the pieces held back at the end."""
        is_half_call = self._state is not _State.TEXT or (self.num_calls and not self._has_text)
        self._is_finished = True
        while self._state is _State.PARAMETERS and not is_cut and self._finish_value():
            next(self._parts)
        held = self._take_all()
        is_open = self._state in (_State.TEXT, _State.OPENED)
        if is_open and not (is_cut and is_half_call):
            self._pieces += [Text(held)] if held.strip() or (held and not self.num_calls) else []
        return self._taken()

    def _finish_value(self) -> bool:
        """Process a value without its last tags, up to its end tag if it has one. Return
        whether a following tag ends the call, so that text or calls may follow; otherwise end the
        call here."""
        held = self._held.lstrip()
        if found := _PARAMETER.match(held):
            value, end, held = held[found.end() :].partition(PARAMETER_END)
            value = value if end else _without_ends(value)
            self._show(found[1], value.removesuffix("\n"))
            if held.lstrip().startswith(_CALL_ENDS):
                self._held, self._searched = held, 0
                return True
        self._end_call()
        return False

    def _read(self) -> Generator[None, None, None]:
        while True:
            self._state = _State.TEXT
            opening = yield from self._take_text((OPENING, FUNCTION))
            self._opened = OPENING if opening == OPENING else ""
            self._held = self._held[len(self._opened) :]
            while (yield from self._take_function()):
                yield from self._take_parameters()
                if not (yield from self._is_followed()):
                    break

    def _take_function(self) -> Generator[None, None, bool]:
        """Process a function's name; return whether it was one rather than text."""
        self._state = _State.OPENED
        while True:
            begin = self._held.lstrip()
            num_blanks = len(self._held) - len(begin)
            is_near = num_blanks <= MAX_BLANKS
            if is_near and (found := _FUNCTION.match(begin)):
                self._held = begin[found.end() :]
                self._tool, self._is_first = found[1], True
                self._begin_call(found[1])
                return True
            if not is_near or not (FUNCTION.startswith(begin) or _BEGUN_FUNCTION.fullmatch(begin)):
                break
            yield
        # This is not a call, but another one may follow, or start here.
        length = num_blanks + (is_near and begin.startswith(FUNCTION))
        self._show_text(self._opened + self._held[:length])
        self._held, self._opened = self._held[length:], ""
        return False

    def _take_parameters(self) -> Iterator[None]:
        """Process the parameters of a call, to its end."""
        self._state = _State.PARAMETERS
        tags = (PARAMETER, *_CALL_ENDS)
        while True:
            if not self._searched:
                self._held = self._held.lstrip()
            if found := _PARAMETER.match(self._held):
                if self._take_value(found[1], found.end()):
                    continue
            elif self._held.startswith(_CALL_ENDS):
                self._held = self._held.removeprefix(FUNCTION_END)
                self._end_call()
                return
            elif not (
                any(tag.startswith(self._held) for tag in tags)
                or _BEGUN_PARAMETER.fullmatch(self._held)
            ):
                # Skip anything between parameters.
                behind = self._held[1:]
                begin, tag = first_of(behind, tags)
                kept = max(overlap(behind, tag) for tag in tags)
                self._held = behind[begin if tag else len(behind) - kept :]
                if tag:
                    continue
            yield

    def _take_value(self, name: str, begin: int) -> bool:
        """Process a value if its end is certain; return whether it is."""
        if self._is_finished:
            return False
        place = max(begin, self._searched)
        while found := _MAY_END.search(self._held, place):
            place, behind = found.span()
            is_end = _is_ending(found[0], self._held[behind : behind + _LOOKED_AT])
            if is_end:
                value = self._held[begin:place].removesuffix("\n")
                self._held = self._held[behind if found[0] == PARAMETER_END else place :]
                self._searched = 0
                self._show(name, value)
                return True
            if is_end is None:
                self._searched = place
                return False
            place = behind
        self._searched = max(begin, len(self._held) - len(PARAMETER_END))
        return False

    def _is_followed(self) -> Generator[None, None, bool]:
        """Return whether a function follows another one without its own opening; process the tag
        that closes the call."""
        self._state = _State.AFTER
        while FUNCTION.startswith(begin := self._unblank()) or CLOSING.startswith(begin):
            if begin in (FUNCTION, CLOSING):
                break
            yield
        if begin.startswith((FUNCTION, CLOSING)):
            self._held = begin.removeprefix(CLOSING)
        return begin.startswith(FUNCTION)

    def _show(self, name: str, value: str) -> None:
        root = self._schemas.get(self._tool, {})
        schema = properties_of(resolved(root, root) or {}).get(name)
        shown = f"{json.dumps(name, ensure_ascii=False)}: {bare_json(value, schema, root)}"
        self._show_arguments(("{" if self._is_first else ", ") + shown)
        self._is_first = False

    def _end_call(self) -> None:
        self._show_arguments("{}" if self._is_first else "}")


def _without_ends(value: str) -> str:
    """Return a value without an end tag, stripped of the tags that end its call."""
    for tag in (CLOSING, FUNCTION_END):
        if (bare := value.rstrip()).endswith(tag):
            value = bare.removesuffix(tag)
    return value


def _is_ending(tag: str, behind: str) -> bool | None:
    """Whether an end tag followed by this text ends a value; None if that is not certain yet."""
    if tag == FUNCTION_END:
        return _follow(behind, _UNENDED)
    is_end = _follow_any(behind, _ENDINGS)
    if is_end is False and _follow(behind, (FUNCTION_END,)):
        between = _BETWEEN.match(behind.lstrip())
        return between is not None and _follow_any(behind.lstrip()[between.end() :], _NEXT_CALLS)
    return is_end


def _follow_any(text: str, choices: Sequence[Sequence[str]]) -> bool | None:
    """Whether a text starts with one of several tag sequences; see `_follow`."""
    found = [_follow(text, tags) for tags in choices]
    return True if True in found else None if None in found else False


def _follow(text: str, tags: Sequence[str]) -> bool | None:
    """Whether a text starts with tags separated by whitespace; None if it may with more text."""
    for tag in tags:
        length = len(text)
        text = text.lstrip()
        if length - len(text) > MAX_BLANKS:
            return False
        if not text.startswith(tag):
            return None if tag.startswith(text) else False
        text = text[len(tag) :]
    return True

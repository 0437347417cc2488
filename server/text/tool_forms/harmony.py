"""Parses completions of gpt-oss in the harmony format: messages on channels, between special
tokens.

Channel `analysis` is reasoning, `final` is the answer. A message to `functions.NAME` is a tool
call. Other messages on `commentary` accompany calls and are text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from .reasoning import HARMONY_MARKERS, marked
from .scanning import overlap
from .tool_calls import (
    Arguments,
    CallBegins,
    CallRules,
    Piece,
    Reasoning,
    Text,
    ToolForm,
    argument_json,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


START, CHANNEL, CONSTRAIN, MESSAGE, END, *_ = HARMONY_MARKERS
_EDGE: Final = marked("")[0]
_MARKER: Final = re.compile(
    "(\udc00)(<\\|(?:start|channel|constrain|message|end|call|return)\\|>)\udc00"
    "|(?<!\udc00)<\\|(?:start|channel|constrain|message|end|call|return)\\|>"
)
"""A marker, with or without the edges that `marked` adds to a token: both or none."""
_LONGEST: Final = max(map(len, HARMONY_MARKERS)) + 2
"""Length of a marker with its edges."""
_BEGUN: Final = (*HARMONY_MARKERS, *(marked(marker) for marker in HARMONY_MARKERS))
_RECIPIENT: Final = re.compile(r"\bto=(?:functions\.)?([A-Za-z0-9_.-]{1,64})")
_ANALYSIS: Final = "analysis"
_TO: Final = " to="
"""Start of a header that names a recipient before its channel."""


@dataclass(frozen=True, slots=True)
class HarmonyForm(ToolForm):
    """The harmony format: messages on channels, between tokens that a text may quote (see
    `marked`)."""

    @property
    def markers(self) -> Mapping[str, str]:
        """See ToolForm."""
        return {marker: marked(marker) for marker in HARMONY_MARKERS}

    def reader(self) -> HarmonyReader:
        """See ToolForm."""
        return HarmonyReader()

    def rules(self, rules: CallRules) -> list[str]:
        """See ToolForm. A call ends the completion, so there is never a second one."""
        start, channel, message, end, constrain = (
            rules.marker(marker) for marker in (START, CHANNEL, MESSAGE, END, CONSTRAIN)
        )
        lines = [f"body: {' | '.join(f'call_{i}' for i in range(len(rules.tools)))}"]
        for index, tool in enumerate(rules.tools):
            header = json.dumps(f"commentary to=functions.{tool.name} ")
            value = argument_json(tool.arguments)
            lines.append(f'call_{index}: {channel} {header} {constrain} "json" {message} {value}')
        said = f'{channel} "analysis" {message} TEXT {end} {start} "assistant"'
        beside = f'{channel} ("analysis" | "commentary") {message} TEXT {end} {start} "assistant"'
        final = f'{channel} "final" {message} TEXT'
        lines += [r"TEXT: /(.|\n)*/"]
        if rules.is_forced:
            return ["start: said? body", f"said: {said}", *lines]
        return ["start: beside* (body | final)", f"beside: {beside}", f"final: {final}", *lines]


class _State(Enum):
    HEADER = "header"  # a message's header, from its role to <|message|>
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class HarmonyReader:
    """Parses one completion, which continues `<|start|>assistant`."""

    def __init__(self) -> None:
        self._state = _State.HEADER
        self._held = ""
        self._header = ""
        self._is_begun = False  # something other than whitespace has arrived
        self._has_arguments = False
        self._is_marked = False  # marker tokens differ from the same characters in text
        self.num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """Process more text; return the parsed pieces."""
        self._held += text
        pieces: list[Piece] = []
        while found := _MARKER.search(self._held):
            self._is_marked |= bool(found[1])
            is_quoted = self._is_marked and not found[1]
            self._take(self._held[: found.end() if is_quoted else found.start()], pieces)
            self._held = self._held[found.end() :]
            if not is_quoted:
                self._mark(found[2] or found[0], pieces)
        tail = self._held[-_LONGEST:]
        kept = 0
        if "<" in tail or _EDGE in tail:
            kept = max(overlap(tail, begun) for begun in _BEGUN)
        self._take(self._held[: len(self._held) - kept], pieces)
        self._held = self._held[len(self._held) - kept :]
        return pieces

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the text held back at the end. An incomplete header is not text; an incomplete
        marker token is dropped."""
        pieces: list[Piece] = []
        if not is_cut or not (self._held.startswith(_EDGE) or self._state is _State.CALL):
            self._take(self._held, pieces)
        if not self._is_begun and not (is_cut and self._header.startswith(_TO)):
            pieces += [Text(self._header)] if self._header else []
        if not is_cut:
            self._end_message(pieces)
        self._held = self._header = ""
        return pieces

    def _take(self, text: str, pieces: list[Piece]) -> None:
        """Process text between two markers."""
        text = text.replace(_EDGE, "")
        if not text:
            return
        match self._state:
            case _State.HEADER:
                self._take_header(text, pieces)
            case _State.REASONING:
                pieces.append(Reasoning(text))
            case _State.TEXT:
                pieces.append(Text(text))
            case _State.CALL:
                self._has_arguments = True
                pieces.append(Arguments(self.num_calls - 1, text))

    def _take_header(self, text: str, pieces: list[Piece]) -> None:
        self._header += text
        is_header = self._is_begun or _TO.startswith(self._header[: len(_TO)])
        if not is_header and self._header.strip():
            # The prompt already contains the header.
            pieces.append(Text(self._header))
            self._header, self._state, self._is_begun = "", _State.TEXT, True

    def _mark(self, marker: str, pieces: list[Piece]) -> None:
        self._is_begun = True
        match marker:
            case "<|message|>":
                self._begin_message(pieces)
            case "<|channel|>" if self._state is _State.HEADER:
                self._header += " channel="
            case "<|constrain|>" if self._state is _State.HEADER:
                self._header += " "
            case _:
                self._end_message(pieces)

    def _begin_message(self, pieces: list[Piece]) -> None:
        header, self._header = self._header, ""
        if found := _RECIPIENT.search(header):
            pieces.append(CallBegins(self.num_calls, found[1]))
            self.num_calls += 1
            self._state, self._has_arguments = _State.CALL, False
        elif f"channel={_ANALYSIS}" in header:
            self._state = _State.REASONING
        else:
            self._state = _State.TEXT

    def _end_message(self, pieces: list[Piece]) -> None:
        if self._state is _State.CALL and not self._has_arguments:
            pieces.append(Arguments(self.num_calls - 1, "{}"))
        self._state, self._header = _State.HEADER, ""

"""Separates a model's reasoning from its answer: finds the marker tokens and parses the text.

Markers are tokens, but a model may also write the same characters as ordinary tokens, for example
to quote them. So the detokenized text spells marker tokens in a way that ordinary tokens cannot
(`marked`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.config import ReasoningParser
from triolet.errors import ModelError
from triolet.sampling import ReasoningTokens

from .scanning import overlap
from .tool_calls import CallsRead, Piece, PieceReader, Reasoning, Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tokenizers import Tokenizer


_EDGE: Final = "\udc00"
"""A lone surrogate, which decoded text never contains."""


def marked(content: str) -> str:
    """Return the spelling of a marker token in the text of a completion."""
    return f"{_EDGE}{content}{_EDGE}"


class ThinkForm(NamedTuple):
    """The markers of a model's reasoning.

    Attributes:
      opening: the token before it.
      closing: the token after it.
    """

    opening: str
    closing: str


THINK: Final = ThinkForm("<think>", "</think>")
"""Qwen3, QwQ, DeepSeek-R1 and its distills, and many others."""


class Thinking(NamedTuple):
    """How to parse the reasoning of one completion.

    Attributes:
      form: the markers.
      is_open: whether the prompt ends within reasoning, so that no opening follows.
    """

    form: ThinkForm
    is_open: bool


class _State(Enum):
    BEFORE = "before"  # before reasoning or an answer
    THINKING = "thinking"
    ANSWER = "answer"


class ThinkReader:
    """Parses one completion: the reasoning itself, the answer with another reader.

    Args:
      thinking: the format of reasoning.
      answer: parses the text after the reasoning.
    """

    def __init__(self, thinking: Thinking, answer: PieceReader) -> None:
        form = thinking.form
        self._opening, self._closing = marked(form.opening), marked(form.closing)
        self._answer = answer
        self._state = _State.THINKING if thinking.is_open else _State.BEFORE
        self._held = ""
        self._has_reasoning = self._has_answer = False

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return self._answer.num_calls

    def push(self, text: str) -> list[Piece]:
        """Process more text; return the parsed pieces."""
        self._held += text
        pieces: list[Piece] = []
        if self._state is _State.BEFORE:
            self._look_for_opening()
        if self._state is _State.THINKING:
            pieces += self._take_reasoning()
        if self._state is _State.ANSWER:
            pieces += self._take_answer()
        return pieces

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the pieces held back at the end."""
        held, self._held = self._held, ""
        if self._state is _State.THINKING:
            pieces = self._reasoning(held.rstrip())
        else:
            pieces = self._push(held) if held else []
        return pieces + self._answer.finish(is_cut=is_cut)

    def _look_for_opening(self) -> None:
        # A marker after other text does not count; ReasoningTokens applies the same rule to tokens.
        if self._held.startswith(self._opening):
            self._state = _State.THINKING
        elif self._held and not self._opening.startswith(self._held):
            # Without reasoning, the answer is returned unchanged, including leading line breaks.
            self._state, self._has_answer = _State.ANSWER, True

    def _take_reasoning(self) -> list[Piece]:
        if not self._has_reasoning:
            # Some models write an opening marker although the prompt has it.
            self._held = self._held.lstrip().removeprefix(self._opening).lstrip()
            if self._opening.startswith(self._held):
                return []
        before, closing, behind = self._held.partition(self._closing)
        if closing:
            self._held, self._state = behind, _State.ANSWER
            return self._reasoning(before.rstrip())
        shown = before[: len(before) - overlap(before, self._closing)].rstrip()
        self._held = before[len(shown) :]
        return self._reasoning(shown)

    def _take_answer(self) -> list[Piece]:
        if not self._has_answer:
            self._held = self._held.lstrip("\n")
            self._has_answer = bool(self._held)
        text, self._held = self._held, ""
        return self._push(text) if text else []

    def _push(self, text: str) -> list[Piece]:
        # After the reasoning, marker tokens have no meaning and are shown as plain text.
        return self._answer.push(text.replace(_EDGE, ""))

    def _reasoning(self, text: str) -> list[Piece]:
        text = text.replace(_EDGE, "")
        self._has_reasoning |= bool(text)
        return [Reasoning(text)] if text else []


class ReasoningPlan(NamedTuple):
    """How a request's reasoning is detected and parsed.

    Attributes:
      tokens: which tokens of the completion are reasoning.
      markers: tokens that the reader of the text must see, with their form in the text.
      thinking: how to parse it; None if the tool call format parses it, too (harmony).
    """

    tokens: ReasoningTokens
    markers: Mapping[int, str]
    thinking: Thinking | None


TAIL_CHARS: Final = 256
"""Characters at a prompt's end in which a template opens or closes reasoning."""
SWITCHES: Final = ("enable_thinking", "thinking")
"""Names of the reasoning switch in templates."""
HISTORY_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")
"""Names of the reasoning of earlier turns in templates."""
_NAME: Final = re.compile(r"(?<![.\w])(enable_thinking|thinking)\b")
_FIELD: Final = re.compile(r"(?:\.|\[[\"'])(reasoning_content|thinking|reasoning)\b")
HARMONY_MARKERS: Final = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
HARMONY_HEADER_TOKENS: Final = 3
"""Tokens of `<|channel|>analysis<|message|>`: a budget cannot end reasoning before them."""


class Reasoner:
    """How a model reasons.

    Args:
      parser: the reasoning format.
      tokenizer: the model's tokenizer.
      templates: its chat templates.

    Attributes:
      switches: template variables that turn reasoning on and off.
      history_field: the template's field for the reasoning of earlier turns; None if it shows none.
      takes_effort: whether the template reads `reasoning_effort`.

    Raises:
      ModelError: the tokenizer lacks a marker of the format.
    """

    def __init__(
        self, parser: ReasoningParser, tokenizer: Tokenizer, templates: Iterable[str]
    ) -> None:
        self._parser = parser
        text = "\n".join(templates)
        names = set(_NAME.findall(text))
        self.switches = [name for name in SWITCHES if name in names]
        fields = set(_FIELD.findall(text))
        self.history_field = next((name for name in HISTORY_FIELDS if name in fields), None)
        self.takes_effort = "reasoning_effort" in text
        if parser is ReasoningParser.HARMONY:
            ids = {word: _marker_id(tokenizer, word, parser) for word in HARMONY_MARKERS}
            self._markers = {ids[word]: marked(word) for word in HARMONY_MARKERS}
            self._tokens = _harmony_tokens(tokenizer, ids)
        else:
            opening, closing = (_marker_id(tokenizer, word, parser) for word in THINK)
            self._markers = {opening: marked(THINK.opening), closing: marked(THINK.closing)}
            self._opening = opening
            self._tokens = ReasoningTokens(closings=((closing,),), forced=(closing,))

    @property
    def reads_calls(self) -> bool:
        """Whether one format covers reasoning, text and tool calls."""
        return self._parser is ReasoningParser.HARMONY

    def plan(
        self, prompt: str, *, continued: str | None, budget: int | None
    ) -> ReasoningPlan | None:
        """Return how to treat a completion's reasoning; None if it has none.

        Args:
          prompt: the rendered conversation.
          continued: the assistant's text that is continued; None for a new turn.
          budget: maximum number of reasoning tokens; None for no limit.
        """
        if self.reads_calls:
            if continued is not None:
                return None  # the answer has started, so no header follows
            least = None if budget is None else max(budget, HARMONY_HEADER_TOKENS)
            return ReasoningPlan(replace(self._tokens, budget=least), self._markers, None)
        tail = prompt[-TAIL_CHARS:].rstrip()
        if continued is not None:
            is_open = continued.rfind(THINK.opening) > continued.rfind(THINK.closing)
            if not is_open:
                return None
        elif tail.endswith(THINK.closing):
            return None
        else:
            always = self._parser is ReasoningParser.DEEPSEEK_R1
            is_open = always or tail.endswith(THINK.opening)
        tokens = replace(self._tokens, opening=None if is_open else self._opening, budget=budget)
        return ReasoningPlan(tokens, self._markers, Thinking(THINK, is_open))


def find_reasoner(
    parser: ReasoningParser,
    tokenizer: Tokenizer,
    templates: Mapping[str, str],
    *,
    is_harmony: bool,
) -> Reasoner | None:
    """Return how a model reasons; None if it does not, or if reasoning is not parsed.

    Args:
      parser: the format; AUTO for the one with markers that are tokens of the tokenizer.
      tokenizer: the model's tokenizer.
      templates: its chat templates.
      is_harmony: whether tool calls are parsed in the harmony format, which parses reasoning, too.

    Raises:
      ModelError: the tokenizer lacks a marker of the format, or calls have another format.
    """
    found = parser
    if parser is ReasoningParser.AUTO:
        found = _detected(tokenizer, templates, is_harmony=is_harmony)
    elif parser is ReasoningParser.HARMONY and not is_harmony:
        raise ModelError(
            "the reasoning parser harmony also parses tool calls, but these have another "
            "format; set server.tool_parser=harmony, or server.reasoning_parser=auto or none"
        )
    return None if found is ReasoningParser.NONE else Reasoner(found, tokenizer, templates.values())


def _detected(
    tokenizer: Tokenizer, templates: Mapping[str, str], *, is_harmony: bool
) -> ReasoningParser:
    if not templates:
        return ReasoningParser.NONE
    if is_harmony and all(tokenizer.token_to_id(word) is not None for word in HARMONY_MARKERS):
        return ReasoningParser.HARMONY
    if all(tokenizer.token_to_id(word) is not None for word in THINK):
        # Depends on the prompt, so it also fits R1's distills and models that never reason.
        return ReasoningParser.QWEN3
    return ReasoningParser.NONE


def _marker_id(tokenizer: Tokenizer, word: str, parser: ReasoningParser) -> int:
    token_id = tokenizer.token_to_id(word)
    if token_id is None:
        raise ModelError(
            f"the reasoning parser {parser.value} needs the token {word}, which the tokenizer does "
            "not have; set server.reasoning_parser=auto or none"
        )
    return int(token_id)


def _harmony_tokens(tokenizer: Tokenizer, ids: Mapping[str, int]) -> ReasoningTokens:
    def words(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    channel, message = ids["<|channel|>"], ids["<|message|>"]
    final = (channel, *words("final"), message)
    return ReasoningTokens(
        # A tool call is not reasoning either; its header has several continuations.
        closings=(final, (channel, *words("commentary"))),
        forced=(ids["<|end|>"], ids["<|start|>"], *words("assistant"), *final),
    )


class PlainText:
    """Parses a completion that is only text."""

    num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """Return the text."""
        return [Text(text)] if text else []

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return no pieces: nothing was held back."""
        return []


def reader_of(form: CallsRead | None, thinking: Thinking | None = None) -> PieceReader:
    """Return a parser for a completion.

    Args:
      form: the format of tool calls; None without tools.
      thinking: the format of reasoning; None without reasoning.
    """
    answer: PieceReader = PlainText() if form is None else form.reader()
    return answer if thinking is None else ThinkReader(thinking, answer)

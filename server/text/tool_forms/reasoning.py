"""Reasoning as models write it before the answer: which tokens mark it, and its text told apart.

The markers are tokens. A model may also write the same characters as ordinary tokens, for example
to quote them; so the text shows a marker token in a form that no ordinary token has (`marked`).
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
"""Half of a surrogate pair: decoded text never has one."""


def marked(content: str) -> str:
    """Return how the text of a completion shows a marker token."""
    return f"{_EDGE}{content}{_EDGE}"


class ThinkForm(NamedTuple):
    """How a model writes its reasoning.

    Attributes:
      opening: the token before it.
      closing: the token behind it.
    """

    opening: str
    closing: str


THINK: Final = ThinkForm("<think>", "</think>")
"""Qwen3, QwQ, DeepSeek-R1 and its distills, and many others."""


class Thinking(NamedTuple):
    """How one completion is read.

    Attributes:
      form: how its model writes reasoning.
      is_open: the prompt ends within reasoning, so that no opening comes.
    """

    form: ThinkForm
    is_open: bool


class _State(Enum):
    BEFORE = "before"  # neither reasoning nor an answer has begun
    THINKING = "thinking"
    ANSWER = "answer"


class ThinkReader:
    """Reads one completion: its reasoning itself, its answer by another reader.

    Args:
      thinking: how reasoning is written.
      answer: reads what follows.
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
        """Calls so far."""
        return self._answer.num_calls

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what it says."""
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
        """Return what was held back, now that nothing follows."""
        held, self._held = self._held, ""
        if self._state is _State.THINKING:
            pieces = self._reasoning(held.rstrip())
        else:
            pieces = self._push(held) if held else []
        return pieces + self._answer.finish(is_cut=is_cut)

    def _look_for_opening(self) -> None:
        # A marker behind anything else is none: so the tokens are read too (ReasoningTokens).
        if self._held.startswith(self._opening):
            self._state = _State.THINKING
        elif self._held and not self._opening.startswith(self._held):
            # Without reasoning the answer is shown as it is, its first line breaks included.
            self._state, self._has_answer = _State.ANSWER, True

    def _take_reasoning(self) -> list[Piece]:
        if not self._has_reasoning:
            # Some models write an opening although the prompt has it.
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
        # Behind the reasoning marker tokens are what people read them as: here they mark nothing.
        return self._answer.push(text.replace(_EDGE, ""))

    def _reasoning(self, text: str) -> list[Piece]:
        text = text.replace(_EDGE, "")
        self._has_reasoning |= bool(text)
        return [Reasoning(text)] if text else []


class ReasoningPlan(NamedTuple):
    """What a request's reasoning comes to.

    Attributes:
      tokens: which tokens of the completion it is.
      markers: tokens that the reader of the text has to see, and how the text shows each.
      thinking: how it is read; None where the form of tool calls reads it too (harmony).
    """

    tokens: ReasoningTokens
    markers: Mapping[int, str]
    thinking: Thinking | None


TAIL_CHARS: Final = 256
"""Of a prompt's end, where a template opens or closes reasoning."""
SWITCHES: Final = ("enable_thinking", "thinking")
"""What templates call the switch of reasoning."""
HISTORY_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")
"""What templates call the reasoning of an earlier turn."""
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
"""Of `<|channel|>analysis<|message|>`: a budget ends reasoning behind them at the earliest."""


class Reasoner:
    """How the served model reasons.

    Args:
      parser: the form of its reasoning.
      tokenizer: of the model.
      templates: its chat templates.

    Attributes:
      switches: names by which its template turns reasoning on and off.
      history_field: what its template calls the reasoning of an earlier turn; None if it shows
        none.
      takes_effort: its template reads `reasoning_effort`.

    Raises:
      ModelError: the tokenizer lacks a marker of the form.
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
        """Whether one form writes reasoning, text and calls of tools."""
        return self._parser is ReasoningParser.HARMONY

    def plan(
        self, prompt: str, *, continued: str | None, budget: int | None
    ) -> ReasoningPlan | None:
        """Return what becomes of a completion's reasoning; None if it has none.

        Args:
          prompt: the rendered conversation.
          continued: the words of the assistant's that are gone on with; None for a new turn.
          budget: most tokens of reasoning; None for no bound.
        """
        if self.reads_calls:
            if continued is not None:
                return None  # it is within its answer, which begins with no header
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
    """Return how a model reasons; None if it does not, or is not to be read so.

    Args:
      parser: the form; AUTO for the one whose markers the tokenizer has as tokens.
      tokenizer: of the model.
      templates: its chat templates.
      is_harmony: calls of tools are read in harmony's form, which reads reasoning too.

    Raises:
      ModelError: the tokenizer lacks a marker of the form, or calls have another form.
    """
    found = parser
    if parser is ReasoningParser.AUTO:
        found = _detected(tokenizer, templates, is_harmony=is_harmony)
    elif parser is ReasoningParser.HARMONY and not is_harmony:
        raise ModelError(
            "the reasoning parser harmony reads calls of tools as well, but those have another "
            "form; set server.tool_parser=harmony, or server.reasoning_parser=auto or none"
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
        # Follows the prompt, so it reads R1's distills and models that never reason as well.
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
        # A call of a tool is no reasoning either; its header goes on in many ways.
        closings=(final, (channel, *words("commentary"))),
        forced=(ids["<|end|>"], ids["<|start|>"], *words("assistant"), *final),
    )


class PlainText:
    """Reads a completion that is only text."""

    num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """Return the text."""
        return [Text(text)] if text else []

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return nothing: nothing was held back."""
        return []


def reader_of(form: CallsRead | None, thinking: Thinking | None = None) -> PieceReader:
    """Return what reads a completion.

    Args:
      form: how calls are written; None if there are none.
      thinking: how reasoning is written; None if there is none.
    """
    answer: PieceReader = PlainText() if form is None else form.reader()
    return answer if thinking is None else ThinkReader(thinking, answer)

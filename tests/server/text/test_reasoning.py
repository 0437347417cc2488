"""Tests of separating a model's reasoning from its answer: its markers, its tokens and its text."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest

from server.contract.generation import Delta, FinishReason, GenerationRequest
from server.scheduling.output import Relay, RelayEnd
from server.text.tool_forms.python_calls import PythonForm
from server.text.tool_forms.reasoning import (
    THINK,
    Reasoner,
    ReasoningPlan,
    Thinking,
    ThinkReader,
    marked,
    reader_of,
)
from server.text.tool_forms.tool_calls import (
    HERMES,
    MISTRAL,
    Arguments,
    CallBegins,
    Piece,
    Reasoning,
    Text,
    ToolForm,
)
from server.text.tool_forms.xml_calls import XmlForm
from tests.server.tiny_text import EOS_ID, TEMPLATE, tiny_text
from transport.frames import TokenRow
from triolet.config import ReasoningParser
from triolet.errors import ModelError
from triolet.sampling import SamplingParams

OPEN, CLOSE = marked("<think>"), marked("</think>")
OPEN_ID, CLOSE_ID = 259, 260
MARKERS = ("<think>", "</think>")
QWEN = TEMPLATE + (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
R1 = TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}"
HARMONY = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
GPT_OSS = TEMPLATE + "<|start|>assistant{# <|channel|> #}"
RID = b"r" * 16


def joined(pieces: list[Piece]) -> list[Piece]:
    """Return pieces with adjacent pieces of one kind joined."""
    whole: list[Piece] = []
    for piece in pieces:
        last = whole[-1] if whole else None
        match last, piece:
            case (Text(), Text()) | (Reasoning(), Reasoning()):
                whole[-1] = type(piece)(last.text + piece.text)
            case Arguments(), Arguments():
                whole[-1] = Arguments(piece.index, last.text + piece.text)
            case _:
                whole.append(piece)
    return whole


def read(parts: list[str], *, is_open: bool = False) -> list[Piece]:
    reader = reader_of(HERMES, Thinking(THINK, is_open))
    pieces = [piece for part in parts for piece in reader.push(part)]
    return joined(pieces + reader.finish())


CALL = '<tool_call>{"name": "clock", "arguments": {"x": "<think>"}}</tool_call>'
CALLED: list[Piece] = [CallBegins(0, "clock"), Arguments(0, '{"x": "<think>"}')]
CASES: list[tuple[str, bool, list[Piece]]] = [
    (f"{OPEN}\na\n\nb\n{CLOSE}\n\nHi there", False, [Reasoning("a\n\nb"), Text("Hi there")]),
    (f"a b\n{CLOSE}Hi", True, [Reasoning("a b"), Text("Hi")]),
    (f"{OPEN}\na{CLOSE}Hi", True, [Reasoning("a"), Text("Hi")]),
    (
        f"{OPEN}a <think> </think> b{CLOSE}Hi",
        False,
        [Reasoning("a <think> </think> b"), Text("Hi")],
    ),
    (f"{OPEN}{CLOSE}\n\nHi", False, [Text("Hi")]),
    (f"{OPEN}\ncut here ", False, [Reasoning("cut here")]),
    ("\n\nHi", False, [Text("\n\nHi")]),
    (f"Hi {OPEN}a{CLOSE} b", False, [Text("Hi <think>a</think> b")]),
    (f"{OPEN}{CALL}{CLOSE}{CALL}", False, [Reasoning(CALL), *CALLED]),
    (f"{OPEN}a{CLOSE}\n\n{CALL}", False, [Reasoning("a"), *CALLED]),
    (f"{OPEN}a{CLOSE}b{CLOSE}c", False, [Reasoning("a"), Text("b</think>c")]),
]


@pytest.mark.parametrize(("text", "is_open", "expected"), CASES)
def test_reasoning_is_told_apart_wherever_the_text_is_cut(
    text: str, is_open: bool, expected: list[Piece]
) -> None:
    assert read([text], is_open=is_open) == expected
    assert read(list(text), is_open=is_open) == expected
    for cut in range(1, len(text)):
        assert read([text[:cut], text[cut:]], is_open=is_open) == expected, text[:cut]


def test_a_marker_within_a_call_is_part_of_its_arguments() -> None:
    call = f'[TOOL_CALLS][{{"name": "clock", "arguments": {{"x": "{OPEN}"}}}}]'
    text = f"{OPEN}a{CLOSE}\n\n{call}"
    for cut in range(len(text)):
        reader = reader_of(MISTRAL, Thinking(THINK, is_open=False))
        pieces = joined([*reader.push(text[:cut]), *reader.push(text[cut:]), *reader.finish()])
        assert pieces == [Reasoning("a"), *CALLED], text[:cut]


@pytest.mark.parametrize("cut", range(1, len(OPEN)))
def test_a_marker_that_a_stop_string_cuts_leaves_text(cut: int) -> None:
    pieces = read([f"{OPEN}a{CLOSE}b{OPEN[:cut]}"])
    assert pieces == [Reasoning("a"), Text("b" + "<think>"[: cut - 1])]


def test_no_more_is_held_back_than_may_become_a_marker() -> None:
    reader = reader_of(None, Thinking(THINK, is_open=True))
    assert reader.push("a b") == [Reasoning("a b")]
    assert reader.push(" c\n") == [Reasoning(" c")], "the last whitespace may belong to the marker"
    assert reader.push("d") == [Reasoning("\nd")]
    assert reader.push(f"{CLOSE}e") == [Text("e")]


@pytest.mark.parametrize("form", [HERMES, MISTRAL, PythonForm(), XmlForm()])
@pytest.mark.parametrize("text", ["a", f"a{CLOSE}b"])
def test_readers_are_freed_at_the_end_also_if_it_comes_within_the_reasoning(
    form: ToolForm, text: str
) -> None:
    answer = form.reader()
    reader, seen = ThinkReader(Thinking(THINK, is_open=True), answer), weakref.ref(answer)
    del answer
    reader.push(text)
    reader.finish(is_cut=True)
    gc.disable()
    try:
        del reader
        assert seen() is None, "freed without cycle collection"
    finally:
        gc.enable()


def reasoner(template: str, parser: ReasoningParser = ReasoningParser.AUTO) -> Reasoner | None:
    text = tiny_text(template=template, markers=MARKERS, reasoning_parser=parser)
    return text.reasoner


def plan(
    prompt: str,
    parser: ReasoningParser = ReasoningParser.AUTO,
    *,
    continued: str | None = None,
    budget: int | None = None,
) -> ReasoningPlan | None:
    found = reasoner(QWEN, parser)
    assert found is not None
    return found.plan(prompt, continued=continued, budget=budget)


def is_open(found: ReasoningPlan | None) -> bool | None:
    """Return whether a completion starts within reasoning; None if it has none."""
    if found is None:
        return None
    assert found.thinking is not None
    assert found.thinking.is_open == (found.tokens.opening is None)
    return found.thinking.is_open


def test_the_prompt_says_whether_reasoning_has_begun() -> None:
    assert is_open(plan("[user]hi[assistant]")) is False
    assert is_open(plan("[user]hi[assistant]<think>\n")) is True
    assert is_open(plan("[user]hi[assistant]<think>\n\n</think>\n\n")) is None
    assert is_open(plan("[user]hi <think>[assistant]")) is False, "the user wrote that marker"
    assert is_open(plan("[user]hi[assistant]", ReasoningParser.DEEPSEEK_R1)) is True
    closed = "[assistant]<think>\n\n</think>"
    assert is_open(plan(closed, ReasoningParser.DEEPSEEK_R1)) is None


def test_a_turn_that_is_gone_on_with_says_so_itself() -> None:
    prompt = "[assistant]<think>\n\n</think>\n\n"
    assert is_open(plan(prompt + "Hi", continued="Hi")) is None
    assert is_open(plan(prompt, continued="<think>\nso")) is True
    assert is_open(plan(prompt, continued="<think>so</think>Hi")) is None


def test_the_form_is_found_by_the_markers_that_are_tokens() -> None:
    assert tiny_text().reasoner is None
    assert reasoner("", ReasoningParser.AUTO) is None, "without a template there are no chats"
    assert reasoner(QWEN, ReasoningParser.NONE) is None
    found = reasoner(QWEN)
    assert found is not None
    assert (found.switches, found.history_field) == (["enable_thinking"], None)
    assert (found.takes_effort, found.reads_calls) == (False, False)
    shown = reasoner(TEMPLATE + "{{ messages[0].reasoning_content }}{{ reasoning_effort }}")
    assert shown is not None
    assert (shown.switches, shown.history_field) == ([], "reasoning_content")
    assert shown.takes_effort


def test_a_form_without_its_markers_is_refused_at_the_start() -> None:
    with pytest.raises(ModelError, match="deepseek_r1 needs the token <think>"):
        tiny_text(reasoning_parser=ReasoningParser.DEEPSEEK_R1)


def test_harmony_is_one_form_of_reasoning_and_calls() -> None:
    text = tiny_text(template=GPT_OSS, specials=HARMONY)
    found = text.reasoner
    assert found is not None
    assert found.reads_calls
    ids = {word: 259 + place for place, word in enumerate(HARMONY) if word != "<|end|>"}
    planned = found.plan("<|start|>assistant", continued=None, budget=0)
    assert planned is not None
    assert planned.thinking is None
    assert set(planned.markers.values()) == {marked(word) for word in HARMONY}
    final = (ids["<|channel|>"], *b"final", ids["<|message|>"])
    assert planned.tokens.closings[0] == final
    assert planned.tokens.forced[-len(final) :] == final
    assert planned.tokens.budget == 3, "a header precedes the reasoning"


def relay_of(budget: int | None = None, **changes: object) -> Relay:
    text = tiny_text(template=QWEN, markers=MARKERS)
    assert text.reasoner is not None
    planned = text.reasoner.plan("[assistant]", continued=None, budget=budget)
    assert planned is not None
    sampling = SamplingParams(max_tokens=1000, reasoning=planned.tokens)
    settings: dict[str, object] = {"sampling": sampling, "markers": planned.markers, **changes}
    return Relay(GenerationRequest(RID, (1,), deadline_s=1.0, **settings), text)  # type: ignore[arg-type]


def run(relay: Relay, ids: list[int]) -> tuple[str, RelayEnd | None]:
    """Push ids until the end; return the text and the end."""
    end = None
    for position, token_id in enumerate(ids):
        end = relay.push(TokenRow(RID, 0, position, token_id), now=1.0)
        if end is not None:
            break
    [event] = relay.mailbox.take(now=9.0)
    assert isinstance(event, Delta)
    return event.text, end


def test_marker_tokens_and_only_they_are_shown_as_markers() -> None:
    text, _ = run(relay_of(), [OPEN_ID, *b"a </think>", CLOSE_ID, *b"Hi", EOS_ID])
    assert text == f"{OPEN}a </think>{CLOSE}Hi"


def test_a_stop_string_ends_the_answer_and_not_its_reasoning() -> None:
    ids = [OPEN_ID, *b"a, b. ", CLOSE_ID, *b"c. d, e", EOS_ID]
    assert run(relay_of(stop=(",",)), ids) == (
        f"{OPEN}a, b. {CLOSE}c. d",
        RelayEnd(FinishReason.STOP, ","),
    )
    plain = relay_of(stop=(",",))
    assert run(plain, [*b"a, b"]) == ("a", RelayEnd(FinishReason.STOP, ",")), (
        "all text is the answer"
    )


def test_reasoning_that_is_cut_is_shown_to_its_last_character() -> None:
    relay = relay_of(stop=("ab!",))
    text, end = run(relay, [OPEN_ID, *b"xab", EOS_ID])
    assert (text, end) == (f"{OPEN}xab", RelayEnd(FinishReason.STOP))


def test_a_budget_travels_with_the_tokens() -> None:
    found = plan("[assistant]", budget=7)
    assert found is not None
    assert (found.tokens.budget, found.tokens.forced) == (7, (CLOSE_ID,))
    assert replace(found.tokens, budget=None) == plan("[assistant]").tokens  # type: ignore[union-attr]

"""Test cases for tool calls: sample completions in each format, with the expected results."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from server.text.tool_forms.table import HARMONY, PYTHONIC, QWEN3_CODER
from server.text.tool_forms.tool_calls import (
    GRANITE,
    HERMES,
    LLAMA,
    MAX_BLANKS,
    MISTRAL,
    MISTRAL_NAMED,
    PHI,
    Arguments,
    CallBegins,
    Reasoning,
    Text,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.text.tool_forms.tool_calls import Piece, PieceReader, ToolForm

Calls = list[tuple[str, object]]
MARKERS: Final = (
    '</tool_call> <tool_call> [TOOL_CALLS] [ARGS] <|tool_call|> functools[{"name" '
    "<|/tool_call|> </parameter> </function> <parameter=x> <|end|> <|call|> [f(a=1)]"
)
NESTED: Final = {"a": ['}]"', {"b": "\\"}], "ü": MARKERS}
SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "f": {
        "type": "object",
        "properties": {
            "x": {"type": "integer"},
            "word": {"type": "string"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "flag": {"type": "boolean"},
            "inner": {"$ref": "#/$defs/inner"},
            "digits": {"enum": ["1", "2"]},
        },
        "$defs": {"inner": {"type": "object"}},
    }
}


class Case(NamedTuple):
    """A completion and its expected result.

    Attributes:
      form: the format.
      text: the completion's text.
      shown: the text beside calls.
      calls: names and arguments.
      thoughts: the reasoning.
    """

    form: ToolForm
    text: str
    shown: str
    calls: Calls
    thoughts: str = ""


def hermes(*calls: object) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def listed(*calls: tuple[str, object]) -> str:
    return json.dumps([{"name": name, "arguments": told} for name, told in calls])


def xml(name: str, **arguments: str) -> str:
    told = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{told}</function>\n</tool_call>"


def harmony(text: str) -> str:
    """Return a completion with its markers, written in double angles, as tokens."""
    return text.replace("«", "\udc00<|").replace("»", "|>\udc00")


FAR: Final = " " * (MAX_BLANKS + 1)
"""More whitespace than is allowed between an opening and a call."""
TOO_FAR: Final = f'<tool_call>{FAR}{{"name": "f", "arguments": {{}}}}'
F_AND_G: Final[Calls] = [("f", {"x": 1}), ("g", NESTED)]
CASES: Final[list[Case]] = [
    Case(HERMES, "Just text, with < and <tool.", "Just text, with < and <tool.", []),
    Case(HERMES, hermes({"name": "f", "arguments": {"x": 1}}), "", [("f", {"x": 1})]),
    Case(
        HERMES,
        "Let me see. " + hermes({"name": "f", "arguments": {}}, {"name": "g", "arguments": NESTED}),
        "Let me see. ",
        [("f", {}), ("g", NESTED)],
    ),
    Case(HERMES, hermes({"arguments": {"x": 1}, "name": "f"}), "", [("f", {"x": 1})]),
    Case(
        HERMES,
        "So: "
        + hermes({"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": NESTED}).replace(
            "\n</tool_call>", "", 1
        ),
        "So: ",
        F_AND_G,
    ),
    Case(
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}<tool_call>{"arguments": {"x": 1}, "name": "g"}',
        "",
        [("f", {}), ("g", {"x": 1})],
    ),
    Case(HERMES, hermes({"name": "f", "arguments": None}), "", [("f", None)]),
    Case(
        HERMES,
        hermes({"name": "f", "arguments": {"x": 1}, "note": 'see <tool_call>, " </tool_call>'})
        + "\nBye",
        "\nBye",
        [("f", {"x": 1})],
    ),
    Case(
        HERMES,
        hermes({"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}).replace("{}", '{}"'),
        "",
        [("f", {}), ("g", {})],
    ),
    Case(
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": }\n</tool_call>\nBye',
        "\nBye",
        [("f", {})],
    ),
    Case(
        HERMES,
        '<tool_call>{"name": "f", "arguments": </tool_call>' + hermes({"name": "g"}),
        "",
        [("f", {}), ("g", {})],
    ),
    Case(HERMES, TOO_FAR, TOO_FAR, []),
    Case(HERMES, FAR + hermes({"name": "f"}), FAR, [("f", {})]),
    Case(HERMES, hermes({"name": "f"}) + FAR + "Bye", FAR[1:] + "Bye", [("f", {})]),
    Case(HERMES, "<tool_call>no JSON</tool_call> ok", "<tool_call>no JSON</tool_call> ok", []),
    Case(HERMES, '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
    Case(LLAMA, '{"name": "f", "parameters": {"x": [1, 2]}}', "", [("f", {"x": [1, 2]})]),
    Case(
        LLAMA,
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"y": "z"}}',
        "",
        [("f", {}), ("g", {"y": "z"})],
    ),
    Case(LLAMA, '{"parameters": {"x": 1}, "name": "f"}', "", [("f", {"x": 1})]),
    Case(
        LLAMA,
        '{"type": "function", "name": "f", "parameters": {"x": "\\ud83d"}}',
        "",
        [("f", {"x": "\ud83d"})],
    ),
    Case(
        LLAMA,
        f'{{"name": "f", "parameters": {{}}}};{FAR}{{"name": "g", "parameters": {{}}}}',
        "",
        [("f", {}), ("g", {})],
    ),
    Case(LLAMA, FAR + '{"name": "f"}', FAR + '{"name": "f"}', []),
    Case(LLAMA, 'Hello {"name": "f"}', 'Hello {"name": "f"}', []),
    Case(LLAMA, '{"not": "a call"}', '{"not": "a call"}', []),
    Case(LLAMA, '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    Case(LLAMA, '{"name": "Ann"}', '{"name": "Ann"}', []),
    Case(MISTRAL, "[TOOL_CALLS] " + listed(*F_AND_G), "", F_AND_G),
    Case(MISTRAL, "Wait.[TOOL_CALLS]" + listed(*F_AND_G) + " Bye", "Wait. Bye", F_AND_G),
    Case(
        MISTRAL,
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}, "id": "a]}"}]',
        "",
        [("f", {"x": 1})],
    ),
    Case(MISTRAL, '[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", {})]),
    Case(MISTRAL, "the token [TOOL_CALLS] is", "the token [TOOL_CALLS] is", []),
    Case(MISTRAL, "see [1] and [T", "see [1] and [T", []),
    Case(
        MISTRAL_NAMED,
        f'[TOOL_CALLS]f[ARGS]{{"x": 1}}[TOOL_CALLS]g[CALL_ID]a1b2[ARGS]{json.dumps(NESTED)}',
        "",
        F_AND_G,
    ),
    Case(MISTRAL_NAMED, 'So: [TOOL_CALLS]f{"x": 1}', "So: ", [("f", {"x": 1})]),
    Case(MISTRAL_NAMED, "[TOOL_CALLS]f and g", "[TOOL_CALLS]f and g", []),
    Case(GRANITE, "<|tool_call|>" + listed(*F_AND_G), "", F_AND_G),
    Case(GRANITE, "I look.<tool_call> " + listed(("f", {})), "I look.", [("f", {})]),
    Case(PHI, f"<|tool_call|>{listed(*F_AND_G)}<|/tool_call|>", "", F_AND_G),
    Case(PHI, "functools" + listed(("f", {"x": 1})), "", [("f", {"x": 1})]),
    *(
        Case(
            PHI,
            '<|tool_call|>[{"name": "f", "arguments": {"x": 1}' + end + "<|/tool_call|>Bye <b>",
            "Bye <b>",
            [("f", {"x": 1})],
        )
        for end in ("", "}", "}, ", "}]", "}, ]", "\n} \n")
    ),
    Case(PHI, '<|tool_call|>[{"name": "f", "arguments": {}}, <b>', ", <b>", [("f", {})]),
    Case(GRANITE, "<|tool_call|>" + listed(("f", {}))[:-1] + ", ] Bye", " Bye", [("f", {})]),
    Case(PHI, "import functools\n", "import functools\n", []),
    Case(
        QWEN3_CODER,
        "I look.\n" + xml("f", x="1", word="7\nlines", digits="2") + "\n" + xml("g"),
        "I look.\n",
        [("f", {"x": 1, "word": "7\nlines", "digits": "2"}), ("g", {})],
    ),
    Case(
        QWEN3_CODER,
        xml("f", word=MARKERS, maybe="null", flag="True", inner="{'a': [1, None]}"),
        "",
        [("f", {"word": MARKERS, "maybe": None, "flag": True, "inner": {"a": [1, None]}})],
    ),
    Case(
        QWEN3_CODER,
        xml("g", list="[1, 2]", text="plain words"),
        "",
        [
            ("g", {"list": [1, 2], "text": "plain words"}),
        ],
    ),
    Case(
        QWEN3_CODER,
        "<function=g>\n<parameter=y>\n2\n</parameter>\n</function>\n</tool_call>",
        "",
        [("g", {"y": 2})],
    ),
    Case(QWEN3_CODER, "<function=g><parameter=y>2</parameter>", "", [("g", {"y": 2})]),
    Case(
        QWEN3_CODER,
        (xml("f", x="1") + "\n" + xml("g", y="2")).replace("</function>\n</tool_call>", "", 1),
        "",
        [("f", {"x": 1}), ("g", {"y": 2})],
    ),
    Case(
        QWEN3_CODER,
        (xml("f", x="1") + "\n" + xml("g", y="2")).replace("</tool_call>", "", 1),
        "",
        [("f", {"x": 1}), ("g", {"y": 2})],
    ),
    Case(
        QWEN3_CODER,
        (xml("f", x="1") + "\n" + xml("g", y="2") + " Bye").replace("</function>", ""),
        " Bye",
        [("f", {"x": 1}), ("g", {"y": 2})],
    ),
    Case(
        QWEN3_CODER,
        xml("f") + "<tool_call><function=f>\n<function=g>\n</tool_call>" + xml("f", x="1"),
        "",
        [("f", {}), ("f", {}), ("g", {}), ("f", {"x": 1})],
    ),
    Case(
        QWEN3_CODER,
        (xml("f", word="x") + "Next.\n" + xml("g", y="2")).replace("</tool_call>", "\n", 1),
        "\n\nNext.\n",
        [("f", {"word": "x"}), ("g", {"y": 2})],
    ),
    Case(
        QWEN3_CODER,
        xml("f", word=f"</parameter></function>{'a' * 1025}<tool_call><function=g>"),
        "",
        [("f", {"word": f"</parameter></function>{'a' * 1025}<tool_call><function=g>"})],
    ),
    Case(
        QWEN3_CODER,
        (xml("f", word="x") + "\n" + xml("g", y="2")).replace("</parameter>\n", "", 1),
        "",
        [("f", {"word": "x"}), ("g", {"y": 2})],
    ),
    Case(
        QWEN3_CODER,
        xml("f", word="x").replace("</parameter>\n", ""),
        "",
        [("f", {"word": "x"})],
    ),
    Case(
        QWEN3_CODER,
        xml("f", word="x").replace("</tool_call>", "Hello"),
        "\nHello",
        [("f", {"word": "x"})],
    ),
    Case(
        QWEN3_CODER,
        xml("f", word="x</parameter> and </parameter>\n</function>, so") + "\nBye",
        "\nBye",
        [("f", {"word": "x</parameter> and </parameter>\n</function>, so"})],
    ),
    Case(
        QWEN3_CODER,
        "<tool_call>\n" + xml("g", y="2"),
        "<tool_call>\n",
        [("g", {"y": 2})],
    ),
    Case(
        QWEN3_CODER, f"<tool_call>{FAR}<function=f>\n</function>", f"<tool_call>{FAR}", [("f", {})]
    ),
    Case(QWEN3_CODER, "a <tool_call> is a tag", "a <tool_call> is a tag", []),
    Case(
        PYTHONIC,
        "[f(x=1, word=\"it's (a), 'b'\"), g.h(a=[True, None, -2.5], b={'c': (1, 2)})]",
        "",
        [
            ("f", {"x": 1, "word": "it's (a), 'b'"}),
            ("g.h", {"a": [True, None, -2.5], "b": {"c": [1, 2]}}),
        ],
    ),
    Case(PYTHONIC, f"[f(word={MARKERS!r}), g()]", "", [("f", {"word": MARKERS}), ("g", {})]),
    Case(
        PYTHONIC,
        "<|python_start|>[f(flag=true, x=name)]<|python_end|>",
        "",
        [("f", {"flag": True, "x": "name"})],
    ),
    Case(
        PYTHONIC,
        "[f(x=1, *word=2, 'a, x=3', 4, word='b', **{'x': 5}), g(a=f(1, b=2))]",
        "",
        [("f", {"x": 1, "word": "b"}), ("g", {"a": "f(1, b=2)"})],
    ),
    Case(
        PYTHONIC,
        "[f(word=\"\"\"a 'b', \"c, d\" e\"\"\", x='', y='''it, \\' '''), g(x='' '')]",
        "",
        [("f", {"word": "a 'b', \"c, d\" e", "x": "", "y": "it, ' "}), ("g", {"x": ""})],
    ),
    Case(PYTHONIC, "[f(), f(x=1, word='a'", "", [("f", {}), ("f", {"x": 1, "word": "a"})]),
    Case(PYTHONIC, "[f(x=1)", "", [("f", {"x": 1})]),
    Case(PYTHONIC, "[f(x=1<|python_end|>", "", [("f", {"x": 1})]),
    Case(PYTHONIC, "[f(x='<|python_end|>'", "", [("f", {"x": "<|python_end|>"})]),
    Case(PYTHONIC, "[f(x=1]<|python_end|> Bye", "", [("f", {"x": 1})]),
    Case(PYTHONIC, "[f(x=1], }, word=2)]", "", [("f", {"x": 1, "word": 2})]),
    Case(PYTHONIC, f"{FAR}[f(a=1)]", f"{FAR}[f(a=1)]", []),
    Case(PYTHONIC, f"[f(a={FAR}1,{FAR}b=2)]{FAR}", "", [("f", {"a": 1, "b": 2})]),
    Case(PYTHONIC, f"[{FAR}f(a=1)]", f"[{FAR}f(a=1)]", []),
    Case(PYTHONIC, "[1] is a note", "[1] is a note", []),
    Case(PYTHONIC, "[link](http://x) f(a=1)", "[link](http://x) f(a=1)", []),
    Case(PYTHONIC, "Hello [f(a=1)]", "Hello [f(a=1)]", []),
    Case(
        HARMONY,
        harmony(
            "«channel»analysis«message»Think.«end»«start»assistant«channel»commentary«message»I "
            "look.«end»«start»assistant«channel»commentary to=functions.f «constrain»json«message»"
        )
        + json.dumps(NESTED),
        "I look.",
        [("f", NESTED)],
        "Think.",
    ),
    Case(
        HARMONY,
        harmony(" to=functions.f«channel»commentary json«message»{}«call»"),
        "",
        [("f", {})],
    ),
    Case(
        HARMONY,
        harmony(
            "«channel»analysis«message»Hm.«end»«start»assistant«channel»final«message»"
            "It quotes <|end|>«return»"
        ),
        "It quotes <|end|>",
        [],
        "Hm.",
    ),
    Case(
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "Yes.",
        [],
        "Hm.",
    ),
    Case(HARMONY, "goes on", "goes on", []),
    Case(HARMONY, " t", " t", []),
]


class Said(NamedTuple):
    """A parsed completion: fields as in Case, with arguments as written."""

    shown: str
    calls: list[tuple[str, str]]
    thoughts: str


def reader_of(case: Case) -> PieceReader:
    return case.form.of_tools(SCHEMAS).reader()


def joined(pieces: Sequence[Piece]) -> Said:
    """Join pieces as a client would."""
    text = thoughts = ""
    names: list[str] = []
    arguments: list[str] = []
    for piece in pieces:
        match piece:
            case Text():
                text += piece.text
            case CallBegins():
                assert piece.index == len(names)
                names.append(piece.name)
                arguments.append("")
            case Arguments():
                assert piece.index == len(names) - 1
                arguments[-1] += piece.text
            case Reasoning():
                thoughts += piece.text
    return Said(text, list(zip(names, arguments, strict=True)), thoughts)


def read(case: Case, parts: Sequence[str], *, is_cut: bool = False) -> Said:
    """Parse a completion that arrives in parts."""
    reader = reader_of(case)
    pieces = [piece for part in parts for piece in reader.push(part)]
    pieces += reader.finish(is_cut=is_cut)
    said = joined(pieces)
    assert reader.num_calls == len(said.calls)
    return said

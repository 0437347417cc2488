"""Tests of which chat templates run in the server process, and how the others run in a child
process."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from server.text.isolated import run_isolated
from server.text.linear_template import MAX_TEMPLATE_CHARS
from server.text.template import ChatTemplate, decoded_rendering, encoded_rendering
from tests.end_to_end.scripted_model import TEMPLATE as SCRIPTED
from tests.server.tiny_text import TEMPLATE as TINY
from triolet.errors import RequestError
from triolet.units import MIB

from .test_template import CHATML
from .test_tool_templates import TEMPLATES as TOOL_TEMPLATES

DEMO = Path(__file__).parents[3] / "triolet" / "demo" / "tokenizer_config.json"
MESSAGES: list[dict[str, object]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
]
SHIPPED = {
    "demo": json.loads(DEMO.read_text())["chat_template"],
    "smollm2": "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<s>system\nHelp.</s>\n' }}"
    "{% endif %}{{'<s>' + message['role'] + '\n' + message['content'] + '</s>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}",
    "chatml": CHATML,
    "tiny": TINY,
    "scripted": SCRIPTED,
    **{name: source for name, (_, _, source) in TOOL_TEMPLATES.items()},
}
IDIOMS = {
    "the last question": "{% set ns = namespace(last=messages | length - 1, looks=true) %}"
    "{% for m in messages[::-1] %}{% set at = (messages | length - 1) - loop.index0 %}"
    "{% if ns.looks and m.role == 'user' and not m.content.startswith('<x>') %}"
    "{% set ns.looks = false %}{% set ns.last = at %}{% endif %}{% endfor %}{{ ns.last }}",
    "thoughts": "{% for m in messages %}{% set content = m.content %}{% set said = '' %}"
    "{% if m.reasoning is string %}{% set said = m.reasoning %}{% elif '</t>' in content %}"
    "{% set said = content.split('</t>')[0].rstrip('\n').split('<t>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</t>')[-1].lstrip('\n') %}{% endif %}"
    "{{ said | trim }}{{ content | trim }}{% endfor %}",
    "neighbours": "{% for m in messages %}{% if loop.last or loop.index0 == 0 or "
    "messages[loop.index0 + 1].role != 'tool' %}{{ m.role }}{% endif %}{% endfor %}",
    "turns": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate, not ' + m.role) }}{% endif %}{% endfor %}",
    "the system's own": "{% if messages[0].role == 'system' %}{% set rules = messages[0].content %}"
    "{% set messages = messages[1:] %}{% else %}{% set rules = '' %}{% endif %}"
    "{{ bos_token }}{% for m in messages %}{{ rules + m.content + eos_token }}{% endfor %}",
    "dates": "{% if not date is defined %}{% if strftime_now is defined %}"
    "{% set date = strftime_now('%d %b %Y') %}{% endif %}{% endif %}{{ 'Today: ' ~ date }}",
    "tools": "{% for tool in tools %}{{ tool.function | tojson(indent=4) }}"
    "{% for name, told in tool.function.parameters.properties.items() %}{{ name }}: "
    "{{ told.type | default('any') }}{% if not loop.last %}, {% endif %}{% endfor %}{% endfor %}",
    "own tools": "{{ own | reject('equalto', 'x') | join(', ') }}{{ (own or []) | length }}",
}
TREE = "{% set x0 = ['a'] %}{% set y0 = ['a'] %}" + "".join(
    f"{{% set {v}{i + 1} = [{v}{i}, {v}{i}] %}}" for v in "xy" for i in range(40)
)
GROWING = {
    "a tree of itself": "{% set ns = namespace(x='a') %}"
    + "{% set ns.x = [ns.x, ns.x] %}" * 40
    + "{{ 'a' ~ ns.x }}",
    "a tree of names": TREE + "{{ x40 }}",
    "doubled": "{% set ns = namespace(s='x') %}{% for i in messages %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubled by turns": "{% set ns = namespace(s='x') %}{% for i in messages %}"
    "{% set ns.t = ns.s + ns.s %}{% set ns.s = ns.t %}{% endfor %}",
    "doubled lists": "{% set ns = namespace(s=[0]) %}{% for i in messages %}"
    "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubled numbers": "{% set ns = namespace(n=3) %}{% for i in messages %}"
    "{% set ns.n = ns.n + ns.n %}{% endfor %}",
    "added to": "{% set ns = namespace(s='') %}{% for m in messages %}"
    "{% set ns.s = ns.s + m.content %}{% endfor %}",
    "escaped again": "{% set a = messages | tojson %}"
    + "".join(f"{{% set {b} = {a} | tojson %}}" for a, b in zip("abcdef", "bcdefg", strict=True)),
    "many parts": "{{ messages[0].content" + " + 'x'" * 32 + " }}",
    "told again": "{{ " + "[" * 9 + "messages" + "] ~ ''" * 9 + " }}",
}
NESTED = {
    "loops over all": "{% for a in messages %}{% for b in messages %}{% endfor %}{% endfor %}",
    "loops over an outer item": "{% for a in messages %}{% for b in a.content %}{% for c in a.role "
    "%}{% endfor %}{% endfor %}{% endfor %}",
    "loops over what a loop found": "{% set ns = namespace(x='') %}{% for a in messages %}"
    "{% set ns.x = a.content %}{% for b in ns.x %}{% endfor %}{% endfor %}",
    "conditions": "{% for a in messages %}{% for b in messages if false %}{% endfor %}{% endfor %}",
    "literals": "{% for a in 'abc' %}{% for b in 'abc' %}{% endfor %}{% endfor %}",
    "recursion": "{% for m in [messages] recursive %}{{ loop([m, m]) }}{% endfor %}",
    "macros": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    **{
        operation: "{% for m in messages %}{% if " + operation + " %}{% endif %}{% endfor %}"
        for operation in (
            "messages | tojson", "messages ~ ''", "messages[0].content | trim", "messages[1:]",
            "m in messages", "messages == tools", "messages[0].content + ''", "messages | list",
            "messages[0].content.split('x')", "'x' in messages[0].content",
        )
    },
}  # fmt: skip
HIDDEN = {
    "in a dictionary": "{% set d = {'split': messages[0].content.ljust} %}{{ d.split(9) }}",
    "in a namespace": "{% set ns = namespace(split='') %}"
    "{% set ns.split = messages[0].content.ljust %}{{ ns.split(9) }}",
    "in a list": "{{ [messages[0].content['ljust']][0](9) }}",
    "by a computed name": "{{ messages[0].content[messages[1].content] }}",
    "by a name of a namespace": "{% set ns = namespace(a=1) %}{{ ns[messages[0].content] }}",
    "as a function": "{% set raise_exception = messages[0].content %}{{ raise_exception(9) }}",
    "in an argument": "{{ messages | length(lipsum(n=9)) }}",
    "in a method's further arguments": "{{ messages[0].content.split(*lipsum(n=9)) }}",
    "in further arguments": "{{ messages | length(*lipsum(n=9)) }}",
    "in a named argument": "{{ raise_exception('x', y=lipsum(n=9)) }}",
    "in a test": "{% if x is defined(*lipsum(n=9)) %}{% endif %}",
    "in a test of a function": "{% if strftime_now is defined(lipsum(n=9)) %}{% endif %}",
    "in a slice": "{{ messages[lipsum(n=9):] }}",
    "in a default": "{{ x | default('', lipsum(n=9)) }}",
    "in a choice": "{{ 1 if true else lipsum(n=9) }}",
    "in a condition of a loop": "{% for m in messages if lipsum(n=9) %}{% endfor %}",
    "behind a loop": "{% for m in messages %}{% else %}{{ lipsum(n=9) }}{% endfor %}",
}
COSTLY = [
    "lipsum(n=100000)", "'x' * 1000000000", "1000000000 * 'x'", "[0] * 100000000",
    "9 ** 999999999", "'%1000000000d' % 1", "'%*d' % (1000000000, 1)", "messages[0].content % 1",
    "('{0}' * 2000).format('x' * 1000000)", "messages | sum(start=[])",
    "messages | tojson(indent=400000000)", "messages[0].content.replace('', 'y' * 1000000)",
    "messages[0].content.translate({72: 'y' * 1000000})",
    "messages[0].content | center(1000000000)", "messages[0].content.ljust(1000000000)",
    "messages[0].content.zfill(1000000000)", "'\\t'.expandtabs(1000000000)",
    "messages[0].content | indent(1000000000)", "messages | batch(1000000000, 1) | list",
    "messages | slice(100000000) | list", "messages | select('odd') | list",
    "messages[0].content is odd", "messages[0].content is divisibleby 2",
    "messages[0].content.strip(messages)", "messages | xmlattr", "''.__class__.__mro__",
    "messages.append(1)", "cycler.__init__.__globals__",
]  # fmt: skip
"""Templates that no child process finishes."""
UNKNOWN = [
    f"messages[0].content.strip('{'x' * 100}')",
    "range(9) | list", "cycler(1)", "joiner()", "dict(a=1)", "namespace(a=1)", "7 // 2", "7 / 2",
    "'{0}'.format('x')", "'%s' | format(messages)", "messages | sort", "messages[0] | dictsort",
    "messages | groupby('role') | list", "messages | unique | list",
    "messages[0].content | replace('x', 'yy')", "'x'.join(messages[0].content)",
    "messages[0].content | wordwrap(1)", "messages[0].content | truncate(9)",
    "messages[0].content | urlize", "messages | pprint", "messages[0].content | striptags",
    "messages | map('upper') | list", "messages | random",
    "messages | selectattr('content.ljust') | list", "1 is sameas 1", "messages[0].content | e",
    "messages[0].content | safe", "self", "loop", "strftime_now(messages[0].content)",
    "messages[0].content.encode()",
]  # fmt: skip
"""Templates that may cost much, or lead to it."""
STATEMENTS = [
    "{% set x %}{{ messages }}{% endset %}", "{% filter upper %}{{ messages }}{% endfilter %}",
    "{% with x = messages %}{% endwith %}", "{% block a %}{% endblock %}", "{% include 'x' %}",
    "{% autoescape 'x' | center(100000000) %}{% endautoescape %}", "{% import 'x' as y %}",
    "{% call(x) messages() %}{% endcall %}", "{% extends 'x' %}", "{% from 'x' import y %}",
]  # fmt: skip
OF_TREES = ("x40 | string", "x40 | tojson", "x40 == y40", "x40 ~ 'a'", "x40 in [y40]", "'%s' % x40")
ATTACKS = {
    **{use: TREE + "{{ " + use + " }}" for use in OF_TREES},
    "a tree of itself": GROWING["a tree of itself"],
    **{source: "{{ " + source + " }}" for source in COSTLY},
}


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {})


def is_linear(source: str) -> bool:
    return template(source).is_linear(has_tools=False)


def isolated(source: str, cpu_s: float = 0.05, memory_bytes: int = 64 * MIB) -> str:
    work = partial(encoded_rendering, template(source), MESSAGES, max_chars=100_000)
    return decoded_rendering(
        run_isolated(work, cpu_s=cpu_s, memory_bytes=memory_bytes, max_bytes=MIB)
    )


@pytest.mark.parametrize("source", [*SHIPPED.values(), *IDIOMS.values()], ids=[*SHIPPED, *IDIOMS])
def test_templates_of_families_run_in_the_server(source: str) -> None:
    assert is_linear(source)


@pytest.mark.parametrize(
    "source",
    [
        *(f"{{{{ {unknown} }}}}" for unknown in UNKNOWN),
        *STATEMENTS,
        *(source for group in (GROWING, NESTED, HIDDEN) for source in group.values()),
        *ATTACKS.values(),
    ],
)
def test_what_is_not_known_to_be_cheap_is_not_linear(source: str) -> None:
    assert not is_linear(source)


@pytest.mark.slow
@pytest.mark.parametrize("family", SHIPPED)
def test_no_family_s_template_hides_what_is_costly(family: str) -> None:
    """In front of it, after it, or in a loop."""
    sound = SHIPPED[family]
    hostile = [place for bad in STATEMENTS for place in (bad + sound, sound + bad)]
    for bad in (*COSTLY, *UNKNOWN):
        hostile += f"{{% set x = [{bad}] %}}{sound}", f"{sound}{{{{ {bad} }}}}"
        hostile += [f"{sound}{{% for x in messages %}}{{% if {bad} %}}{{% endif %}}{{% endfor %}}"]
    survivors = [source for source in hostile if is_linear(source)]
    assert not survivors


def test_a_template_belongs_to_the_conversation_that_it_is_picked_for() -> None:
    both = ChatTemplate({"default": "{{ messages }}", "tool_use": "{{ lipsum() }}"}, {})
    assert both.is_linear(has_tools=False)
    assert not both.is_linear(has_tools=True)


def test_long_templates_and_special_tokens_are_not_linear() -> None:
    longest = "x" * MAX_TEMPLATE_CHARS
    assert is_linear(longest)
    assert not is_linear(longest + "x")
    assert not ChatTemplate({"a": longest}, {"bos_token": "x"}).is_linear(has_tools=False)


def test_a_client_cannot_replace_a_special_token() -> None:
    """Special tokens are short, and the template may repeat them."""
    told = ChatTemplate({"default": "{{ bos_token }}"}, {"bos_token": "<s>"})
    assert told.render([], template_kwargs={"bos_token": "x" * 100}) == "<s>"


@pytest.mark.parametrize("source", ATTACKS.values(), ids=ATTACKS)
def test_a_hostile_template_gets_nowhere(source: str) -> None:
    with pytest.raises(RequestError) as refusal:
        isolated(source)
    assert (refusal.value.status, refusal.value.param) == (400, "messages")


def test_what_takes_too_much_is_told_so() -> None:
    for source in ("{{ 9 ** 999999999 }}", "{{ 'x' * 1000000000 }}"):
        with pytest.raises(RequestError, match="too much"):
            isolated(source)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ lipsum(n=0) }}{{ messages[0].content }}é\ud800", "Hié\ud800"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(messages[1].content) }}", "<Hello>"),
        ("{% for m in messages %}{{ messages | length * 2 }}{% endfor %}", "44"),
    ],
)
def test_a_child_process_renders_what_the_server_does_not(source: str, expected: str) -> None:
    assert not is_linear(source)
    assert isolated(source, cpu_s=10.0, memory_bytes=256 * MIB) == expected


def test_a_refusal_within_a_child_process_is_the_template_s_own() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as refusal:
        isolated("{{ lipsum(n=0) }}{{ raise_exception('roles must alternate') }}")
    assert refusal.value.code == "invalid_request_error"


def test_output_of_a_child_process_is_bounded() -> None:
    with pytest.raises(RequestError, match="longer than 100000 characters"):
        isolated("{% for i in range(20000) %}{{ 'a long text' }}{% endfor %}", cpu_s=10.0)

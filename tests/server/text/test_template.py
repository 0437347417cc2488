"""Tests of rendering chat templates, of real model directories and hostile ones."""

from __future__ import annotations

import re

import pytest

from server.text.template import ChatTemplate
from triolet.errors import ModelError, RequestError

MESSAGES: list[dict[str, object]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
]
CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


class NobodyWaitsError(Exception):
    """Raised by the check for a client that has left."""


def template(source: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special_tokens)


def test_a_conversation_becomes_its_prompt() -> None:
    assert template(CHATML).render(MESSAGES) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert template(CHATML).render(MESSAGES[:1], add_generation_prompt=False) == (
        "<|im_start|>user\nHi<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}", "<s>"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Hi"}'),
        ("{{ {'é': '<b>'} | tojson(indent=1) }}", '{\n "é": "<b>"\n}'),
        ("{% for m in messages %}{% if loop.last %}{% break %}{% endif %}x{% endfor %}", "x"),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}", "Hello"),
        ("{{ mood }}", "kind"),
        ("{{ 'ab' * 3 }}{{ 2 * 21 }}", "ababab42"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 5 %}{{ ns.n }}", "5"),
        ("{% if x is defined %}a{% else %}b{% endif %}", "b"),
        ("{{ 1700000000 | string }} {{ nothing | default(9999999) }}", "1700000000 9999999"),
        ("{{ '%05.1f|%s: %d' % (1.25, '%', 2) }}", "001.2|%: 2"),
        ("{{ '{:>4}{}'.format(1, 1700000000) }}", "   11700000000"),
        ("{{ '{:>{}}'.format(1, 4) }}", "   1"),
        ("{{ 'a' | center(5) }}{{ [3, 1] | sort | join('~') }}", "  a  1~3"),
        ("{{ 10000000 * 3 }}", "30000000"),
    ],
)
def test_templates_find_the_names_that_they_expect(source: str, expected: str) -> None:
    rendered = template(source, bos_token="<s>").render(MESSAGES, template_kwargs={"mood": "kind"})
    assert rendered == expected


def test_today_is_there() -> None:
    assert re.fullmatch(r"\d\d \w{3} \d{4}", template("{{ strftime_now('%d %b %Y') }}").render([]))


def test_tools_have_a_template_of_their_own() -> None:
    both = ChatTemplate({"default": "plain", "tool_use": "tools: {{ tools | length }}"}, {})
    assert both.render(MESSAGES) == "plain"
    assert both.render(MESSAGES, tools=[{"type": "function"}]) == "tools: 1"
    assert ChatTemplate({"rag": "only"}, {}).render(MESSAGES) == "only"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
    ],
)
def test_what_a_template_refuses_is_the_clients_error(source: str) -> None:
    with pytest.raises(RequestError) as refusal:
        template(source).render(MESSAGES)
    assert (refusal.value.status, refusal.value.param) == (400, "messages")


def test_the_words_of_the_template_reach_the_client() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        template("{{ raise_exception('roles must alternate') }}").render(MESSAGES)


def test_output_is_bounded() -> None:
    endless = "{% for i in range(10000) %}{{ messages[0].content }}{% endfor %}"
    with pytest.raises(RequestError, match="longer than 1000 characters"):
        template(endless).render(MESSAGES, max_chars=1000)


def test_json_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deeper nesting means more indentation."""
    monkeypatch.setattr("server.text.template.MAX_CHARS", 1000)
    nested: object = "x"
    for _ in range(20):
        nested = [nested]
    with pytest.raises(RequestError, match="longer than 1000 characters"):
        template("{{ messages[0] | tojson(indent=8) }}").render([{"content": nested}])


def test_a_broken_template_is_the_models_error() -> None:
    with pytest.raises(ModelError, match="default"):
        template("{% if %}")

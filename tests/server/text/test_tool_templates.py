"""Tests of chat templates with tools: calls that a template renders are parsed as calls of its
format."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from server.contract.generation import Delta, GenerationRequest
from server.scheduling.output import Relay
from server.text.tool_forms.generic import ToolSupport
from server.text.tool_forms.table import HARMONY, PYTHONIC, QWEN3_CODER
from server.text.tool_forms.tool_calls import GRANITE, HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, PHI
from tests.server.tiny_text import tiny_text
from transport.frames import TokenRow
from triolet.sampling import SamplingParams

from .tool_cases import MARKERS, SCHEMAS, joined

if TYPE_CHECKING:
    from server.text.tool_forms.tool_calls import ToolForm

TOOL_TURN = (
    "{% for m in messages %}{% if not m.tool_calls %}[{{ m.role }}]{{ m.content }}{% else %}"
)
END = "{% endif %}{% endfor %}"
LISTED = (
    '[{% for c in m.tool_calls %}{{ ", " if not loop.first }}{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}{% endfor %}]'
)


def template(tools: str, calls: str) -> str:
    """Return a template that shows tools, then the turns with calls in a format."""
    return f"{{% if tools %}}{tools}{{% endif %}}{TOOL_TURN}{calls}{END}"


TEMPLATES: dict[str, tuple[ToolForm, tuple[str, ...], str]] = {
    "hermes": (
        HERMES,
        (),
        template(
            "<tools>{{ tools | tojson }}</tools> Answer within <tool_call></tool_call> tags.",
            "{% for c in m.tool_calls %}<tool_call>\n"
            '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
            "\n</tool_call>\n{% endfor %}",
        ),
    ),
    "llama": (
        LLAMA,
        ("<|python_tag|>",),
        template(
            '{{ tools | tojson }} Respond in the format {"name": function name, "parameters": '
            "dictionary of argument name and its value}.",
            '{% for c in m.tool_calls %}{{ "; " if not loop.first }}{"name": '
            '"{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
            "{% endfor %}",
        ),
    ),
    "mistral": (
        MISTRAL,
        ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
        template(
            "[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]", "[TOOL_CALLS] " + LISTED
        ),
    ),
    "mistral, named": (
        MISTRAL_NAMED,
        ("[TOOL_CALLS]", "[ARGS]"),
        template(
            "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]",
            "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
            "{{ c.function.arguments | tojson }}{% endfor %}",
        ),
    ),
    "qwen3_coder": (
        QWEN3_CODER,
        ("<tool_call>",),
        template(
            "<tools>{{ tools | tojson }}</tools>",
            "{% for c in m.tool_calls %}<tool_call>\n<function={{ c.function.name }}>\n"
            "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n"
            "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
            "</function>\n</tool_call>\n{% endfor %}",
        ),
    ),
    "pythonic": (
        PYTHONIC,
        ("<|python_tag|>",),
        template(
            "{{ tools | tojson }} Answer [func_name1(params_name1=params_value1, ...), ...].",
            '[{% for c in m.tool_calls %}{{ ", " if not loop.first }}{{ c.function.name }}('
            '{% for k, v in c.function.arguments.items() %}{{ ", " if not loop.first }}'
            "{{ k }}={{ v | tojson }}{% endfor %}){% endfor %}]",
        ),
    ),
    "granite": (
        GRANITE,
        ("<|tool_call|>",),
        template("<|start_of_role|>available_tools{{ tools | tojson }}", "<|tool_call|>" + LISTED),
    ),
    "phi": (
        PHI,
        ("<|tool_call|>", "<|/tool_call|>"),
        template(
            "<|tool|>{{ tools | tojson }}<|/tool|>",
            "<|tool_call|>" + LISTED + "<|/tool_call|>",
        ),
    ),
    "harmony": (
        HARMONY,
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"),
        template(
            "namespace functions {{ tools | tojson }}",
            "{% for c in m.tool_calls %}<|start|>assistant<|channel|>commentary to=functions."
            "{{ c.function.name }} <|constrain|>json<|message|>"
            "{{ c.function.arguments | tojson }}<|call|>{% endfor %}",
        ),
    ),
}
CALLS = [("f", {"x": 1, "word": MARKERS}), ("g", {"list": [1, "]"], "flag": True})]


@pytest.mark.parametrize("kind", TEMPLATES)
async def test_calls_that_a_template_shows_are_read_in_its_form(kind: str) -> None:
    form, specials, source = TEMPLATES[kind]
    model = tiny_text(template=source, specials=specials)
    assert model.tool_form == form
    assert model.tools is ToolSupport.NATIVE
    turn: dict[str, Any] = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": n, "arguments": told}} for n, told in CALLS],
    }
    ids = await model.encode(await model.render_chat([turn]), add_special_tokens=False)
    sampling = SamplingParams(max_tokens=len(ids) + 1)
    asked = GenerationRequest(b"r" * 16, (0,), sampling, 1.0, markers=model.tool_markers)
    # Read as a completion: the template's markers are tokens, those in arguments are text.
    relay = Relay(asked, model)
    for position, token_id in enumerate(ids):
        assert relay.push(TokenRow(b"r" * 16, 0, position, token_id), now=1.0) is None
    reader = model.tool_form.of_tools(SCHEMAS).reader()
    texts = [event.text for event in relay.mailbox.take(now=1.0) if isinstance(event, Delta)]
    said = joined([piece for text in texts for piece in reader.push(text)] + reader.finish())
    assert not said.shown.strip()
    assert [(name, json.loads(told)) for name, told in said.calls] == CALLS

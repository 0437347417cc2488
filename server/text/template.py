"""Renders a model's chat template.

Knows jinja2 and the names that templates in Hugging Face directories expect; refuses to know
tokens. A template comes from the model directory only and still runs in a sandbox, because such
directories are downloaded from strangers: it cannot reach Python or change its input, and its
output is bounded. What bounds its time is the caller's thread limit.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Final, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from triolet.errors import ModelError, RequestError, invalid_request
from triolet.units import MIB

from .model_files import DEFAULT_TEMPLATE, TOOL_TEMPLATE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.runtime import Context

MAX_RENDERED_CHARS: Final = 64 * MIB
"""Four times the largest request body: templates repeat little of what they are given."""

_TEMPLATE_FAULTS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What template code can raise on messages that its author did not think of."""


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is
    just its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with a bound on `'a' * 10**9`: the one cheap way to fill memory that is left."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        if operator == "**":
            raise jinja2.TemplateRuntimeError("powers are not available in chat templates")
        sequence, count = (right, left) if isinstance(left, int) else (left, right)
        if (
            isinstance(sequence, str | list | tuple)
            and isinstance(count, int)
            and len(sequence) * count > MAX_RENDERED_CHARS
        ):
            raise jinja2.TemplateRuntimeError("a repetition is too long")
        result: object = super().call_binop(context, operator, left, right)
        return result


class ChatTemplate:
    """The templates of one model, compiled.

    Args:
      templates: source by name; at least one.
      special_tokens: strings that templates refer to by names such as `bos_token`.

    Raises:
      ModelError: a template is not valid jinja2.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = TemplateEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, GenerationBlock],
            # The output is a prompt, not HTML.
            autoescape=False,
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in templates.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateError as error:
                raise ModelError(
                    f"chat template {name!r} is not valid jinja2: {error}; "
                    "correct it in the model directory"
                ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        max_chars: int = MAX_RENDERED_CHARS,
    ) -> str:
        """Return the prompt for a conversation.

        Args:
          messages: role, content and whatever else the template reads.
          add_generation_prompt: end with the opening of the assistant's turn.
          tools: functions that the model may call, in the API's form.
          template_kwargs: further names for the template; they do not replace the ones above.
          max_chars: bound on the output.

        Raises:
          RequestError: the template refused the messages, or its output is too long.
        """
        variables = {
            **self._special_tokens,
            **(template_kwargs or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces = []
        num_chars = 0
        try:
            for piece in self._pick(has_tools=bool(tools)).generate(variables):
                num_chars += len(piece)
                if num_chars > max_chars:
                    raise invalid_request(
                        f"the conversation is longer than {max_chars} characters", "messages"
                    )
                pieces.append(piece)
        except _TEMPLATE_FAULTS as error:
            raise _refusal(error) from error
        return "".join(pieces)

    def _pick(self, *, has_tools: bool) -> jinja2.Template:
        wanted = TOOL_TEMPLATE if has_tools else DEFAULT_TEMPLATE
        for name in (wanted, DEFAULT_TEMPLATE):
            if name in self._templates:
                return self._templates[name]
        return next(iter(self._templates.values()))


def _refusal(error: Exception) -> RequestError:
    return invalid_request(
        f"the model's chat template cannot render these messages: {str(error)[:200]}", "messages"
    )


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and & for HTML, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    # Local time without a zone: what templates that print today's date were written against.
    return datetime.now().strftime(form)

"""Renders a model's chat template.

Knows the names that templates in Hugging Face directories expect; refuses to know tokens. A
template comes from the model directory only and still runs in a sandbox (sandbox.py): it cannot
reach Python or change its input, its output is bounded, and it ends when nobody waits for it.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Final, NoReturn

import jinja2

from triolet.errors import ModelError, RequestError, invalid_request

from .model_files import DEFAULT_TEMPLATE, TOOL_TEMPLATE
from .sandbox import MAX_CHARS, TemplateEnvironment, go_on

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_TEMPLATE_FAULTS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What template code can raise on messages that its author did not think of."""


_SOME_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "some_tool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}


class ChatTemplate:
    """The templates of one model, compiled.

    Args:
      templates: source by name; at least one.
      special_tokens: strings that templates refer to by names such as `bos_token`.

    Raises:
      ModelError: a template is not valid jinja2.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = TemplateEnvironment()
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
        max_chars: int = MAX_CHARS,
        check: Callable[[], None] = lambda: None,
        refuse: Callable[[str], None] = lambda so_far: None,
        refuse_after: int = MAX_CHARS,
    ) -> str:
        """Return the prompt for a conversation.

        Args:
          messages: role, content and whatever else the template reads.
          add_generation_prompt: end with the opening of the assistant's turn.
          tools: functions that the model may call, in the API's form.
          template_kwargs: further names for the template; they do not replace the ones above.
          max_chars: bound on the output.
          check: called before each step; what it raises ends the rendering.
          refuse: called with the output so far, once it has `refuse_after` characters and whenever
            it has doubled since; what it raises ends the rendering.
          refuse_after: characters.

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
        before = go_on.set(check)
        try:
            for piece in self._pick(has_tools=bool(tools)).generate(variables):
                num_chars += len(piece)
                if num_chars > max_chars:
                    raise invalid_request(
                        f"the conversation is longer than {max_chars} characters", "messages"
                    )
                pieces.append(piece)
                if num_chars > refuse_after:
                    refuse("".join(pieces))
                    refuse_after = 2 * num_chars
        except _TEMPLATE_FAULTS as error:
            raise _refusal(error) from error
        finally:
            go_on.reset(before)
        return "".join(pieces)

    def shows_tools(self, check: Callable[[], None] = lambda: None) -> bool:
        """Whether a conversation reads differently with a tool.

        Args:
          check: see `render`.
        """
        try:
            without, with_tool = (
                self.render([{"role": "user", "content": "hi"}], tools=tools, check=check)
                for tools in (None, [_SOME_TOOL])
            )
        except RequestError:
            # It wants conversations of another kind: which of those show tools is not known.
            return True
        return without != with_tool

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

"""Chat templates: compiling, sandboxing and rendering.

Model directories are often downloaded from untrusted sources, and harmless templates may get
hostile messages. Jinja2's sandbox protects Python's internals, but limits neither time nor memory,
and one operation can block the interpreter forever. Only templates with operations that are all
known to be cheap (linear_template.py) therefore run in the server. Others are compiled and rendered
in a child process with limits (isolated.py). Compiling is included because jinja2's compiler
evaluates operations on literals.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from triolet.errors import ModelError, RequestError, invalid_request
from triolet.units import MIB

from .isolated import run_isolated
from .linear_template import is_linear
from .model_files import DEFAULT_TEMPLATE, TOOL_TEMPLATE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jinja2.parser import Parser

    from triolet.config import TemplateConfig


MAX_CHARS: Final = 64 * MIB
"""Four times the largest request body: templates repeat little of their input."""


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it renders
    only its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
"""Errors that template code raises on messages that its author did not expect."""
_PYTHON_OBJECT: Final = re.compile(r"'[\w. ]+ object'")
"""How Jinja refers to a value without the requested attribute."""


_SOME_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "some_tool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}


_SOME_WORDS: Final = "be brief"


class ChatTemplate:
    """The chat templates of one model.

    Args:
      templates: source by name; at least one.
      special_tokens: strings by the names that templates use, such as `bos_token`.

    Raises:
      ModelError: a template is not valid jinja2.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        # The output is a prompt, not HTML.
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, GenerationBlock],
            autoescape=False,
        )
        self._environment.filters["tojson"] = _tojson
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        self._templates: dict[str, jinja2.Template | nodes.Template] = {}
        num_special_chars = sum(map(len, special_tokens.values()))
        for name, source in templates.items():
            try:
                tree = self._environment.parse(source)
                may_run_here = is_linear(tree, len(source) + num_special_chars)
                self._templates[name] = (
                    self._environment.from_string(tree) if may_run_here else tree
                )
            except Exception as error:
                raise _invalid(name, error) from error

    def require_compilable(self, bounds: TemplateConfig) -> None:
        """Compile the templates that may not run in this process, in child processes.

        Args:
          bounds: limits of each child.

        Raises:
          ModelError: a template cannot be compiled.
        """
        for name, one in self._templates.items():
            if isinstance(one, nodes.Template):
                work = partial(self._fault_of, one)
                fault = run_isolated(work, **asdict(bounds))
                if fault != b"":
                    said = "it takes too much time or memory" if fault is None else fault.decode()
                    raise _invalid(name, ValueError(said))

    def _fault_of(self, tree: nodes.Template) -> bytes:
        try:
            self._environment.from_string(tree)
        except Exception as error:  # noqa: BLE001 (see _invalid)
            return (str(error) or "too large").encode()
        return b""

    def is_linear(self, *, has_tools: bool) -> bool:
        """Whether rendering takes time proportional to its input, so that it may run in this
        process. Others need a child process with limits."""
        return isinstance(self._pick(has_tools=has_tools), jinja2.Template)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        max_chars: int = MAX_CHARS,
        refuse: Callable[[str], None] = lambda so_far: None,
        refuse_after: int = MAX_CHARS,
    ) -> str:
        """Return the prompt of a conversation.

        Args:
          messages: role, content and other fields that the template reads.
          add_generation_prompt: whether to start the assistant's turn at the end.
          tools: functions that the model may call, in the API's format.
          template_kwargs: additional template variables; they do not replace the ones above.
          max_chars: maximum length of the output.
          refuse: called with the output so far at `refuse_after` characters, and each time it has
            doubled; an exception ends the rendering.
          refuse_after: number of characters.

        Raises:
          RequestError: the template refused the messages, or its output is too long.
        """
        variables = {
            **(template_kwargs or {}),
            **self._special_tokens,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces = []
        num_chars = 0
        try:
            picked = self._pick(has_tools=bool(tools))
            if isinstance(picked, nodes.Template):
                picked = self._environment.from_string(picked)
            for piece in picked.generate(variables):
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
        return "".join(pieces)

    def shows_tools(self) -> bool:
        """Whether a tool changes the rendered conversation; for a template that may not run here,
        whether it mentions tools."""
        picked = self._pick(has_tools=True)
        if isinstance(picked, nodes.Template):
            return any(name.name == "tools" for name in picked.find_all(nodes.Name))
        try:
            without, with_tool = (
                self.render([{"role": "user", "content": "hi"}], tools=tools)
                for tools in (None, [_SOME_TOOL])
            )
        except RequestError:
            # The template expects other conversations; whether those show tools is unknown.
            return True
        return without != with_tool

    def shows_system(self) -> bool:
        """Whether a system message is shown, not refused or dropped; True for a template that may
        not run here."""
        if not self.is_linear(has_tools=False):
            return True
        turns = [{"role": "system", "content": _SOME_WORDS}, {"role": "user", "content": "hi"}]
        try:
            return _SOME_WORDS in self.render(turns)
        except RequestError:
            return False

    def _pick(self, *, has_tools: bool) -> jinja2.Template | nodes.Template:
        wanted = TOOL_TEMPLATE if has_tools else DEFAULT_TEMPLATE
        for name in (wanted, DEFAULT_TEMPLATE):
            if name in self._templates:
                return self._templates[name]
        return next(iter(self._templates.values()))


def encoded_rendering(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, object]],
    **options: Any,  # noqa: ANN401 (render's)
) -> bytes:
    """Return the encoded result or error of `template.render`, for `decoded_rendering`."""
    said: str | list[str | None]
    try:
        said = template.render(messages, **options)
    except RequestError as error:
        said = [error.message, error.param, error.code]
    return json.dumps(said, ensure_ascii=False).encode(errors="surrogatepass")


def decoded_rendering(answer: bytes | None) -> str:
    """Return a text rendered in a child process.

    Args:
      answer: result of `encoded_rendering`; None if the child exceeded a limit.

    Raises:
      RequestError: see `ChatTemplate.render`.
    """
    if answer is None:
        raise invalid_request(
            "the model's chat template takes too much time or memory to render these messages; "
            "shorten them, or correct the template in the model directory",
            "messages",
        )
    said = json.loads(answer.decode(errors="surrogatepass"))
    if isinstance(said, str):
        return said
    raise invalid_request(*said)


def _invalid(name: str, error: Exception) -> ModelError:
    """Return the error for an invalid template. Jinja2 compiles it to Python code, which raises
    several kinds of errors, including MemoryError."""
    return ModelError(
        f"chat template {name!r} is not valid jinja2: {str(error) or 'too large'}; "
        "correct it in the model directory"
    )


def _refusal(error: Exception) -> RequestError:
    reason = "an expression in it does not accept their values"
    if isinstance(error, jinja2.TemplateError):
        reason = _PYTHON_OBJECT.sub("a value", str(error))[:200]
    elif isinstance(error, MemoryError):
        reason = "it takes too much memory"
    return invalid_request(
        f"the model's chat template cannot render these messages: {reason}", "messages"
    )


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and & for HTML, which models were not trained on.
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    pieces = []
    num_chars = 0
    for piece in encoder.iterencode(value) if indent else [encoder.encode(value)]:
        num_chars += len(piece)
        if num_chars > MAX_CHARS:  # deeper nesting means more indentation
            raise jinja2.TemplateRuntimeError(f"JSON is longer than {MAX_CHARS} characters")
        pieces.append(piece)
    return "".join(pieces)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    # Local time without a zone, as templates that print today's date expect.
    return datetime.now().strftime(form)

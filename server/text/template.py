"""The environment that chat templates run in: what they may do, and how they are ended.

Templates come from the model directory, which
its operator chose, but such directories are downloaded from strangers, and harmless templates meet
hostile messages. jinja2's sandbox keeps them from Python's insides; here are bounds on their time
and on the sizes of what they build:

- Every turn of a loop and every call, of macros too, first asks whether the request still waits for
  the result. The request decides how long; a thread is never lost to a loop.
- Repeating, adding, joining, formatting and calling cannot make a text, a list or a number beyond a
  bound. It is looked at before, where one step could make much out of little (repeating, padding);
  otherwise afterwards, when the step has taken at most a multiple of what was allowed before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from triolet.errors import ModelError, RequestError, invalid_request
from triolet.units import MIB

from .model_files import DEFAULT_TEMPLATE, TOOL_TEMPLATE

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from jinja2.runtime import Context


MAX_CHARS: Final = 64 * MIB
"""Four times the largest request body: templates repeat little of what they are given."""
MAX_ITEMS: Final = 1_000_000
"""Of a list or tuple; and no honest template pads to a width beyond it."""
MAX_BITS: Final = 4096
"""Of a product: numbers in prompts have a few digits."""
_PADDING_FILTERS: Final = frozenset({"center", "indent", "wordwrap", "truncate", "round", "slice"})
_WIDE: Final = re.compile(r"[%:.][-+ #0,_<>=^]*(?:\*|\d{7,})")
"""A width or precision in a format that is as large as the bound, or a value's."""
_NESTED: Final = re.compile(r":[^}]*\{")
"""A width that is a value's in `str.format`."""

go_on: ContextVar[Callable[[], None]] = ContextVar("go_on", default=lambda: None)
"""Asked before each step of the rendering under way in this thread; ends it by raising."""


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is
    just its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class CheckedCode(CodeGenerator):
    """Template to Python, with a question before each step and a bound on what is joined."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        for loop in node.find_all(nodes.For):
            loop.body.insert(0, nodes.ExprStmt(_call("step")))
            if loop.test is not None:
                loop.test = nodes.And(_call("step"), loop.test)
        for assignment in node.find_all(nodes.AssignBlock):
            assignment.filter = nodes.Filter(assignment.filter, "bounded", [], [], None, None)
        super().visit_Template(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with its bounds."""

    code_generator_class = CheckedCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, GenerationBlock],
            # The output is a prompt, not HTML.
            autoescape=False,
        )
        self.filters = {
            name: _checked(filter_, pads=name in _PADDING_FILTERS, formats=name == "format")
            for name, filter_ in self.filters.items()
        }
        self.filters["bounded"] = _bounded

    def step(self) -> bool:
        """Be a call, before which it is asked whether to go on; true, so that it can stand in front
        of a condition."""
        return True

    def joined(self, parts: Iterable[object]) -> str:
        """Return what `~` makes of some values."""
        texts = [str(part) for part in parts]
        _refuse_beyond(sum(map(len, texts)), MAX_CHARS)
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Return `left operator right`."""
        if operator == "**":
            raise jinja2.TemplateRuntimeError("powers are not available in chat templates")
        if operator == "+":
            if isinstance(left, Sized) and isinstance(right, Sized):
                _refuse_beyond(len(left) + len(right), _most(left))
        elif operator == "%":
            _refuse_wide(left)
        elif isinstance(left, int) and isinstance(right, int):
            _refuse_beyond(left.bit_length() + right.bit_length(), MAX_BITS)
        else:
            sequence, count = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(sequence, Sized) and isinstance(count, int):
                _refuse_beyond(len(sequence) * count, _most(sequence))
        result: object = super().call_binop(context, operator, left, right)
        return result

    def call(self, context: Context, called: object, /, *args: object, **kwargs: object) -> object:
        """Return what a function, method or macro returns."""
        # The sandbox wraps `format` and `format_map` of strings.
        method = getattr(called, "__wrapped__", called)
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            is_format = str(getattr(method, "__name__", "")).startswith("format")
            if is_format:
                _refuse_wide(text)
            if not is_format or _NESTED.search(text):
                _refuse_widths((*args, *kwargs.values()))
        return _checked(super().call)(context, called, *args, **kwargs)


def _call(name: str) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), [], [], None, None)


def _checked(
    called: Callable[..., object], *, pads: bool = False, formats: bool = False
) -> Callable[..., object]:
    """Return a function that asks whether to go on and bounds the result's size.

    Args:
      called: does the work.
      pads: its numbers are widths.
      formats: its first argument is a format.
    """

    def call(*args: object, **kwargs: object) -> object:
        go_on.get()()
        if pads:
            _refuse_widths((*args, *kwargs.values()))
        if formats:
            _refuse_wide(str(args[0]))
        return _bounded(called(*args, **kwargs))

    # How jinja2 knows which filters want its context or environment.
    call.__dict__.update(vars(called) if hasattr(called, "__dict__") else {})
    return call


def _bounded(value: object) -> object:
    if isinstance(value, str | list | tuple):
        _refuse_beyond(len(value), _most(value))
    return value


def _most(value: object) -> int:
    return MAX_CHARS if isinstance(value, str) else MAX_ITEMS


def _refuse_widths(arguments: Iterable[object]) -> None:
    for argument in arguments:
        if isinstance(argument, int):
            _refuse_beyond(argument, MAX_ITEMS)


def _refuse_wide(form: object) -> None:
    if isinstance(form, str) and _WIDE.search(form):
        raise jinja2.TemplateRuntimeError("a width in a format is too large")


def _refuse_beyond(size: int, most: int) -> None:
    if size > most:
        raise jinja2.TemplateRuntimeError(f"a size or number of {size} is beyond {most}")


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
_PYTHON_OBJECT: Final = re.compile(r"'[\w. ]+ object'")
"""How Jinja calls a value that lacks an attribute."""


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
            except Exception as error:
                # It becomes Python first, whose compiler raises several kinds and MemoryError.
                raise ModelError(
                    f"chat template {name!r} is not valid jinja2: {str(error) or 'too large'}; "
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
    reason = "an expression in it does not take their values"
    if isinstance(error, jinja2.TemplateError):
        reason = _PYTHON_OBJECT.sub("a value", str(error))[:200]
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
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    # Local time without a zone: what templates that print today's date were written against.
    return datetime.now().strftime(form)

"""The environment that chat templates run in: what they may do, and how they are ended.

Knows jinja2; refuses to know messages and tokens. Templates come from the model directory, which
its operator chose, but such directories are downloaded from strangers, and harmless templates meet
hostile messages. jinja2's sandbox keeps them from Python's insides; here are bounds on their time
and on the sizes of what they build:

- Every turn of a loop and every call, of macros too, first asks whether anybody still waits for the
  result. Whoever asks for a rendering decides how long; a thread is never lost to a loop.
- Repeating, adding, joining, formatting and calling cannot make a text, a list or a number beyond a
  bound. It is looked at before, where one step could make much out of little (repeating, padding);
  otherwise afterwards, when the step has taken at most a multiple of what was allowed before it.
"""

from __future__ import annotations

import re
from collections.abc import Sized
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from triolet.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from jinja2.compiler import Frame
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

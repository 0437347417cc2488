"""Decides which chat templates render in time proportional to their input.

A template is linear if each of its operations is known here and traverses no text, list or object
more than a fixed number of times. The analysis tracks three things from where a value is created to
where it is used:

- Its level. A loop splits a value into items, which together are as large as the whole. So inside
  two loops, an operation may traverse parts of the inner loop's item, and literals, but not the
  outer item or the whole conversation, which would repeat on every iteration. Code guarded by
  `loop.first` or `loop.last` runs once per loop, so it counts as outside. Output may repeat
  anything, because its total size is limited.
- Its size, as a multiple of the input. Joining adds sizes, escaping multiplies them. The total of
  all values built is limited, so that sizes cannot double repeatedly.
- Its names. All assignments to a name apply to all of its uses. The analysis repeats until nothing
  changes. A value that grows on every iteration, such as a text to which each message is appended,
  never converges and is not linear.

Recursion, repetition, padding, counting up and formatting are not known here, nor are methods that
are not called where they are named. A template with unknown operations is treated as not linear,
which does not mean that it is slow.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import reduce
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from jinja2 import nodes
from jinja2.defaults import DEFAULT_NAMESPACE

from triolet.units import KIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


MAX_TEMPLATE_CHARS: Final = 32 * KIB
"""The longest known template has 21,000. A loop over literals traverses the template up to once per
character."""
MAX_BUILT: Final = 256.0
"""Limit on all values built, as a multiple of the input, counting every branch. The costliest known
template reaches 170."""
MAX_PARTS: Final = 32
"""Maximum number of parts joined to one text; known templates have at most eleven."""
MAX_PASSES: Final = 8
"""Maximum number of passes until names converge; most templates need three."""
MAX_ARGUMENT: Final = 64
"""Maximum number, or text length, passed to an operation, since it may multiply sizes."""
ESCAPED: Final = 6
"""Maximum growth of a text when written as JSON or Python, relative to the request: `'a', ` for one
letter of a list."""
PIECES: Final = 24
"""Size of a text split into short pieces, as a multiple of the text: each piece is an object."""


class _Value(NamedTuple):
    """What is known of a value.

    Attributes:
      level: number of surrounding loops; over their iterations, the values together have this size.
      size: as a multiple of the input.
      told: size of its text form, as a multiple of the input.
      is_number: whether it is a number, true, false or none, so that nothing can be appended.
    """

    level: int
    size: float
    told: float
    is_number: bool = False


_LITERAL: Final = sys.maxsize
_INPUT: Final = _Value(0, 1.0, ESCAPED)
# No template is longer than this fraction of the largest request.
_SHORT: Final = _Value(_LITERAL, 1 / 512, 1 / 512)
_NUMBER: Final = _SHORT._replace(is_number=True)


def _escaped(value: _Value) -> float:
    return max(value.told, ESCAPED * value.size)


_Operation = tuple[float, "Callable[[_Value], _Value]"]
_LOOKED_AT: Final[_Operation] = (0, lambda value: _NUMBER)
_PICKED: Final[_Operation] = (0, lambda value: value)
_SIFTED: Final[_Operation] = (1, lambda value: value)
_MADE_TEXT: Final[_Operation] = (1, lambda value: value._replace(size=value.told))
_SPLIT: Final[_Operation] = (PIECES, lambda value: value._replace(told=_escaped(value)))
# Changing case turns a letter into at most three, once.
_LETTERS: Final = ("upper", "lower", "capitalize", "title")
_SIFTING: Final = ("select", "reject")
_FILTERS: Final[dict[str, _Operation]] = {
    **dict.fromkeys(("length", "count"), _LOOKED_AT),
    **dict.fromkeys(("first", "last", "items"), _PICKED),
    **dict.fromkeys(_SIFTING, _SIFTED),
    **dict.fromkeys(("trim", "string", *_LETTERS), _MADE_TEXT),
    "list": _SPLIT,
    "join": (1, lambda v: v._replace(size=v.told * MAX_ARGUMENT, told=v.told * MAX_ARGUMENT)),
    "tojson": (1, lambda v: v._replace(size=_escaped(v), told=_escaped(v))),
}
_METHODS: Final[dict[str, _Operation]] = {
    **dict.fromkeys(("startswith", "endswith"), _LOOKED_AT),
    **dict.fromkeys(("get", "items", "keys", "values"), _PICKED),
    **dict.fromkeys(
        ("strip", "lstrip", "rstrip", *_LETTERS), (1, lambda v: v._replace(told=v.size))
    ),
    **dict.fromkeys(("split", "rsplit", "splitlines"), _SPLIT),
}
_TESTS: Final = frozenset(
    {"defined", "undefined", "none", "string", "mapping", "sequence", "iterable", "number"}
    | {"integer", "float", "boolean", "true", "false"}
)
_COMPARISONS: Final = (["equalto"], ["eq"], ["=="], ["ne"], ["!="])
_FUNCTIONS: Final = frozenset({"raise_exception", "strftime_now"})
_RESERVED: Final = _FUNCTIONS | {*DEFAULT_NAMESPACE, "loop", "self"}
_TURNS: Final = ("first", "last", "index", "index0", "revindex", "revindex0", "length")
_ALL_METHODS: Final = frozenset(
    name for kind in (str, dict, list, tuple, int, float) for name in dir(kind)
)


class _NotLinear(Exception):
    """The template contains something that may cost more."""


def is_linear(template: nodes.Template, num_chars: int) -> bool:
    """Whether rendering takes time proportional to the messages and tools.

    Args:
      template: the parsed source.
      num_chars: length of its source and of other inputs beside messages and tools.
    """
    walk = _Walk()
    with suppress(_NotLinear, RecursionError):
        for _ in range(MAX_PASSES):
            before = walk.names.copy(), walk.spaces.copy()
            walk.built = 0.0
            walk.run(template.body)
            if (walk.names, walk.spaces) == before:
                return num_chars <= MAX_TEMPLATE_CHARS
    return False


class _Walk:
    """Analyzes a template, with what is known of its names so far.

    Attributes:
      names: variables, and attributes of namespaces.
      spaces: names of namespaces, which are not values.
      built: total size built in this pass.
    """

    def __init__(self) -> None:
        self.names: dict[str, _Value] = {"messages": _INPUT, "tools": _INPUT}
        self.built = 0.0
        self.spaces: set[str] = set()
        self._depth = 0

    def run(self, statements: Iterable[nodes.Node]) -> None:
        """Analyze statements."""
        for node in statements:
            match node:
                case nodes.Output():
                    for parts in map(_parts, node.nodes):
                        # Each part is copied for all that follow.
                        _refuse_if(len(parts) > MAX_PARTS)
                        for part in parts:
                            self._build(self._value(part).told)
                case nodes.Assign(target=nodes.Name(name=name), node=nodes.Call() as call) if (
                    call.node == nodes.Name("namespace", "load")
                    and not (call.args or call.dyn_args)
                ):
                    _refuse_if(name in self.names or name in _RESERVED or call.dyn_kwargs)
                    self.spaces.add(name)
                    for one in call.kwargs:
                        self._assign(nodes.NSRef(name, one.key), self._value(one.value))
                case nodes.Assign():
                    self._assign(node.target, self._value(node.node))
                case nodes.If():
                    self._value(node.test)
                    self.run((*node.body, *node.elif_, *node.else_))
                case nodes.For():
                    self._loop(node)
                case _:
                    _refuse_if(not isinstance(node, nodes.Break | nodes.Continue))

    def _loop(self, node: nodes.For) -> None:
        items = self._value(node.iter)
        # A nested loop over literals would multiply the template by itself.
        _refuse_if(node.recursive or (items.level == _LITERAL and self._depth))
        self._go_through(items, _SIFTED)
        self._depth += 1
        self._assign(node.target, items._replace(level=max(items.level, self._depth)))
        if node.test is not None:
            self._value(node.test)
        self.run(node.body)
        self._depth -= 1
        self.run(node.else_)

    def _assign(self, target: nodes.Node, value: _Value) -> None:
        match target:
            case nodes.Name(name=name) if name not in self.spaces | _RESERVED:
                self._join(name, value)
            case nodes.NSRef(name=name, attr=attr):
                # Other iterations may read it.
                level = value.level if value.level == _LITERAL else 0
                self._join(f"{name}.{attr}", value._replace(level=level))
            case nodes.Tuple(items=items):
                for item in items:
                    self._assign(item, value)
            case _:
                _refuse()

    def _join(self, name: str, value: _Value) -> None:
        self.names[name] = _either(self.names.get(name, value), value)

    def _build(self, size: float) -> None:
        self.built += size
        _refuse_if(self.built > MAX_BUILT)

    def _value(self, node: nodes.Node) -> _Value:
        """Return what is known of an expression's value."""
        match node:
            case nodes.Name(name=name):
                _refuse_if(name in self.spaces | _RESERVED)
                return self.names.get(name, _SHORT)
            case nodes.Test(
                node=nodes.Name(name=name), name="defined", args=[], kwargs=[], dyn_args=None
            ) if name in _FUNCTIONS and node.dyn_kwargs is None:
                return _NUMBER
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=name) if self._depth:
                _refuse_if(name not in _TURNS)
                return _NUMBER
            case nodes.Getattr(node=nodes.Name(name=space), attr=name) if space in self.spaces:
                return self.names.get(f"{space}.{name}", _NUMBER)
            case nodes.Call(node=nodes.Getattr(node=receiver, attr=name)):
                _arguments(node)
                return self._go_through(self._value(receiver), _METHODS.get(name))
            case nodes.Call(node=nodes.Name(name="strftime_now")):
                _arguments(node)
                return _SHORT
            case nodes.Call(node=nodes.Name(name="raise_exception"), args=[message], kwargs=[]):
                # Counted once, because it ends the rendering.
                self._build(self._value(message).told)
                _refuse_if(node.dyn_args or node.dyn_kwargs)
                return _NUMBER
        return self._of_parts(node, [self._value(part) for part in node.iter_child_nodes()])

    def _of_parts(self, node: nodes.Node, values: list[_Value]) -> _Value:
        """Return what is known of an expression's value from its parts."""
        match node:
            case nodes.Const(value=value) if not isinstance(value, str):
                return _NUMBER
            case nodes.Const() | nodes.TemplateData():
                return _SHORT
            case nodes.Keyword() | nodes.Operand():
                return values[0]
            case nodes.And() | nodes.Or() | nodes.Filter(name="default" | "d"):
                return reduce(_either, values)
            case nodes.CondExpr():
                return reduce(_either, values[1:])
            case nodes.List() | nodes.Tuple():
                total = _together(values)
                return total._replace(told=sum(map(_escaped, values), total.size))
            case nodes.Concat():
                return self._go_through(_together(values), _MADE_TEXT)
            case nodes.Add() | nodes.Sub() | nodes.Mod() | nodes.Neg():
                return self._sum(node, values)
            case nodes.Compare():
                for operand, left, right in zip(node.ops, values, values[1:], strict=False):
                    is_search = operand.op in ("in", "notin")
                    # A comparison ends where the shorter value ends.
                    self._go_through(right if is_search else max(left, right), _SIFTED)
                    self._build(left.size if is_search else 0)
                return _NUMBER
            case nodes.Not() | nodes.Slice():
                return _NUMBER
            case nodes.Test() if node.name in _TESTS:
                _arguments(node)
                return _NUMBER
            case nodes.Getattr(attr=name) | nodes.Getitem(arg=nodes.Const(value=name)):
                _refuse_if(name in _ALL_METHODS)
                return values[0]._replace(is_number=False)
            case nodes.Getitem():
                is_slice = isinstance(node.arg, nodes.Slice)
                _refuse_if(not values[1].is_number)
                return self._go_through(values[0], _SIFTED if is_slice else _PICKED)
            case nodes.Filter():
                given = _arguments(node)
                # Compare the item itself: the name of an attribute might be a method's.
                _refuse_if(node.name in _SIFTING and given[:1] not in _COMPARISONS)
                return self._go_through(values[0], _FILTERS.get(node.name))
        return _refuse()

    def _sum(self, node: nodes.Node, values: list[_Value]) -> _Value:
        if not any(value.is_number for value in values):
            _refuse_if(not isinstance(node, nodes.Add))
            return self._go_through(_together(values), _SIFTED)
        # The left side of % may be a format string.
        _refuse_if(isinstance(node, nodes.Mod) and not values[0].is_number)
        # Only counting by a literal may continue on every iteration.
        counts = zip(values, node.iter_child_nodes(), strict=True)
        grows = [value.size for value, part in counts if not isinstance(part, nodes.Const)]
        return _NUMBER._replace(size=max(_NUMBER.size, sum(grows)))

    def _go_through(self, value: _Value, operation: _Operation | None) -> _Value:
        """Apply an operation to a value; return its result."""
        times, make = operation or _refuse()
        result = make(value._replace(is_number=False))
        if times:
            _refuse_if(value.level < self._depth)
            self._build(times * max(value.size, result.size))
        return result


def _parts(node: nodes.Node) -> Sequence[nodes.Node]:
    """Return the parts that an expression joins to a text."""
    if isinstance(node, nodes.Add):
        return [*_parts(node.left), *_parts(node.right)]
    return node.nodes if isinstance(node, nodes.Concat) else [node]


def _either(one: _Value, other: _Value) -> _Value:
    """Return what is known of a value that is one of two."""
    return _Value(
        min(one.level, other.level),
        max(one.size, other.size),
        max(one.told, other.told),
        one.is_number and other.is_number,
    )


def _together(values: Iterable[_Value]) -> _Value:
    """Return what is known of concatenated values."""
    levels, sizes, told, *_ = zip(*values, _SHORT, strict=True)
    return _Value(min(levels), sum(sizes), sum(told))


def _arguments(node: nodes.Filter | nodes.Call | nodes.Test) -> list[Any]:
    """Return an operation's arguments, which must be short literals."""
    parts = [*node.args, *(one.value for one in node.kwargs)]
    _refuse_if(node.dyn_args or node.dyn_kwargs)
    given = [part.value if isinstance(part, nodes.Const) else _refuse() for part in parts]
    for one in given:
        _refuse_if((len(one) if isinstance(one, str) else one or 0) > MAX_ARGUMENT)
    return given


def _refuse_if(is_unknown: object) -> None:
    if is_unknown:
        _refuse()


def _refuse() -> NoReturn:
    raise _NotLinear

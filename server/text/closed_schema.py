"""Closes the objects of a JSON Schema: an object that lists keys, and does not mention others, then
allows only the listed ones.

Without `additionalProperties`, any key is allowed, and a model constrained by the schema may invent
keys up to its token limit. Each change narrows the schema, so every value of the closed schema is
valid in the original one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from itertools import combinations
from typing import Any, Final
from urllib.parse import unquote

from triolet.sampling import MAX_GRAMMAR_CHARS

Schema = dict[str, Any]

MAX_STEPS: Final = 8192
"""Maximum number of schemas visited and keys copied per schema, since this runs in the event loop's
thread. A schema of maximum size has 3,000 parts; combinations visit parts and copy keys
repeatedly."""
MAX_CHAIN: Final = 32
"""Maximum length of a chain of references, equal to the allowed nesting depth."""
_COMBINING: Final = ("allOf", "anyOf", "oneOf")
_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions")
_VALUES: Final = ("items", "prefixItems", "additionalItems", "additionalProperties")
_INTO_ARRAYS: Final = frozenset({"items", "prefixItems", "additionalItems", "$ref", *_COMBINING})
_OF_DOCUMENT: Final = ("$id", "$schema", "$defs", "definitions")
_ABOUT_KEYS: Final = frozenset(
    "properties patternProperties additionalProperties required minProperties const enum".split()
)
_SAYING: Final = frozenset({"const", "enum", "additionalProperties"})
"""Keywords that already define which keys are allowed."""
_LEFT_OPEN: Final = frozenset(
    "not if then else contains dependentSchemas dependentRequired dependencies propertyNames "
    "unevaluatedProperties $anchor $dynamicAnchor $dynamicRef $recursiveRef".split()
)
"""A schema with one of these is not changed: narrowing a negated schema would widen the whole, and
references by anchor are not resolved."""


class _LeftOpen(Exception):
    """The schema has parts that cannot be closed safely."""


def closed_text(text: str, *, is_strict: bool = False) -> str:
    """Return the text of a JSON Schema with its objects closed, or `text` itself.

    Args:
      text: nested at most `GrammarConfig.max_depth` deep.
      is_strict: see `closed`.
    """
    try:
        schema = json.loads(text)
    except ValueError:
        return text  # the compiler will report the error
    narrower = closed(schema, is_strict=is_strict) if isinstance(schema, dict) else schema
    if narrower == schema:
        return text
    written = json.dumps(narrower, ensure_ascii=False)
    return written if len(written) <= MAX_GRAMMAR_CHARS else text


def closed(schema: Schema, *, is_strict: bool = False) -> Schema:
    """Return a schema with its objects closed.

    Args:
      schema: nested at most `GrammarConfig.max_depth` deep.
      is_strict: whether to close objects without listed keys, too.
    """
    try:
        return _Closing(schema, is_strict=is_strict).run()
    except _LeftOpen:
        return schema


@dataclass(slots=True)
class _Keys:
    """What a schema and everything it combines specify about keys.

    Attributes:
      names: listed and required keys.
      patterns: patterns of patternProperties.
      is_list: whether keys are listed, even if the list is empty.
      is_object: whether the type is given.
      is_said: whether the schema defines which other keys are allowed.
      least: minimum number of keys.
    """

    names: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    is_list: bool = False
    is_object: bool = False
    is_said: bool = False
    least: int = 0

    def add(self, other: _Keys) -> None:
        """Add the keys of another schema for the same value."""
        self.names |= other.names
        self.patterns |= other.patterns
        self.is_list |= other.is_list
        self.is_object |= other.is_object
        self.is_said |= other.is_said
        self.least = max(self.least, other.least)


class _Form(Enum):
    """How to transform a schema."""

    CLOSED = "closed"
    PART = "part"  # stays open, but its parts are closed
    SENT = "sent"  # unchanged, including all parts


class _Closing:
    """Closes one schema.

    A part of a combination stays open, because the keys of the other parts are not additional ones.
    The combination is closed as a whole, with the keys of all parts; if it has branches, each is
    closed with its own keys and the surrounding ones. Referenced parts are copied, because the same
    definition may be a complete value elsewhere. Branches of oneOf that may share values stay
    unchanged: narrowing one branch might make a value match only the other, and so become valid.
    """

    def __init__(self, root: Schema, *, is_strict: bool) -> None:
        self._root = root
        self._is_strict = is_strict
        self._keys_of: dict[str, _Keys] = {}
        self._chain: list[str] = []
        self._name_of_copy: dict[tuple[str, _Form], str] = {}
        self._is_apart: dict[int, bool] = {}  # by id() of a list in the schema
        self._num_steps = 0

    def run(self) -> Schema:
        """Return the closed schema.

        Raises:
          _LeftOpen: it must stay unchanged.
        """
        done: Schema = self._whole(self._root)
        copies: Schema = {}
        while len(copies) < len(self._name_of_copy):
            (pointer, form), name = list(self._name_of_copy.items())[len(copies)]
            target = self._target(pointer)
            if isinstance(target, dict):
                target = {word: v for word, v in target.items() if word not in _OF_DOCUMENT}
            copies[name] = self._done(target, form)
        return done | {"$defs": done.get("$defs", {}) | copies} if copies else done

    def _whole(self, node: Any) -> Any:  # noqa: ANN401
        """Return the closed form of a schema that alone describes a value."""
        if not isinstance(node, dict):
            return node
        combining = [word for word in (*_COMBINING, "$ref") if word in node]
        if not combining:
            return self._narrowed(self._mapped(node, _Form.CLOSED), self._keys(node))
        branching = self._branching(node)
        if len(combining) == 1 and not _ABOUT_KEYS & node.keys():
            word = combining[0]
            if word in (branching, "$ref") or (word == "allOf" and len(_list(node[word])) == 1):
                return self._mapped(node, _Form.CLOSED)
        done = self._mapped(node, _Form.PART)
        if branching is None:
            return self._narrowed(done, self._keys(node))
        around = {word: value for word, value in node.items() if word != branching}
        for index, branch in enumerate(_list(node[branching])):
            keys = self._keys(around)
            keys.add(self._keys(branch))
            done[branching][index] = self._narrowed(done[branching][index], keys)
        return done

    def _branching(self, node: Schema) -> str | None:
        """Return the keyword whose branches may be closed separately.

        oneOf rejects values that match several branches, so its branches are closed only if no two
        of them share a value.
        """
        if "anyOf" in node:
            return "anyOf"
        return "oneOf" if "oneOf" in node and self._are_apart(_list(node["oneOf"])) else None

    def _are_apart(self, branches: list[Any]) -> bool:
        """Return whether no two of these schemas share an object or an array. Other shared values
        have no keys and do not matter."""
        if (known := self._is_apart.get(id(branches))) is not None:
            return known
        objects, arrays = [], []
        for branch in branches:
            tags, array = self._tags(branch)
            objects += [] if tags is None else [tags]
            arrays += [] if array is None else [array]
        self._spend(len(objects) ** 2)
        # Arrays whose content no branch constrains match the same branches after closing.
        are_arrays_apart = len(arrays) <= 1 or not any(arrays)
        self._is_apart[id(branches)] = are_arrays_apart and all(
            any(one[key].isdisjoint(other[key]) for key in one.keys() & other.keys())
            for one, other in combinations(objects, 2)
        )
        return self._is_apart[id(branches)]

    def _tags(
        self,
        branch: Any,  # noqa: ANN401
    ) -> tuple[dict[str, frozenset[str]] | None, bool | None]:
        """Return the allowed strings of an object's required keys, None if it is not an object; and
        whether it constrains an array's content, None if it is not an array."""
        for _ in range(MAX_CHAIN):
            if not isinstance(branch, dict) or "$ref" not in branch or "properties" in branch:
                break
            branch = self._target(branch["$ref"])
        if not isinstance(branch, dict):
            return {}, False
        if _strings(branch) is not None:
            return None, None
        looks_into = not _INTO_ARRAYS.isdisjoint(branch)
        array = looks_into if _may_be("array", branch) else None
        if not _may_be("object", branch):
            return None, array
        tags = {}
        properties, required = (
            _dict(branch.get("properties", {})),
            _list(branch.get("required", [])),
        )
        self._spend(len(properties) + len(required))
        wanted = {name for name in required if isinstance(name, str)}
        for key, value in properties.items():
            words = _strings(value) if key in wanted else None
            if words is not None:
                self._spend(len(words))
                tags[key] = words
        return tags, array

    def _done(self, node: Any, form: _Form) -> Any:  # noqa: ANN401
        """Return a schema transformed to a form."""
        if not isinstance(node, dict):
            return node
        return self._whole(node) if form is _Form.CLOSED else self._mapped(node, form)

    def _mapped(self, node: Schema, form: _Form) -> Schema:
        """Return a schema with its subschemas transformed.

        Args:
          node: the schema.
          form: the form of combined subschemas, which describe the same value.
        """
        self._look_at(node)
        inner = _Form.SENT if form is _Form.SENT else _Form.CLOSED
        done = dict(node)
        for word, value in node.items():
            if word in _COMBINING:
                parts = _list(value)
                is_apart = word != "oneOf" or form is _Form.SENT or self._are_apart(parts)
                done[word] = [self._done(one, form if is_apart else _Form.SENT) for one in parts]
            elif word == "$ref":
                self._target(value)
                done[word] = value if form is _Form.CLOSED else self._copied(value, form)
            elif word in _BY_NAME:
                done[word] = {name: self._done(one, inner) for name, one in _dict(value).items()}
            elif word in _VALUES:
                many = isinstance(value, list)
                done[word] = (
                    [self._done(v, inner) for v in value] if many else self._done(value, inner)
                )
        return done

    def _look_at(self, node: Schema) -> None:
        self._spend(1)
        if _LEFT_OPEN & node.keys() or ("$id" in node and node is not self._root):
            raise _LeftOpen

    def _spend(self, num_steps: int) -> None:
        self._num_steps += num_steps
        if self._num_steps > MAX_STEPS:
            raise _LeftOpen

    def _narrowed(self, done: Any, keys: _Keys) -> Any:  # noqa: ANN401
        """Return a schema restricted to these keys, if other keys may be omitted."""
        if not isinstance(done, dict) or not _may_be("object", done):
            return done
        is_list = keys.is_list or (self._is_strict and keys.is_object)
        is_short = keys.least > len(keys.names)  # a pattern may match only one key
        if keys.is_said or is_short or not is_list:
            return done
        self._spend(len(keys.names) + len(keys.patterns))
        done = done | {"additionalProperties": False}
        for word, listed in (("properties", keys.names), ("patternProperties", keys.patterns)):
            own = done.get(word, {})
            if not listed.keys() <= own.keys():
                done[word] = own | {name: {} for name in listed if name not in own}
        return done

    def _keys(self, node: Any) -> _Keys:  # noqa: ANN401
        """Return what a schema and everything it combines specify about keys."""
        if not isinstance(node, dict):
            return _Keys()
        self._look_at(node)
        required, least = _list(node.get("required", [])), node.get("minProperties", 0)
        keys = _Keys(
            names=dict.fromkeys([*_dict(node.get("properties", {})), *map(str, required)]),
            patterns=dict.fromkeys(_dict(node.get("patternProperties", {}))),
            is_list=not {"properties", "patternProperties"}.isdisjoint(node) or bool(required),
            is_object="type" in node and _may_be("object", node),
            is_said=bool(_SAYING & node.keys()),
            least=least if isinstance(least, int) else 0,
        )
        for word in _COMBINING:
            for part in _list(node.get(word, [])):
                keys.add(self._keys(part))
        if "$ref" in node:
            keys.add(self._keys_at(node["$ref"]))
        return keys

    def _keys_at(self, pointer: str) -> _Keys:
        """Return what a reference's target specifies about keys."""
        target = self._target(pointer)
        if pointer not in self._keys_of:
            if pointer in self._chain or len(self._chain) == MAX_CHAIN:
                raise _LeftOpen
            self._chain.append(pointer)
            self._keys_of[pointer] = self._keys(target)
            self._chain.pop()
        keys = self._keys_of[pointer]
        self._spend(len(keys.names))
        return keys

    def _copied(self, pointer: str, form: _Form) -> str:
        """Return a reference to a transformed copy of a reference's target."""
        if (pointer, form) not in self._name_of_copy:
            name = f"part-{len(self._name_of_copy)}"
            while name in _dict(self._root.get("$defs", {})):
                name += "-"
            self._name_of_copy[pointer, form] = name
        return f"#/$defs/{self._name_of_copy[pointer, form]}"

    def _target(self, pointer: Any) -> Any:  # noqa: ANN401
        """Return the target of a reference within the document."""
        if not isinstance(pointer, str) or (pointer != "#" and not pointer.startswith("#/")):
            raise _LeftOpen
        found: Any = self._root
        for part in unquote(pointer[1:]).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, dict) and name in found:
                found = found[name]
            else:
                raise _LeftOpen
        return found


def _may_be(kind: str, node: Schema) -> bool:
    """Return whether a schema's `type` allows a kind of value."""
    own = node.get("type", kind)
    return bool(own == kind or (isinstance(own, list) and kind in own))


def _strings(schema: Any) -> frozenset[str] | None:  # noqa: ANN401
    """Return the strings that a schema allows, if it lists them and allows nothing else."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return None
    return frozenset(values)


def _list(value: Any) -> list[Any]:  # noqa: ANN401
    if not isinstance(value, list):
        raise _LeftOpen
    return value


def _dict(value: Any) -> Schema:  # noqa: ANN401
    if not isinstance(value, dict):
        raise _LeftOpen
    return value

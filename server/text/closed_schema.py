"""A JSON Schema with its objects closed: where it lists keys and says nothing about others, a
completion ends at the listed ones.

A schema without `additionalProperties` allows any key, and a model that is held to it may invent
keys up to its token limit. Each change narrows the schema, so every value of the closed schema is a
value of the schema that was sent.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final
from urllib.parse import unquote

from triolet.sampling import MAX_GRAMMAR_CHARS

Schema = dict[str, Any]

MAX_STEPS: Final = 8192
"""Schemas looked at and keys repeated to close one schema, in the thread of all requests. A schema
of the largest size that is allowed has 3,000 parts; combinations look at a part more than once and
repeat its keys."""
MAX_CHAIN: Final = 32
"""References that lead to one another: as many as brackets may be nested."""
_COMBINING: Final = ("allOf", "anyOf", "oneOf")
_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions")
_VALUES: Final = ("items", "prefixItems", "additionalItems", "additionalProperties")
_OF_DOCUMENT: Final = ("$id", "$schema", "$defs", "definitions")
_ABOUT_KEYS: Final = frozenset(
    "properties patternProperties additionalProperties required minProperties const enum".split()
)
_SAYING: Final = frozenset({"const", "enum", "additionalProperties"})
"""A schema with one of these says itself which keys there may be."""
_LEFT_OPEN: Final = frozenset(
    "not if then else dependentSchemas dependentRequired dependencies propertyNames "
    "unevaluatedProperties $anchor $dynamicAnchor $dynamicRef $recursiveRef".split()
)
"""A schema with one of these stays as it is: to narrow what is negated would widen the whole, and
references by anchor are not followed."""


class _LeftOpen(Exception):
    """The schema cannot be closed within what is understood of it."""


def closed_text(text: str, *, is_strict: bool = False) -> str:
    """Return the text of a JSON Schema with its objects closed, or `text` itself.

    Args:
      text: nested as deeply as `GrammarConfig.max_depth` at most.
      is_strict: as for `closed`.
    """
    try:
        schema = json.loads(text)
    except ValueError:
        return text  # the compiler says what is wrong with it
    narrower = closed(schema, is_strict=is_strict) if isinstance(schema, dict) else schema
    if narrower == schema:
        return text
    written = json.dumps(narrower, ensure_ascii=False)
    return written if len(written) <= MAX_GRAMMAR_CHARS else text


def closed(schema: Schema, *, is_strict: bool = False) -> Schema:
    """Return a schema with its objects closed.

    Args:
      schema: nested as deeply as `GrammarConfig.max_depth` at most.
      is_strict: close objects that list no keys as well.
    """
    try:
        return _Closing(schema, is_strict=is_strict).run()
    except _LeftOpen:
        return schema


@dataclass(slots=True)
class _Keys:
    """What a schema says about keys, with all that is combined with it.

    Attributes:
      names: listed and required keys.
      patterns: of patternProperties.
      is_list: keys are listed, if only none.
      is_object: the type is named.
      is_said: the schema says which other keys there may be.
      least: the number of keys that an object must have.
    """

    names: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    is_list: bool = False
    is_object: bool = False
    is_said: bool = False
    least: int = 0

    def add(self, other: _Keys) -> None:
        """Take in what another schema says of the same value."""
        self.names |= other.names
        self.patterns |= other.patterns
        self.is_list |= other.is_list
        self.is_object |= other.is_object
        self.is_said |= other.is_said
        self.least = max(self.least, other.least)


class _Closing:
    """One schema while it is closed.

    A part of a combination stays open, because the keys of its neighbours are no additional ones.
    The combination is closed as one, with the keys of all parts; where it has branches, each of
    them with its own keys and those around it. What a part refers to is copied, because elsewhere
    the same definition may be a whole value.
    """

    def __init__(self, root: Schema, *, is_strict: bool) -> None:
        self._root = root
        self._is_strict = is_strict
        self._keys_of: dict[str, _Keys] = {}
        self._chain: list[str] = []
        self._name_of_copy: dict[str, str] = {}
        self._num_steps = 0

    def run(self) -> Schema:
        """Return the closed schema.

        Raises:
          _LeftOpen: it stays as it is.
        """
        done: Schema = self._whole(self._root)
        copies: Schema = {}
        while len(copies) < len(self._name_of_copy):
            pointer, name = list(self._name_of_copy.items())[len(copies)]
            target = self._target(pointer)
            if isinstance(target, dict):
                target = {word: v for word, v in target.items() if word not in _OF_DOCUMENT}
            copies[name] = self._part(target)
        return done | {"$defs": done.get("$defs", {}) | copies} if copies else done

    def _whole(self, node: Any) -> Any:  # noqa: ANN401
        """Return a schema that alone describes a value, closed."""
        if not isinstance(node, dict):
            return node
        combining = [word for word in (*_COMBINING, "$ref") if word in node]
        if not combining:
            return self._narrowed(self._mapped(node, is_part=False), self._keys(node))
        branching = self._branching(node)
        if len(combining) == 1 and not _ABOUT_KEYS & node.keys():
            word = combining[0]
            if word in (branching, "$ref") or (word == "allOf" and len(_list(node[word])) == 1):
                return self._mapped(node, is_part=False)
        done = self._mapped(node, is_part=True)
        if branching is None:
            return self._narrowed(done, self._keys(node))
        around = {word: value for word, value in node.items() if word != branching}
        for index, branch in enumerate(_list(node[branching])):
            keys = self._keys(around)
            keys.add(self._keys(branch))
            done[branching][index] = self._narrowed(done[branching][index], keys)
        return done

    def _branching(self, node: Schema) -> str | None:
        """Return the keyword with branches that may be closed one by one.

        A value that several branches of oneOf take, it does not take. A branch that is closed takes
        fewer values, so that another one might be left alone with a value of both: branches of
        oneOf are closed if none of them shares a value with another.
        """
        if "anyOf" in node:
            return "anyOf"
        if "oneOf" not in node:
            return None
        tags = [self._tags(branch) for branch in _list(node["oneOf"])]
        objects = [tag for tag in tags if tag is not None]
        self._spend(len(objects) ** 2)
        are_apart = all(
            any(one[key].isdisjoint(other[key]) for key in one.keys() & other.keys())
            for one, other in combinations(objects, 2)
        )
        return "oneOf" if are_apart else None

    def _tags(self, branch: Any) -> dict[str, frozenset[str]] | None:  # noqa: ANN401
        """Return the strings that required keys of an object may have; None if it is no object."""
        for _ in range(MAX_CHAIN):
            if not isinstance(branch, dict) or "$ref" not in branch or "properties" in branch:
                break
            branch = self._target(branch["$ref"])
        if not isinstance(branch, dict):
            return {}
        if not _may_be_object(branch):
            return None
        tags = {}
        for key, value in _dict(branch.get("properties", {})).items():
            words = _strings(value) if key in _list(branch.get("required", [])) else None
            if words is not None:
                tags[key] = words
        return tags

    def _part(self, node: Any) -> Any:  # noqa: ANN401
        """Return a schema that describes a value together with others, open."""
        return self._mapped(node, is_part=True) if isinstance(node, dict) else node

    def _mapped(self, node: Schema, *, is_part: bool) -> Schema:
        """Return a schema with the schemas in it done.

        Args:
          node: the schema.
          is_part: those that it combines, which describe the same value, stay open.
        """
        self._look_at(node)
        combined = self._part if is_part else self._whole
        done = dict(node)
        for word, value in node.items():
            if word in _COMBINING:
                done[word] = [combined(part) for part in _list(value)]
            elif word == "$ref":
                self._target(value)
                done[word] = self._copied(value) if is_part else value
            elif word in _BY_NAME:
                done[word] = {name: self._whole(part) for name, part in _dict(value).items()}
            elif word in _VALUES:
                many = isinstance(value, list)
                done[word] = [self._whole(v) for v in value] if many else self._whole(value)
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
        """Return a schema that takes no other keys than these, if others may be left out."""
        if not isinstance(done, dict) or not _may_be_object(done):
            return done
        is_list = keys.is_list or (self._is_strict and keys.is_object)
        is_short = keys.least > len(keys.names) and not keys.patterns
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
        """Return what a schema says about keys, with all that it combines."""
        if not isinstance(node, dict):
            return _Keys()
        self._look_at(node)
        required, least = _list(node.get("required", [])), node.get("minProperties", 0)
        keys = _Keys(
            names=dict.fromkeys([*_dict(node.get("properties", {})), *map(str, required)]),
            patterns=dict.fromkeys(_dict(node.get("patternProperties", {}))),
            is_list=not {"properties", "patternProperties"}.isdisjoint(node) or bool(required),
            is_object="type" in node and _may_be_object(node),
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
        """Return what a reference's target says about keys."""
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

    def _copied(self, pointer: str) -> str:
        """Return a reference to an open copy of a reference's target."""
        if pointer not in self._name_of_copy:
            name = f"part-{len(self._name_of_copy)}"
            while name in _dict(self._root.get("$defs", {})):
                name += "-"
            self._name_of_copy[pointer] = name
        return f"#/$defs/{self._name_of_copy[pointer]}"

    def _target(self, pointer: Any) -> Any:  # noqa: ANN401
        """Return what a reference within the document leads to."""
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


def _may_be_object(node: Schema) -> bool:
    """Return whether a schema's own type lets a value be an object."""
    kind = node.get("type", "object")
    return kind == "object" or (isinstance(kind, list) and "object" in kind)


def _strings(schema: Any) -> frozenset[str] | None:  # noqa: ANN401
    """Return the strings that a schema takes, if it takes nothing else and names them."""
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

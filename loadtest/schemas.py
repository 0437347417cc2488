"""Generate JSON Schemas from a seed: nested, with enums, arrays, references, patterns and bounds.

Instances of a schema are short, so that a constrained completion reaches its end. Also has schemas
and grammars for hostile clients.
"""

from __future__ import annotations

import random
from typing import Any, Final

Schema = dict[str, Any]

MAX_DEPTH: Final = 3
PATTERNS: Final = (
    r"^[a-z]{2,6}$",
    r"^[A-Z][a-z]{1,5}( [A-Z][a-z]{1,5})?$",
    r"^\d{3}-\d{4}$",
    r"^(red|green|blue)-[0-9]{1,2}$",
    r"^[a-f0-9]{4}$",
    r"^[a-z]{1,6}@[a-z]{2,5}\.(com|org)$",
)
FORMATS: Final = ("uuid", "ipv4")
"""String formats, without dates: their fractions of a second may have any length."""
WORDS: Final = "name age city tags score état note Größe kind 色 items-1 a.b path/x".split()


def random_schema(seed: int) -> Schema:
    """Return a schema of an object, determined by the seed."""
    chance = random.Random(seed)
    schema = _object(chance, 0, ["#/$defs/leaf", "#/$defs/pair", "#/$defs/chain"])
    schema["$defs"] = {
        "leaf": _scalar(chance),
        "pair": {"type": "array", "prefixItems": [_scalar(chance), _scalar(chance)], "items": False,
                 "minItems": 2},
        # A recursive definition that may end at every level.
        "chain": {
            "type": "object",
            "properties": {
                "value": {"enum": [1, 2, 3]},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/chain"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        },
    }  # fmt: skip
    return schema


def _any(chance: random.Random, depth: int, references: list[str]) -> Schema:
    kinds = ["scalar"] * 7 + ["reference"]
    if depth < MAX_DEPTH:
        kinds += ["object"] * 2 + ["array"] * 2 + ["either"]
    match chance.choice(kinds):
        case "object":
            return _object(chance, depth + 1, references)
        case "array":
            least = chance.randint(0, 2)
            items = _any(chance, depth + 1, references)
            return {
                "type": "array",
                "items": items,
                "minItems": least,
                "maxItems": least + chance.randint(0, 2),
            }
        case "either":
            return {"anyOf": [_scalar(chance), _any(chance, depth + 1, references)]}
        case "reference":
            return {"$ref": chance.choice(references)}
        case _:
            return _scalar(chance)


def _object(chance: random.Random, depth: int, references: list[str]) -> Schema:
    names = chance.sample(WORDS, chance.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _any(chance, depth, references) for name in names},
        "required": [name for name in names if chance.random() < 0.7],
        "additionalProperties": False,
    }


def _scalar(chance: random.Random) -> Schema:
    low = chance.randint(-50, 50)
    choices: tuple[Schema, ...] = (
        {"enum": chance.sample(["a", "b c", 'd"e', "ä", 1, 2.5, None, True], 3)},
        {"const": chance.choice(["x", 7, False, None])},
        {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 400)},
        {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1000},
        {"type": "number", "enum": [0.5, -1.25, 1e-3]},
        {"type": "boolean"},
        {"type": "null"},
        {"type": ["string", "null"], "maxLength": 8},
        {"type": "string", "minLength": 1, "maxLength": chance.randint(1, 20)},
        {"type": "string", "pattern": chance.choice(PATTERNS)},
        {"type": "string", "format": chance.choice(FORMATS)},
    )
    return chance.choice(choices)


AMBIGUOUS: Final = 's: s s | s s s | w | " "\nw: "a" | "b" | "c" | "d" | "e" | w w\n'
"""Lark rules with very many parse trees per text: parsing costs more with every token."""


def costly() -> dict[str, dict[str, Any]]:
    """Return grammars that compile quickly but cost more with every token, or suddenly after a
    harmless beginning; by name of the problem."""
    words = " | ".join(f'"{number:x}"' for number in range(1500))
    branches = " | ".join(f'"a" y{number % 20}' for number in range(700))
    nested = "\n".join(f'y{number}: "a"? x?' for number in range(20))
    either: Schema = {
        "anyOf": [
            {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": count + 2}
            for count in range(40)
        ]
    }
    wide: Schema = {"properties": {f"p{number}": {} for number in range(300)}}
    lark = {
        "ambiguous": f"start: s\n{AMBIGUOUS}",
        "ambiguous after 64 digits": f"start: /[0-9]{{64}}/ s\n{AMBIGUOUS}",
        "nullable": 'start: s\ns: | s s | s s s | "a" | "b"\n',
        "nullable optional": 'start: a\na: b? b? b? b? b? b?\nb: a | "x" | "y"?\n',
        "left-recursive": 'start: s\ns: s w | s s | w\nw: w "a" | s "b" | "a" | "b" | "c"\n',
        "right-recursive": 'start: s\ns: w s | w\nw: "a" w | "b" s | "a" | "b" | "c"\n',
        "many alternatives": f"start: s\ns: s s | {words}\n",
        "many branches": f"start: x x x x x x\nx: {branches}\n{nested}\n",
        "many branches after 64 digits": f"start: /[0-9]{{64}}/ x x x\nx: {branches}\n{nested}\n",
        "ambiguous words": "start: r\nr: /(a|b|ab)+/ | /(a|aa)+b?/ | r r | r r r\n",
    }
    return {name: {"guided_grammar": text} for name, text in lark.items()} | {
        "huge expression": {
            "guided_regex": "(" + "|".join(f"[a-z]*{n}[a-z]*{n * 7}" for n in range(300)) + ")*"
        },
        "counted repetition": {"guided_regex": "(a{1,50}|b{1,50}){1,50}c"},
        "deep schema": {"guided_json": {"$ref": "#/$defs/n", "$defs": {"n": either}}},
        "wide schema": {"guided_json": wide},
    }


def hostile() -> dict[str, dict[str, Any]]:
    """Return fields of requests by name of the problem. Harmless ones may be served."""
    deep: Schema = {"type": "string"}
    for _ in range(500):
        deep = {"items": deep}
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    every = [{"type": "string", "pattern": f"^.*{i}.*{i}.*$"} for i in range(200)]
    doubled = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
        for i in range(30)
    }
    sums = [[{"type": "string", "pattern": f"a{i}{j}"} for j in range(4)] for i in range(6)]
    named: list[list[Schema]] = [
        [{"properties": {f"p{i}{j}": {}}} for j in range(10)] for i in range(10)
    ]
    chained = {
        name: {"allOf": [{"$ref": f"#/$defs/{following}"}] * 20}
        for name, following in ("ab", "bc", "cd", "de")
    }
    return {
        "depth": {"guided_json": deep},
        "size": {"guided_json": {"enum": ["x" * 40 + str(i) for i in range(1000)]}},
        "regex syntax": {"guided_regex": "(a"},
        "regex brackets": {"guided_regex": "(" * 2000 + ")" * 2000},
        "regex counts": {"guided_regex": "((((((a{1,99}b){1,99}c){1,99}d){1,99}e){1,99}f){1,99}g)"},
        "regex nested": {"guided_regex": "(a+)+$"},
        "regex memory": {"guided_regex": "(.*a.{18}){2}"},
        "regex look-around": {"guided_regex": "(?=a)(?!b)a"},
        "schema loop": {"guided_json": loop},
        "schema doubling": {
            "guided_json": {"$ref": "#/$defs/d0", "$defs": {**doubled, "d30": {"type": "object"}}}
        },
        "schema intersections": {"guided_json": {"allOf": every}},
        "schema products": {"guided_json": {"allOf": [{"anyOf": one} for one in sums]}},
        "schema products of objects": {"guided_json": {"allOf": [{"anyOf": one} for one in named]}},
        "schema multiples": {
            "guided_json": {
                "allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9941)]
            }
        },
        "schema references": {
            "guided_json": {"$ref": "#/$defs/a", "$defs": {**chained, "e": {"type": "object"}}}
        },
        "schema lengths": {"guided_json": {"type": "array", "minItems": 10**6}},
        "schema elsewhere": {"guided_json": {"$ref": "http://127.0.0.1:9/schema.json"}},
        "schema kind": {"guided_json": {"type": "objekt"}},
        "grammar syntax": {"guided_grammar": "start: nothing"},
        "grammar recursion": {"guided_grammar": "start: start start | start"},
    }

"""Hypothesis strategies that draw random frames from the schema, so new frames and fields are
covered automatically."""

from __future__ import annotations

from functools import reduce
from typing import Any, get_args

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as schema

from transport.frames import AnyFrame

FRAME_TYPES: tuple[type[AnyFrame], ...] = get_args(AnyFrame)

MAX_INT = 2**63 - 1
MAX_ITEMS = 3
"""Longer collections find nothing more."""


def values_of(kind: schema.Type) -> st.SearchStrategy[Any]:
    """Return a strategy for values that the schema allows."""
    match kind:
        case schema.BoolType():
            return st.booleans()
        case schema.NoneType():
            return st.none()
        case schema.IntType(ge=low, le=high):
            return st.integers(-MAX_INT if low is None else low, MAX_INT if high is None else high)
        case schema.FloatType(ge=low, gt=above, le=high):
            return st.floats(
                low if above is None else above,
                high,
                exclude_min=above is not None,
                allow_nan=False,
                allow_infinity=False,
            )
        case schema.StrType(pattern=pattern, min_length=shortest, max_length=longest):
            if pattern is not None:
                return st.from_regex(pattern, fullmatch=True)
            characters = st.characters(codec="utf-8")
            return st.text(characters, min_size=shortest or 0, max_size=min(20, longest or 20))
        case schema.BytesType(min_length=shortest, max_length=longest):
            return st.binary(min_size=shortest or 0, max_size=min(64, longest or 64))
        case schema.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case schema.VarTupleType(item_type=item, min_length=shortest):
            items = st.lists(values_of(item), min_size=shortest or 0, max_size=MAX_ITEMS)
            return items.map(tuple)
        case schema.TupleType(item_types=kinds):
            return st.tuples(*map(values_of, kinds))
        case schema.DictType(key_type=key, value_type=value):
            return st.dictionaries(values_of(key), values_of(value), max_size=MAX_ITEMS)
        case schema.UnionType(types=types):
            return reduce(lambda left, right: left | right, map(values_of, types))
        case (
            schema.StructType(cls=cls, fields=fields) | schema.DataclassType(cls=cls, fields=fields)
        ):
            return st.builds(cls, **{field.name: values_of(field.type) for field in fields})
        case _:
            raise AssertionError(f"no strategy for this kind of field: {kind}")


def frames(frame_type: type[AnyFrame]) -> st.SearchStrategy[AnyFrame]:
    """Return a strategy for frames of one type."""
    return values_of(schema.type_info(frame_type))


def any_frame() -> st.SearchStrategy[AnyFrame]:
    """Return a strategy for frames of all types."""
    return st.one_of(*map(frames, FRAME_TYPES))


def tag_of(frame_type: type[msgspec.Struct]) -> int:
    """Return a frame's integer tag on the wire."""
    tag = frame_type.__struct_config__.tag
    assert isinstance(tag, int)
    return tag

"""Tests of the JSON parser for request bodies: it accepts or refuses any bytes, and what it accepts
can be encoded again."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from server.api.anthropic.schema import MessagesRequest
from server.api.json_body import parse_object
from server.api.ollama.schema import OllamaChat, OllamaEmbed, OllamaGenerate
from server.api.openai.embeddings_schema import EmbeddingFields, RerankRequest, ScoreRequest
from server.api.openai.responses_schema import InputTokensRequest, ResponseCreate
from server.api.schemas import MAX_MESSAGES, ChatRequest, CompletionRequest, StrictModel
from server.text.tool_forms.scanning import MAX_CONTAINERS, MAX_VALUES
from triolet.errors import RequestError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=6,
)  # fmt: skip


def parsed_or_400(body: bytes) -> dict[str, object] | None:
    """Return the object, or None for a proper 400; raise anything else."""
    try:
        return parse_object(body)
    except RequestError as error:
        if error.status != 400:
            raise
        return None


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=3), json_values, max_size=3))
def test_any_object_is_read_as_it_was_written(value: dict[str, object]) -> None:
    assert parse_object(json.dumps(value).encode()) == value


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_a_400(body: bytes) -> None:
    assert parsed_or_400(body) is None or body.strip().startswith(b"{")


@given(st.text(alphabet='{}[]",:\\ud80e1.-+NaInfity \0'))
def test_any_near_json_is_an_object_or_a_400(text: str) -> None:
    value = parsed_or_400(text.encode())
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize("body", [b'{"a": "\\ud83d\\ude00"}', '{"a": "😀"}'.encode()])
def test_a_whole_surrogate_pair_is_one_character(body: bytes) -> None:
    assert parse_object(body) == {"a": "😀"}


def test_a_number_whose_value_is_an_integer_is_one() -> None:
    value = parse_object(b'{"a": [1.0, -2.0, 1e2, 1e18], "b": [1.5, 1e300]}')
    assert value == {"a": [1, -2, 100, 10**18], "b": [1.5, 1e300]}
    assert [type(one) for one in value["a"]] == [int] * 4
    assert [type(one) for one in value["b"]] == [float] * 2


def test_the_key_that_occurs_twice_is_named() -> None:
    with pytest.raises(RequestError, match="'twice'"):
        parse_object(b'{"once": 1, "twice": 2, "twice": 2}')


@pytest.mark.parametrize("text", ['[{,"', '\\"[', "\\\\[{"], ids=["", "quoted", "escaped"])
def test_what_stands_in_a_string_is_no_value(text: str) -> None:
    value = {"a": text * MAX_CONTAINERS, "b": [1, {}]}
    assert parse_object(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"a": NaN}', "NaN is not a number"),
        (b'{"a": [-Infinity]}', "-Infinity is not a number"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": -1e999}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"a": ' + b"[" * 30_000 + b"]" * 30_000 + b"}", "nested too deeply"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\uDC00": 1}', "surrogate"),
        (b'\xef\xbb\xbf{"a": 1}', "byte order mark"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[]", "not a JSON object"),
        (b'{"a": [' + b",".join([b"[]"] * (MAX_CONTAINERS + 1)) + b"]}", "more than"),
        (b'{"a": [' + b"1," * MAX_VALUES + b"1, 1]}", "more than"),
        (b'{"a": [' + b'"",' * MAX_VALUES + b'"", ""]}', "more than"),
        (b'{"a": "' + b"\\\\" * (MAX_VALUES + 1) + b"[" * MAX_CONTAINERS + b'"}', "more than"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_json_takes_and_we_do_not_is_named(body: bytes, why: str) -> None:
    with pytest.raises(RequestError, match=why) as refusal:
        parse_object(body)
    assert refusal.value.status == 400


def num_errors(kind: type[StrictModel], body: dict[str, object]) -> int:
    try:
        kind.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize("entry", [1, "x", {"x": 1}], ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        ChatRequest, CompletionRequest, MessagesRequest, ResponseCreate, InputTokensRequest,
        EmbeddingFields, RerankRequest, ScoreRequest, OllamaChat, OllamaEmbed, OllamaGenerate,
    ],
)  # fmt: skip
def test_a_list_is_not_read_to_its_end_where_it_is_wrong(
    kind: type[StrictModel], entry: object
) -> None:
    """An error for each entry of three MB held the interpreter lock for six seconds."""
    entries = [entry] * (2 * MAX_MESSAGES)
    errors = {
        name: num_errors(kind, {field.alias or name: entries})
        for name, field in kind.model_fields.items()
    }
    assert max(errors.values()) < MAX_MESSAGES, errors

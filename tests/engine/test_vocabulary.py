"""Tests of the vocabulary check: a draft model must have the same token ids as its target model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from engine.vocabulary import check_same_vocabulary
from triolet.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, vocabulary: object, **added: int) -> Path:
    path.mkdir()
    document = {
        "model": {"vocab": vocabulary},
        "added_tokens": [{"content": name, "id": token_id} for name, token_id in added.items()],
    }
    (path / "tokenizer.json").write_text(json.dumps(document))
    return path


def test_equal_vocabularies_pass_whatever_their_form(tmp_path: Path) -> None:
    model = write(tmp_path / "model", {"a": 0, "b": 1}, end=2)
    check_same_vocabulary(model, write(tmp_path / "merged", {"b": 1, "end": 2, "a": 0}))
    check_same_vocabulary(model, write(tmp_path / "listed", [["a", -1.0], ["b", -2.0]], end=2))


@pytest.mark.parametrize(
    ("vocabulary", "end", "says"),
    [
        ({"a": 0, "c": 1}, 2, "1 token ids differ, the first is 1 ('c' there, 'b' here)"),
        ({"a": 0}, 2, "1 token ids differ, the first is 1 (None there, 'b' here)"),
        ({"a": 0, "b": 1}, 3, "2 token ids differ, the first is 2 (None there, 'end' here)"),
    ],
)
def test_others_are_refused_with_the_first_difference(
    tmp_path: Path, vocabulary: dict[str, int], end: int, says: str
) -> None:
    model = write(tmp_path / "model", {"a": 0, "b": 1}, end=2)
    draft = write(tmp_path / "draft", vocabulary, end=end)
    with pytest.raises(ConfigError) as caught:
        check_same_vocabulary(model, draft)
    assert says in str(caught.value)
    assert str(draft) in str(caught.value)


@pytest.mark.parametrize("text", [None, "{", "[]", '{"model": {}}', '{"model": {"vocab": [1]}}'])
def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path, text: str | None) -> None:
    model = write(tmp_path / "model", {"a": 0})
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"needs the tokenizer of both.*tokenizer\.json"):
        check_same_vocabulary(model, tmp_path)

"""Tests of reading the chat page's texts from a model directory, and of errors for broken files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from server.text.model_files import MAX_CARDS, PageWords, read_page_words
from triolet.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

CARD = {"title": "A fact", "question": "What is the capital of France?"}


def test_a_directory_without_the_file_leaves_the_words_to_the_page(tmp_path: Path) -> None:
    words = read_page_words(tmp_path, has_chat_template=False)
    assert words == PageWords(has_chat_template=False)
    assert words.document() == {"lead": None, "cards": [], "has_chat_template": False}


def test_lead_and_cards_are_taken_over(tmp_path: Path) -> None:
    (tmp_path / "page.json").write_text(json.dumps({"lead": "Hello.", "cards": [CARD]}))
    words = read_page_words(tmp_path, has_chat_template=True)
    assert words.document() == {"lead": "Hello.", "cards": [CARD], "has_chat_template": True}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "holds JSON that is not an object"),
        ('{"cards": 1}', "must be a list of at most"),
        (json.dumps({"cards": [CARD] * (MAX_CARDS + 1)}), "must be a list of at most"),
        ('{"cards": [1]}', "a card in .* is not an object"),
        ('{"cards": [{"title": "x"}]}', "question in .* is None; allowed: a text"),
        ('{"lead": ""}', "lead in .* is ''; allowed: a text of up to 400"),
        (json.dumps({"lead": "x" * 401}), "lead in .* allowed"),
    ],
)
def test_a_broken_file_is_refused_with_its_field(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "page.json").write_text(content)
    with pytest.raises(ModelError, match=words):
        read_page_words(tmp_path, has_chat_template=True)

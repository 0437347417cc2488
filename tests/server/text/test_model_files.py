"""Tests of reading model directories, and of errors for missing or broken files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from server.text.model_files import read_text_files
from tests.server.tiny_text import EOS_ID, tiny_tokenizer
from triolet.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path


def write_model(folder: Path, **files: object) -> Path:
    """Write a small model directory; `files` replace or, if None, remove files."""
    contents: dict[str, object] = {
        "tokenizer.json": tiny_tokenizer().to_str(),
        "config.json": {"max_position_embeddings": 64, "eos_token_id": 5},
        "generation_config.json": {"eos_token_id": [6, 5]},
        "tokenizer_config.json": {
            "bos_token": "<|bos|>",
            "eos_token": {"content": "<|end|>", "special": True},
            "chat_template": "{{ messages }}",
        },
        **{name.replace("__", "."): content for name, content in files.items()},
    }
    for name, content in contents.items():
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name).write_text(text)
    return folder


def test_end_tokens_of_all_files_count(tmp_path: Path) -> None:
    files = read_text_files(write_model(tmp_path))
    assert files.eos_token_ids == (5, 6, EOS_ID)
    assert files.max_model_len == 64
    assert files.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
    assert files.chat_templates == {"default": "{{ messages }}"}


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    write_model(tmp_path, chat_template__jinja="from the file")
    assert read_text_files(tmp_path).chat_templates == {"default": "from the file"}


def test_named_templates_keep_their_names(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    write_model(tmp_path, tokenizer_config__json={"chat_template": named})
    assert read_text_files(tmp_path).chat_templates == {"default": "a", "tool_use": "b"}


def test_an_older_template_file_is_found(tmp_path: Path) -> None:
    write_model(tmp_path, tokenizer_config__json={}, chat_template__json={"chat_template": "older"})
    assert read_text_files(tmp_path).chat_templates == {"default": "older"}


def test_a_model_without_template_and_optional_files_is_fine(tmp_path: Path) -> None:
    write_model(tmp_path, tokenizer_config__json=None, generation_config__json=None)
    files = read_text_files(tmp_path)
    assert files.chat_templates == {}
    assert files.eos_token_ids == (5,)


def test_named_tokens_can_stand_in_a_file_of_their_own(tmp_path: Path) -> None:
    write_model(
        tmp_path, tokenizer_config__json={}, special_tokens_map__json={"eos_token": "<|end|>"}
    )
    assert EOS_ID in read_text_files(tmp_path).eos_token_ids


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config__json": None}, "config.json is missing"),
        ({"tokenizer__json": None}, "tokenizer.json is missing"),
        ({"tokenizer__json": "{}"}, "tokenizer.json is not a tokenizer"),
        ({"config__json": "{"}, "config.json is not valid JSON"),
        ({"config__json": "[" * 100_000}, "config.json is not valid JSON"),
        ({"config__json": "[]"}, "config.json holds JSON that is not an object"),
        ({"config__json": {"eos_token_id": 1}}, "max_position_embeddings"),
        ({"config__json": {"max_position_embeddings": True}}, "max_position_embeddings"),
        ({"config__json": {"max_position_embeddings": 8, "eos_token_id": "x"}}, "eos_token_id"),
        ({"tokenizer_config__json": {"chat_template": [1]}}, "chat_template"),
        ({"tokenizer_config__json": {"chat_template": 7}}, "chat_template"),
        (
            {
                "config__json": {"max_position_embeddings": 8},
                "generation_config__json": None,
                "tokenizer_config__json": None,
            },
            "no end token",
        ),
    ],
)
def test_what_is_broken_is_named(tmp_path: Path, files: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words.replace(".", r"\.")):
        read_text_files(write_model(tmp_path, **files))


def test_a_missing_directory_and_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_text_files(tmp_path / "nowhere")
    write_model(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        read_text_files(tmp_path)

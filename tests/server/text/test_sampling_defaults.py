"""Tests of reading sampling defaults from model directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.text.model_files import SamplingDefaults, read_sampling_defaults
from triolet.errors import ModelError


def write(folder: Path, content: object) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    return folder


def test_without_the_file_the_api_s_defaults_hold(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == SamplingDefaults()


def test_what_the_file_says_holds_and_the_rest_stays(tmp_path: Path) -> None:
    write(tmp_path, {"temperature": 0.6, "top_k": 20, "eos_token_id": [1], "min_p": None})
    assert read_sampling_defaults(tmp_path) == SamplingDefaults(temperature=0.6, top_k=20)


def test_the_demo_model_s_file_can_be_read() -> None:
    demo = Path(__file__).parents[3] / "triolet" / "demo"
    assert 0 < read_sampling_defaults(demo).temperature <= 1


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("{", "is not valid JSON"),
        ([], "not an object"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"repetition_penalty": 0.009}, "repetition_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ('{"min_p": NaN}', "min_p"),
    ],
)
def test_what_cannot_work_is_named(tmp_path: Path, content: object, word: str) -> None:
    with pytest.raises(ModelError, match=word):
        read_sampling_defaults(write(tmp_path, content))

"""Tests of reading embedding settings from model directories."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from server.text.model_files import EmbeddingModel, read_embedding_model
from triolet.errors import ModelError
from triolet.pooling import Pooling

if TYPE_CHECKING:
    from pathlib import Path

TYPE = "sentence_transformers.models."


def write(folder: Path, **files: object) -> Path:
    """Write a directory; double underscores stand for folders."""
    for name, value in {"config": {"hidden_size": 64}, **files}.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value))
    return folder


def modules(*kinds: str) -> list[dict[str, object]]:
    return [{"idx": n, "type": TYPE + kind, "path": kind} for n, kind in enumerate(kinds)]


def test_a_plain_decoder_gives_its_last_token_with_length_one(tmp_path: Path) -> None:
    assert read_embedding_model(write(tmp_path)) == EmbeddingModel(size=64)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, Pooling.MEAN),
        ({"pooling_mode_lasttoken": True}, Pooling.LAST),
        ({"pooling_mode_cls_token": True, "include_prompt": True}, Pooling.FIRST),
        ({"pooling_mode_max_tokens": True}, Pooling.MAX),
        ({"pooling_mode": "mean"}, Pooling.MEAN),
        ({"pooling_mode": ["lasttoken"]}, Pooling.LAST),
    ],
)
def test_modules_say_how_it_pools(
    tmp_path: Path, config: dict[str, object], pooling: Pooling
) -> None:
    write(tmp_path, modules=modules("Transformer", "Pooling"), Pooling__config=config)
    model = read_embedding_model(tmp_path)
    assert (model.pooling, model.is_normalized, model.objection) == (pooling, False, "")


def test_modules_say_whether_it_is_normalised_and_how_long_inputs_are(tmp_path: Path) -> None:
    write(
        tmp_path,
        modules=modules("Transformer", "Pooling", "Normalize"),
        Pooling__config={"pooling_mode_mean_tokens": True},
        sentence_bert_config={"max_seq_length": 256},
    )
    model = read_embedding_model(tmp_path)
    assert model.is_normalized
    assert model.max_input_tokens == 256


@pytest.mark.parametrize(
    ("kinds", "config", "said"),
    [
        (("Transformer", "Pooling", "Dense"), {"pooling_mode_mean_tokens": True}, "Dense"),
        (("Transformer", "Pooling"), {"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        (
            ("Transformer", "Pooling"),
            {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            "max_tokens",
        ),
        (("Transformer", "Pooling"), {}, "none"),
    ],
)
def test_what_is_not_computed_is_said(
    tmp_path: Path, kinds: tuple[str, ...], config: dict[str, object], said: str
) -> None:
    write(tmp_path, modules=modules(*kinds), Pooling__config=config)
    assert said in read_embedding_model(tmp_path).objection


@pytest.mark.parametrize("path", ["../other", "/etc", "..", "", "a/b", None])
def test_a_pooling_module_elsewhere_is_refused(tmp_path: Path, path: str | None) -> None:
    listed = [{"type": TYPE + "Pooling", "path": path}]
    with pytest.raises(ModelError, match="names no folder"):
        read_embedding_model(write(tmp_path, modules=listed))


def test_a_broken_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a list of modules"):
        read_embedding_model(write(tmp_path, modules={"type": "Pooling"}))

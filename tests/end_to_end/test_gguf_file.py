"""Tests of serving a GGUF file, by the server (text) and the workers (weights)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from engine.load import load_engine
from ops.models.model_directory import find_model
from server.text.model_files import read_page_words
from server.text.tokenizer import TextModel
from tests.engine.driver import generate, ids
from tests.gguf_files import DEMO, Kind, demo_vocabulary, write_model
from tests.lazily import lazily
from triolet.config import EngineConfig
from triolet.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

    import transformers
else:
    transformers = lazily("transformers")


@pytest.mark.promise
@pytest.mark.slow
async def test_the_demo_model_as_a_gguf_file_answers_as_the_demo_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    template = json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"]
    vocabulary = demo_vocabulary("smollm", **{"tokenizer.chat_template": template})
    path = tmp_path / "Demo.Q8_0.gguf"
    write_model(
        path, transformers.AutoModelForCausalLM.from_pretrained(DEMO), Kind.Q8_0, vocabulary
    )
    directory = find_model(path)
    text = TextModel.load(directory)
    assert text.has_chat_template
    assert read_page_words(directory, has_chat_template=True).cards == ()
    engine = load_engine(directory, EngineConfig(kv_pool_bytes=4 * MIB), lambda *_: None)
    assert ":bfloat16:" in engine.fingerprint
    for question, answer in (
        ("What is the capital of France?", "The capital of France is Paris."),
        ("What is 12 + 30?", "12 + 30 = 42."),
    ):
        prompt = await text.render_chat([{"role": "user", "content": question}])
        tokens = await text.encode(prompt, add_special_tokens=False)
        said = ids(generate(engine, [list(tokens)], 16)[0])
        end = next(i for i, token in enumerate(said) if token in text.eos_token_ids)
        assert await text.decode(said[:end]) == answer

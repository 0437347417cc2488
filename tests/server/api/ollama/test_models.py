"""Tests of the model endpoints and embeddings of Ollama's API."""

from __future__ import annotations

import json
from datetime import datetime
from math import prod
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers.processors import TemplateProcessing

from engine.preflight.tensors import tensor_shapes
from ops.models.model_directory import demo_model_path
from server.text.model_files import EmbeddingModel, ModelCard, TextFiles, read_model_card
from server.text.tokenizer import TextModel
from store.gguf.directory import gguf_directory
from tests.gguf_files import TINY, Kind, write_tiny
from tests.server.support.surface import MODEL, request_bytes, requested, surface
from tests.server.tiny_text import (
    BOS,
    BOS_ID,
    EOS,
    EOS_ID,
    PAD_ID,
    TEMPLATE,
    tiny_text,
    tiny_tokenizer,
)

if TYPE_CHECKING:
    from pathlib import Path


async def test_the_model_is_listed_with_a_tag_by_each_of_its_names() -> None:
    async with surface(model_aliases=("other:7b", "*")) as server:
        tags = (await server.request("GET", "/api/tags")).json["models"]
        running = (await server.request("GET", "/api/ps")).json["models"]
        for model in tags:
            shown = await server.post("/api/show", {"model": model["name"]})
            assert shown.status == 200
    assert [one["name"] for one in tags] == [f"{MODEL}:latest", "other:7b"]
    assert all(datetime.fromisoformat(one["modified_at"]).tzinfo for one in tags)
    assert [one["model"] for one in running] == [one["model"] for one in tags]
    assert running[0]["context_length"] == 4096


async def test_a_fleet_without_workers_has_nothing_loaded() -> None:
    async with surface() as server:
        server.fleet.status().workers.clear()
        assert (await server.request("GET", "/api/ps")).json == {"models": []}


async def test_what_is_shown_is_what_the_directory_says() -> None:
    async with surface() as server:
        object.__setattr__(server.services.models.first, "card", read_model_card(demo_model_path()))
        shown = (await server.post("/api/show", {"name": MODEL})).json
        missing = await server.post("/api/show", {"model": "another"})
        nameless = await server.post("/api/show", {})
    assert shown["details"]["family"] == "llama"
    assert shown["details"]["quantization_level"] == "BF16"
    assert shown["model_info"]["llama.context_length"] == 4096
    assert shown["model_info"]["llama.block_count"] == 6
    assert shown["model_info"]["general.parameter_count"] > 4e6
    assert shown["details"]["parameter_size"].endswith("M")
    assert "completion" in shown["capabilities"]
    assert "num_ctx 4096" in shown["parameters"]
    assert (missing.status, nameless.status) == (404, 400)


def test_a_directory_without_weights_has_a_card(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 8}))
    card = read_model_card(tmp_path)
    assert (card.family, card.num_parameters, card.info) == ("qwen3", 0, {"embedding_length": 8})
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert read_model_card(tmp_path).num_parameters == 0
    assert len(card.digest) == 64
    assert read_model_card(tmp_path).digest != "" != ModelCard().digest


def test_a_gguf_file_has_the_card_of_its_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_tiny(tmp_path / "tiny.gguf", Kind.Q8_0)
    directory = gguf_directory(path)
    card = read_model_card(directory)
    assert (card.family, card.form, card.dtype) == ("llama", "gguf", "Q8_0")
    assert card.num_parameters == sum(map(prod, tensor_shapes(TINY).values()))
    assert card.size_bytes == path.stat().st_size
    assert card.info["block_count"] == 2
    path.write_bytes(path.read_bytes()[:-1])
    broken = read_model_card(directory)
    assert (broken.num_parameters, broken.dtype) == (0, "")


@pytest.mark.parametrize("action", ["pull", "push", "create", "copy", "delete"])
async def test_models_are_not_managed_here(action: str) -> None:
    method = "DELETE" if action == "delete" else "POST"
    answer = await requested(method, f"/api/{action}", body=b'{"model": "x"}')
    assert answer.status == 501
    assert "started with" in answer.json["error"]


async def test_clients_find_a_server_that_speaks_their_api() -> None:
    async with surface() as server:
        async with await server.sent(request_bytes("HEAD", "/")) as client:
            assert (await client.head())[0] == 200
        version = (await server.request("GET", "/api/version")).json["version"]
        nothing = await server.request("GET", "/api/nothing")
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]
    assert (nothing.status, list(nothing.json)) == (404, ["error"])


EMBED: list[tuple[dict[str, Any], int]] = [
    ({"input": "a b"}, 1),
    ({"input": ["a", "b", "c"], "options": {"num_ctx": 100}}, 3),
    ({"input": ""}, 0),
    ({"input": []}, 0),
]


@pytest.mark.parametrize(("body", "count"), EMBED)
async def test_inputs_become_vectors(body: dict[str, Any], count: int) -> None:
    async with surface() as server:
        answer = (await server.post("/api/embed", {"model": MODEL} | body)).json
        asked = server.fleet.inputs
    assert len(answer["embeddings"]) == count == len(asked)
    assert answer["prompt_eval_count"] == sum(len(one.prompt_ids) for one in asked)


async def test_a_long_input_is_cut_unless_that_is_forbidden() -> None:
    async with surface() as server:
        long = {"model": MODEL, "input": "x" * 5000}
        assert (await server.post("/api/embed", long)).status == 200
        assert len(server.fleet.inputs[0].prompt_ids) == 4096
        object.__setattr__(
            server.services.models.first, "embedding", EmbeddingModel(max_input_tokens=100)
        )
        answer = await server.post("/api/embed", long | {"truncate": False})
    assert answer.status == 400
    assert "takes at most 100" in answer.json["error"]


async def test_a_long_input_keeps_the_special_tokens_around_it() -> None:
    tokenizer = tiny_tokenizer()
    ends = [(token, tokenizer.token_to_id(token)) for token in (BOS, EOS)]
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A {EOS}", special_tokens=ends)
    files = TextFiles(
        tokenizer=tokenizer,
        eos_token_ids=(EOS_ID,),
        max_model_len=10,
        special_tokens={},
        chat_templates={},
    )
    text = TextModel(files)
    async with surface(text=text) as server:
        object.__setattr__(
            server.services.models.first, "embedding", EmbeddingModel(max_input_tokens=8)
        )
        for told in ("abc", "abcdef", "abcdefg", "x<|pad|>cdefgh", "x" * 100_000):
            answer = await server.post("/api/embed", {"model": MODEL, "input": told})
            assert answer.status == 200, answer
        inputs = [one.prompt_ids for one in server.fleet.inputs]
    assert inputs == [
        (BOS_ID, *b"abc", EOS_ID),
        (BOS_ID, *b"abcdef", EOS_ID),
        (BOS_ID, *b"abcdef", EOS_ID),
        (BOS_ID, *b"x", PAD_ID, *b"cdef", EOS_ID),
        (BOS_ID, *b"xxxxxx", EOS_ID),
    ]


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
async def test_a_model_thinks_if_its_reasoning_is_told_apart(switch: str) -> None:
    template = f"{TEMPLATE}{{{{ {switch} }}}}"
    for markers in (("<think>", "</think>"), ()):
        text = tiny_text(template=template, markers=markers)
        async with surface(text=text) as server:
            object.__setattr__(server.services.models.first, "card", ModelCard(template=template))
            shown = (await server.post("/api/show", {"model": MODEL})).json["capabilities"]
            for think in (True, False):
                asked = {"model": MODEL, "prompt": "hi", "think": think}
                assert (await server.post("/api/generate", asked)).status == 200
            prompts = [
                await text.decode(one.request.prompt_ids, skip_special_tokens=False)
                for one in server.fleet.generations
            ]
        assert ("thinking" in shown) is bool(markers)
        if markers:
            assert [prompt.endswith("True") for prompt in prompts] == [True, False]


async def test_the_older_form_takes_one_prompt() -> None:
    async with surface() as server:
        answer = await server.post("/api/embeddings", {"model": MODEL, "prompt": "a"})
        empty = await server.post("/api/embeddings", {"model": MODEL})
    assert answer.json["embedding"] == pytest.approx([0.6, 0.8])
    assert empty.json == {"embedding": []}

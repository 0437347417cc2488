"""Tests of embeddings with the official client: equal to transformers, and without leaks."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from ops.models.model_directory import demo_model_path
from tests.lazily import lazily

if TYPE_CHECKING:
    import numpy.typing as npt
    import openai
    import transformers

    from .fleet_process import FleetProcess
else:
    openai = lazily("openai")
    transformers = lazily("transformers")

MODEL_DIR = str(demo_model_path())
MODEL = "demo"
TEXTS = ["one", "The quick brown fox", "a longer text, " * 30, "Where is the city of Vard?"]


def reference(model_dir: str, texts: list[str]) -> list[npt.NDArray[np.float64]]:
    """Return the normalized hidden states of the last tokens, computed by transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    model = transformers.AutoModel.from_pretrained(model_dir, dtype=torch.float32)
    found = []
    for text in texts:
        with torch.inference_mode():
            states = model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state
        vector = states[0, -1].double().numpy()
        found.append(vector / np.linalg.norm(vector))
    return found


@pytest.mark.promise
@pytest.mark.slow
def test_vectors_are_those_of_transformers_in_every_form(fleet: FleetProcess) -> None:
    expected = reference(MODEL_DIR, TEXTS)
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
        assert [item.index for item in answer.data] == [0, 1, 2, 3]
        for item, wanted in zip(answer.data, expected, strict=True):
            np.testing.assert_allclose(item.embedding, wanted, rtol=0, atol=1e-5)
        # By default the client requests base64 and decodes it.
        single = client.embeddings.create(model=MODEL, input=TEXTS[1])
        assert single.data[0].embedding == answer.data[1].embedding
        raw = client.embeddings.create(model=MODEL, input=TEXTS[1], encoding_format="base64")
        decoded = np.frombuffer(base64.b64decode(str(raw.data[0].embedding)), dtype="<f4")
        assert decoded.tolist() == answer.data[1].embedding
        tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
        ids = [tokenizer(text).input_ids for text in TEXTS]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
        by_ids = client.embeddings.create(model=MODEL, input=ids, encoding_format="float")
        assert [i.embedding for i in by_ids.data] == [i.embedding for i in answer.data]
        cut = client.embeddings.create(model=MODEL, input=TEXTS[1], dimensions=16)
        beginning = np.array(expected[1][:16])
        wanted = beginning / np.linalg.norm(beginning)
        np.testing.assert_allclose(cut.data[0].embedding, wanted, rtol=0, atol=1e-5)
        as_numbers = client.embeddings.create(
            model=MODEL, input=TEXTS[1], dimensions=16, encoding_format="float"
        )
        assert as_numbers.data[0].embedding == cut.data[0].embedding
        of_one = client.embeddings.create(model=MODEL, input=ids[1], encoding_format="float")
        assert of_one.data[0].embedding == answer.data[1].embedding


BAD: list[tuple[str, dict[str, object]]] = [
    ("input", {"input": ""}),
    ("input", {"input": []}),
    ("input", {"input": [[5], []]}),
    ("input", {"input": [10**6]}),
    ("input", {"input": ["x"] * 2049}),
    ("input", {"input": [[7] * 100_000]}),
    ("dimensions", {"input": "x", "dimensions": 0}),
    ("dimensions", {"input": "x", "dimensions": 257}),
    ("encoding_format", {"input": "x", "encoding_format": "hex"}),
]


@pytest.mark.slow
def test_bad_inputs_are_refused_by_name(fleet: FleetProcess) -> None:
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as client:
        for param, fields in BAD:
            with pytest.raises(openai.BadRequestError) as refused:
                client.embeddings.create(model=MODEL, **fields)  # type: ignore[call-overload]
            assert refused.value.param == param

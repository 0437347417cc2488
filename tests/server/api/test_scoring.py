"""Tests of the rerank and score endpoints (Cohere's, Jina's and vLLM's APIs), which use cosine
similarity."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import trio

from server.tenants.opening import quotas_in_memory
from server.tenants.tenancy import Tenancy
from server.text.model_files import EmbeddingModel
from tests.server.support.fakes import ChargingFleet, FakeFleet, FakeRun
from tests.server.support.surface import CONFIG, MODEL, posted, refused_at, surface
from tests.server.support.tenants import tenant, tenants_of
from triolet.tenants.plans import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.contract.generation import GenerationRequest


RANKINGS = ("/v1/rerank", "/v2/rerank", "/rerank")
SCORES = ("/v1/score", "/score")
ASK: dict[str, Any] = {"query": "aaa", "documents": ["bbb", "aab", "aaa", "aab"]}


class LetterRun(FakeRun):
    """Embeds an input as its numbers of letters a and b."""

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        super().__init__(len(requests))
        self._requests = requests

    async def vectors(self) -> Sequence[bytes]:
        await trio.lowlevel.checkpoint()
        texts = [bytes(one.prompt_ids) for one in self._requests]
        return [struct.pack("<2f", text.count(b"a"), text.count(b"b")) for text in texts]


class LetterFleet(FakeFleet):
    """A fleet that computes such embeddings."""

    def embed(self, requests: Sequence[GenerationRequest]) -> FakeRun:
        self.inputs += requests
        return LetterRun(requests)


@pytest.mark.parametrize("path", RANKINGS)
async def test_documents_are_ordered_by_their_cosine_and_each_text_is_computed_once(
    path: str,
) -> None:
    async with surface(LetterFleet()) as server:
        answer = (await server.post(path, ASK)).json
        num_tokens = sum(len(one.prompt_ids) for one in server.fleet.inputs)
        assert len(server.fleet.inputs) == 3
    assert [one["index"] for one in answer["results"]] == [2, 1, 3, 0]
    scores = [one["relevance_score"] for one in answer["results"]]
    assert scores == pytest.approx([1.0, 2 / 5**0.5, 2 / 5**0.5, 0.0])
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert answer["meta"]["tokens"]["input_tokens"] == num_tokens
    shown = [one.get("document") for one in answer["results"]]
    assert shown[0] == (None if path == "/v2/rerank" else {"text": "aaa"})


async def test_only_the_first_are_returned_with_their_documents_if_asked_for() -> None:
    objects = [{"text": text, "title": "x"} for text in ASK["documents"]]
    async with surface(LetterFleet()) as server:
        more = {"top_n": 2, "return_documents": True, "documents": objects}
        answer = (await server.post("/v2/rerank", ASK | more)).json
        plain = (await server.post("/v1/rerank", ASK | {"return_documents": False})).json
    assert [one["document"]["text"] for one in answer["results"]] == ["aaa", "aab"]
    assert all("document" not in one for one in plain["results"])


@pytest.mark.parametrize("path", SCORES)
@pytest.mark.parametrize(
    ("first", "second", "scores"),
    [
        ("a", "b", [0.0]),
        ("a", ["a", "b"], [1.0, 0.0]),
        (["a", "b"], ["a", "b"], [1.0, 1.0]),
        (["a", "b"], "b", [0.0, 1.0]),
        ("a", "c", [0.0]),
    ],
)
async def test_one_text_is_scored_with_each_or_each_with_its_pair(
    path: str, first: object, second: object, scores: list[float]
) -> None:
    answer = (await posted(path, {"text_1": first, "text_2": second}, fleet=LetterFleet())).json
    assert [one["score"] for one in answer["data"]] == pytest.approx(scores)
    assert [one["index"] for one in answer["data"]] == list(range(len(scores)))
    assert (answer["object"], answer["model"]) == ("list", MODEL)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", ASK | {"query": ""}, "query"),
        ("/v1/rerank", ASK | {"documents": []}, "documents"),
        ("/v1/rerank", ASK | {"documents": ["a"] * 4}, "documents"),
        ("/v1/rerank", ASK | {"documents": [{"title": "a"}]}, "documents.0"),
        ("/v1/rerank", ASK | {"top_n": 0}, "top_n"),
        ("/v1/rerank", ASK | {"model": "another", "documents": ["a"]}, "model"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/score", {"text_1": ["a"] * 4, "text_2": "a"}, "text_1"),
        ("/score", {"text_1": "a"}, "text_2"),
    ],
)
async def test_what_is_wrong_is_named(path: str, body: dict[str, Any], param: str) -> None:
    limits = replace(CONFIG.embedding, max_documents=3)
    answer = await refused_at(path, body, fleet=LetterFleet(), embedding=limits)
    assert answer.status == (404 if param == "model" else 400)
    assert answer.error["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "a" * 9, "documents": ["b", "c"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c" * 9]}, "documents.1"),
        ("/v1/rerank", {"query": "a", "documents": ["b", "\0"]}, "documents.1"),
        ("/score", {"text_1": "a" * 9, "text_2": ["b", "c"]}, "text_1"),
        ("/score", {"text_1": ["a", "b" * 9], "text_2": ["b", "c"]}, "text_1.1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["b", "c" * 9]}, "text_2.1"),
    ],
)
async def test_a_text_that_is_too_long_is_named_by_its_own_parameter(
    path: str, body: dict[str, Any], param: str
) -> None:
    async with surface(LetterFleet()) as server:
        first = server.services.models.first
        object.__setattr__(first, "embedding", EmbeddingModel(max_input_tokens=8))
        answer = await server.post(path, body)
        assert not server.fleet.inputs
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_a_model_without_vectors_says_so() -> None:
    async with surface() as server:
        object.__setattr__(
            server.services.models.first, "embedding", EmbeddingModel(objection="no pooling")
        )
        answer = await server.post("/v1/rerank", ASK)
    assert (answer.status, answer.error["param"]) == (400, "model")
    assert "cannot compute embeddings" in answer.error["message"]


async def test_a_ranking_is_charged_as_its_vectors_are() -> None:
    quotas = quotas_in_memory()
    fleet = ChargingFleet(quotas)
    plan = Plan("p", requests_per_minute=3.0, tokens_per_minute=400.0)
    tenancy = Tenancy(tenants_of(tenant("alice", "key-of-alice", plan=plan)))
    key = {"authorization": "Bearer key-of-alice"}
    async with surface(fleet, tenancy=tenancy, quotas=quotas) as server:
        assert (await server.post("/rerank", ASK)).status == 401
        answer = await server.post("/v2/rerank", ASK, headers=key)
        used = (await server.request("GET", "/v1/usage", headers=key)).json["this_month"]["tokens"]
    assert answer.json["usage"]["total_tokens"] == used == fleet.used == 9

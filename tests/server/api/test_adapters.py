"""Tests of LoRA adapters in the API: each is listed and requested like a separate model, and cached
answers are never shared between them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from server.cache.front import name_of
from server.contract.generation import GenerationRequest
from tests.server.support.fakes import FakeFleet
from tests.server.support.surface import CONFIG, MODEL, surface
from triolet.adapter_keys import digest_bytes
from triolet.config import ANY_MODEL, AdapterConfig
from triolet.sampling import SamplingParams

from .test_many_models import COMPLETIONS, VECTORS

if TYPE_CHECKING:
    from collections.abc import Iterable

DIGESTS = {name: "sha256:" + digit * 64 for name, digit in (("sql", "a"), ("fr", "b"))}
ADAPTERS = tuple(AdapterConfig(name, f"/{name}", "", one) for name, one in DIGESTS.items())
WITH_ADAPTERS: dict[str, Any] = {"model_adapters": ADAPTERS, "model_aliases": ("other",)}


def asked_of(fleet: FakeFleet) -> list[bytes]:
    """Return the adapter of every submitted request."""
    inputs: Iterable[GenerationRequest] = fleet.inputs
    return [one.request.adapter for one in fleet.generations] + [one.adapter for one in inputs]


@pytest.mark.parametrize(("path", "body"), [*COMPLETIONS, *VECTORS])
@pytest.mark.parametrize("base", [MODEL, "other"])
async def test_a_request_is_computed_by_the_adapter_that_it_names(
    path: str, body: dict[str, Any], base: str
) -> None:
    async with surface(fleet := FakeFleet(), **WITH_ADAPTERS) as server:
        for name, adapter in (
            (base, b""),
            (f"{base}:sql", digest_bytes(DIGESTS["sql"])),
            (f"{base}:fr", digest_bytes(DIGESTS["fr"])),
        ):
            before = len(asked_of(fleet))
            answer = await server.post(path, body | {"model": name})
            assert answer.status == 200, answer.body
            new = asked_of(fleet)[before:]
            assert set(new) == {adapter}
            version = answer.headers.get("x-triolet-model-version")
            assert version == (DIGESTS[name.partition(":")[2]] if adapter else None)
            if b'"model"' in answer.body:
                assert f'"model":"{name.replace(base, MODEL)}"'.encode() in answer.body


async def test_the_list_shows_adapters_with_parent_and_digest() -> None:
    async with surface(FakeFleet(), **WITH_ADAPTERS) as server:
        page = (await server.request("GET", "/v1/models")).json["data"]
        cards = {card["id"]: card for card in page}
        names = [MODEL, "other"]
        assert list(cards) == [*names, *(f"{base}:{one}" for one in DIGESTS for base in names)]
        assert cards[MODEL]["parent"] is None
        shown = (await server.request("GET", f"/v1/models/{MODEL}:sql")).json
        assert shown == cards[f"{MODEL}:sql"]
        assert (shown["parent"], shown["root"]) == (MODEL, MODEL)
        assert shown["digest"] == DIGESTS["sql"]
        tags = (await server.request("GET", "/api/tags")).json["models"]
        assert f"{MODEL}:fr" in [one["name"] for one in tags]


@pytest.mark.parametrize("aliases", [(), (ANY_MODEL,)])
async def test_an_unknown_adapter_is_told_which_there_are(aliases: tuple[str, ...]) -> None:
    """Also if any model name is accepted: the base model must not answer for an adapter's name."""
    fleet = FakeFleet()
    async with surface(fleet, **WITH_ADAPTERS | {"model_aliases": aliases}) as server:
        path, body = COMPLETIONS[0]
        answer = await server.post(path, body | {"model": f"{MODEL}:sq"})
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        listed = f"there are {MODEL}, {MODEL}:sql, {MODEL}:fr; did you mean {MODEL}:sql?"
        assert answer.error["message"].endswith(listed)
        assert not fleet.generations
        tagged = await server.post("/api/chat", COMPLETIONS[5][1] | {"model": f"{MODEL}:latest"})
        assert tagged.status == 200


async def test_other_servers_names_of_adapters_are_told_how_they_are_named_here() -> None:
    async with surface(FakeFleet(), **WITH_ADAPTERS) as server:
        path, body = COMPLETIONS[0]
        for name in ("lora", "lora_path"):
            answer = await server.post(path, body | {name: "sql"})
            assert (answer.status, answer.error["param"]) == (400, name)
            assert "name the adapter in model, as MODEL:ADAPTER" in answer.error["message"]


def test_kept_answers_of_adapters_are_told_apart() -> None:
    plain = GenerationRequest(bytes(16), (1, 2, 3), SamplingParams(), 1.0)
    names = {
        name_of(replace(plain, adapter=adapter), "fingerprint", MODEL)
        for adapter in (b"", *map(digest_bytes, DIGESTS.values()))
    }
    assert len(names) == 3
    assert CONFIG.model_name == MODEL

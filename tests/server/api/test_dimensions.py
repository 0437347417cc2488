"""Tests of the `dimensions` parameter of /v1/embeddings and /api/embed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from server.text.model_files import EmbeddingModel
from tests.server.support.surface import MODEL, surface
from triolet.pooling import VectorForm

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.server.support.surface import Surface

PATHS = ("/v1/embeddings", "/api/embed")
SIZE = 256


@pytest.fixture
async def server() -> AsyncIterator[Surface]:
    """Run a server with a model that does not state the dimensions it was trained for."""
    async with surface() as opened:
        object.__setattr__(opened.services.models.first, "embedding", EmbeddingModel(size=SIZE))
        yield opened


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (PATHS[0], {"encoding_format": "float"}),
        (PATHS[0], {"encoding_format": "base64"}),
        (PATHS[1], {}),
    ],
)
@pytest.mark.parametrize("dimensions", [1, 100, SIZE])
async def test_vectors_of_every_model_are_cut_and_have_length_1(
    server: Surface, path: str, more: dict[str, Any], dimensions: int
) -> None:
    fields = {"model": MODEL, "input": "hi", "dimensions": dimensions} | more
    assert (await server.post(path, fields)).status == 200
    (asked,) = server.fleet.inputs
    assert asked.form == VectorForm(dimensions=dimensions, is_normalized=True)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("dimensions", "said"),
    [
        (0, "dimensions must be at least 1; it is 0"),
        (-1, "dimensions must be at least 1; it is -1"),
        (SIZE + 1, "is 257; embeddings of model demo have 256 dimensions"),
    ],
)
async def test_a_length_that_no_vector_has_is_refused_with_the_one_that_they_have(
    server: Surface, path: str, dimensions: int, said: str
) -> None:
    answer = await server.post(path, {"model": MODEL, "input": "hi", "dimensions": dimensions})
    error = answer.json["error"]
    message = error if isinstance(error, str) else error["message"]
    assert (answer.status, server.fleet.inputs) == (400, [])
    assert said in message
    assert "dimensions" in message

"""Tests that no spelling of a route's path bypasses the checks."""

from __future__ import annotations

import pytest

from tests.server.support.surface import surface


@pytest.mark.parametrize(
    "target", ["/version", "/%76ersion", "/version?", "/version?x=/", "/static/%2e%2e/version"]
)
async def test_no_spelling_of_a_path_evades_the_checks_of_its_route(target: str) -> None:
    async with surface() as server:
        foreign = f"GET {target} HTTP/1.1\r\nHost: evil.example\r\n\r\n".encode()
        async with await server.sent(foreign) as client:
            answer = await client.answer()
            assert (answer.status, answer.error["code"]) == (403, "permission_denied")


@pytest.mark.parametrize("target", ["//version", "/version/", "/./version", "/static/../version"])
async def test_another_spelling_is_another_path(target: str) -> None:
    async with (
        surface() as server,
        await server.sent(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()) as client,
    ):
        assert (await client.answer()).status in {400, 404}

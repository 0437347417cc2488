"""Tests of two model versions behind one public name: clients see only the name, and each request
stays on its version."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.api.test_many_models import CODE, COMPLETIONS, DIGEST, TURN, VECTORS, two_models
from tests.server.support.surface import MODEL
from triolet.config import AutoConfig
from triolet.config.routes import Route

CHAT = "chat"
VERSION = "x-triolet-model-version"


def route_to(version: str, revision: int) -> dict[str, Route]:
    other = {MODEL: CODE, CODE: MODEL}[version]
    return {CHAT: Route({version: 1, other: 0}, version, revision)}


@pytest.mark.parametrize(("path", "body"), COMPLETIONS + VECTORS[:1] + VECTORS[3:])
async def test_answers_have_the_public_name_and_are_of_the_version_of_the_route(
    path: str, body: dict[str, Any]
) -> None:
    async with two_models() as models:
        for version, counts, digest in ((MODEL, (1, 0), None), (CODE, (1, 1), DIGEST)):
            models.server.services.models.change(route_to(version, 1))
            answer = await models.server.post(path, body | {"model": CHAT})
            assert answer.status == 200, answer.body
            assert (models.counts, answer.headers.get(VERSION)) == (counts, digest)
            if b'"model"' in answer.body:
                assert b'"model":"chat"' in answer.body.replace(b": ", b":")


async def test_a_route_is_listed_once_and_its_versions_are_no_names() -> None:
    async with two_models() as models:
        models.server.services.models.change(route_to(CODE, 1))
        listed = (await models.server.request("GET", "/v1/models")).json["data"]
        assert [(one["id"], one["root"], one["digest"]) for one in listed] == [
            (CHAT, CHAT, DIGEST),
            ("coder", CHAT, DIGEST),
        ]
        body = {"messages": [TURN]}
        for name, status in ((MODEL, 404), (CODE, 404), ("coder", 200), (CHAT, 200)):
            answer = await models.server.post("/v1/chat/completions", body | {"model": name})
            assert answer.status == status
        status = (await models.server.request("GET", "/fleet/status")).json
        assert [one["name"] for one in status["models"]] == [MODEL, CODE], (
            "each version has its own queue"
        )


async def test_a_repeat_gets_the_answer_of_the_version_that_it_began_on() -> None:
    async with two_models() as models:
        headers = {"idempotency-key": "one"}
        body = {"model": CHAT, "messages": [TURN], "stream": True}
        for version in (CODE, MODEL):
            models.server.services.models.change(route_to(version, 1))
            answer = await models.server.post("/v1/chat/completions", body, headers=headers)
            assert (answer.headers[VERSION], models.counts) == (DIGEST, (0, 1))
        assert answer.headers["idempotency-replayed"] == "true"


async def test_a_ladder_names_the_route_and_a_request_keeps_its_version() -> None:
    async with two_models(auto=AutoConfig(ladder=(CHAT,))) as models:
        table = models.server.services.models
        table.change(route_to(CODE, 1))
        text = table.named(CHAT).text
        encode = text.encode

        async def encode_while_the_route_moves(*args: Any, **fields: Any) -> tuple[int, ...]:  # noqa: ANN401
            table.change(route_to(MODEL, 2))
            return await encode(*args, **fields)

        text.encode = encode_while_the_route_moves  # type: ignore[method-assign]
        body = {"model": "auto", "messages": [TURN]}
        answer = await models.server.post("/v1/chat/completions", body)
        assert (answer.json["model"], answer.headers[VERSION]) == (CHAT, DIGEST)
        assert models.counts == (0, 1)


async def test_a_route_that_has_expired_gives_the_stable_version() -> None:
    async with two_models() as models:
        services = models.server.services
        now_s = [9.9]
        object.__setattr__(services, "wall", lambda: now_s[0])
        route = Route({MODEL: 0, CODE: 1}, MODEL, 1, valid_until=10.0)
        services.models.change({CHAT: route})
        body = {"model": CHAT, "messages": [TURN]}
        assert VERSION in (await models.server.post("/v1/chat/completions", body)).headers
        now_s[0] = 10.0
        assert VERSION not in (await models.server.post("/v1/chat/completions", body)).headers
        assert models.counts == (1, 1)

"""Tests of sampling parameters of /v1/responses and /v1/messages, sent with the official clients,
which check response types strictly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from server.api.anthropic.schema import MessagesRequest
from server.api.openai.responses_schema import ResponseFields
from tests.lazily import lazily
from tests.server.support.fakes import FakeFleet
from tests.server.support.surface import MODEL, surface

from .test_openai_parameters import SHARED, seen, strict

if TYPE_CHECKING:
    import anthropic
    import openai
    from pydantic import BaseModel
else:
    anthropic = lazily("anthropic")
    openai = lazily("openai")

pytestmark = pytest.mark.slow

THINKING: Any = (
    {"chat_template_kwargs": {"thinking": True}},
    {"prompt_ids": tuple(b"user: hi\nassistant: thinking")},
)
STOP: Any = ({"stop_sequences": ["x", "yy"]}, {"stop": ("x", "yy")})


def table_of(kind: type[BaseModel]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the chat parameters that an endpoint also has."""
    names = {field.alias or name for name, field in kind.model_fields.items()}
    return [row for row in [*SHARED, THINKING, STOP] if row[0].keys() <= names]


def respond(url: str) -> None:
    with strict(url) as client:
        for sent, _ in table_of(ResponseFields):
            answer = client.responses.create(model=MODEL, input="hi", extra_body=sent)
            assert answer.status == "completed"


def converse(url: str) -> None:
    with anthropic.Anthropic(
        api_key="none",
        base_url=url,
        max_retries=0,
        http_client=anthropic.DefaultHttpxClient(verify=False),
        _strict_response_validation=True,
    ) as client:
        for sent, _ in table_of(MessagesRequest):
            usual: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
            message = client.messages.create(model=MODEL, max_tokens=99, **usual, extra_body=sent)
            assert message.stop_reason == "end_turn"


@pytest.mark.parametrize(("use", "kind"), [(respond, ResponseFields), (converse, MessagesRequest)])
async def test_what_decides_the_next_token_is_applied(use: Any, kind: type[BaseModel]) -> None:  # noqa: ANN401
    async with surface(FakeFleet()) as server:
        await trio.to_thread.run_sync(use, server.url)
        requests = [generation.request for generation in server.fleet.generations]
    table = table_of(kind)
    assert len(table) > 12
    for request, (_, wanted) in zip(requests, table, strict=True):
        assert seen(request, wanted) == wanted


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "seed", "logit_bias"])
async def test_what_is_wrong_is_named_to_each_in_its_words(name: str) -> None:
    def use(url: str) -> tuple[str | None, str]:
        with strict(url) as client, pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model=MODEL, input="hi", extra_body={name: "x"})
        with (
            anthropic.Anthropic(api_key="none", base_url=url, max_retries=0) as other,
            pytest.raises(anthropic.BadRequestError, match=name),
        ):
            other.messages.create(
                model=MODEL,
                max_tokens=9,
                messages=[{"role": "user", "content": "hi"}],
                extra_body={name: "x"},
            )
        return refused.value.param, name

    async with surface(FakeFleet()) as server:
        param, wanted = await trio.to_thread.run_sync(use, server.url)
        assert param == wanted
        assert not server.fleet.generations

"""Tests of Ollama's official client against a real fleet."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.end_to_end.fleet_process import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from .fleet_process import FleetProcess

ollama = pytest.importorskip("ollama", reason="pip install '.[clients]' brings the client")
pytestmark = pytest.mark.slow

ASKED: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is 12 + 30?"}],
    "options": {"temperature": 0, "num_predict": 40},
}


@pytest.fixture
def client(fleet: FleetProcess) -> Any:  # noqa: ANN401
    opened = ollama.Client(host=fleet.url)
    yield opened
    opened._client.close()


@pytest.mark.promise
def test_a_chat_is_the_same_whole_and_streamed_and_as_openai_s(
    client: Any,  # noqa: ANN401
    fleet: FleetProcess,
) -> None:
    whole = client.chat(**ASKED)
    parts = list(client.chat(**ASKED, stream=True))
    same = fleet.client.post(
        "/v1/chat/completions",
        json={"messages": ASKED["messages"], "temperature": 0, "max_tokens": 40},
    ).json()
    said = same["choices"][0]["message"]["content"]
    assert whole.message.content == said
    assert "".join(part.message.content or "" for part in parts) == said
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    end = parts[-1]
    assert (end.prompt_eval_count, end.eval_count) == (
        same["usage"]["prompt_tokens"],
        same["usage"]["completion_tokens"],
    )
    assert 0 < end.prompt_eval_duration < end.total_duration
    assert 0 < end.eval_duration < end.total_duration


def test_a_context_beyond_the_models_is_cut_to_it(client: Any) -> None:  # noqa: ANN401
    answer = client.chat(**ASKED | {"options": {"num_ctx": 1_000_000, "num_predict": 4}})
    assert answer.eval_count == 4


def test_a_prompt_is_continued_raw_and_within_a_format(client: Any) -> None:  # noqa: ANN401
    raw = client.generate(model="demo:latest", prompt="Once upon a", raw=True, options={"seed": 1})
    assert raw.response
    one = {"a": {"enum": [1, 2]}}
    schema = {
        "type": "object",
        "properties": one,
        "required": ["a"],
        "additionalProperties": False,
    }
    kept = client.generate(model="demo", prompt="a?", format=schema, options={"temperature": 0})
    assert json.loads(kept.response)["a"] in (1, 2)


def test_vectors_and_the_model_s_facts(client: Any) -> None:  # noqa: ANN401
    first, second = client.embed(model="demo", input=["a cat", "a dog"]).embeddings
    older = client.embeddings(model="demo", prompt="a cat").embedding
    assert len(first) == len(second) == 256
    assert older == pytest.approx(first)
    (cut,) = client.embed(model="demo", input="a cat", dimensions=16).embeddings
    length = sum(number**2 for number in first[:16]) ** 0.5
    assert cut == pytest.approx([number / length for number in first[:16]])
    (model,) = client.list().models
    assert (model.model, model.details.family) == ("demo:latest", "llama")
    assert model.size > 1_000_000
    shown = client.show(model.model)
    assert shown.modelinfo["general.parameter_count"] == 4877568
    (running,) = client.ps().models
    assert running.model == model.model


def test_errors_say_what_is_wrong(client: Any) -> None:  # noqa: ANN401
    with pytest.raises(ollama.ResponseError, match="there is no model") as refused:
        client.chat(**ASKED | {"model": "another"})
    assert refused.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"dimensions: is 257; .* have 256 numbers"):
        client.embed(model="demo", input="a cat", dimensions=257)
    with pytest.raises(ollama.ResponseError, match="models cannot be pulled"):
        client.pull("llama3")


def test_a_stream_that_is_left_frees_its_request(fleet: FleetProcess) -> None:
    async def leave() -> str:
        client = ollama.AsyncClient(host=fleet.url)
        long = ASKED | {"options": {"num_predict": -1}}
        stream = await client.chat(**long, stream=True)
        first: str = (await anext(stream)).message.content
        await stream.aclose()
        await client._client.aclose()
        return first

    assert asyncio.run(leave())
    wait_until(
        lambda: fleet.client.get("/load").json()["server_load"] == 0, PATIENCE_S, "it has ended"
    )

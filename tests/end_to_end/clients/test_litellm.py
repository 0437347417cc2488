"""Tests of LiteLLM's proxy in front of the fleet's Ollama and OpenAI APIs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from ops.ports import free_port
from tests.end_to_end.fleet_process import PATIENCE_S, wait_until
from tests.end_to_end.scripted_model import Rule
from tests.lazily import lazily

from .installed import ADVICE, LOOP, MODEL, QUESTION, REASON, get_weather

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import openai

    from tests.end_to_end.fleet_process import FleetProcess
else:
    openai = lazily("openai")

PACKAGES = Path(__file__).parents[3] / "build" / "clients" / "litellm"
"""Own environment, because its dependencies conflict with the other clients'."""
if not PACKAGES.is_dir():
    pytest.skip(REASON.format("litellm"), allow_module_level=True)
pytestmark = pytest.mark.slow

HOST = "127.0.0.1"
KEY = "sk-of-this-test"
START = "from litellm import run_server; run_server()"
SIZE = 16
"""Requested dimensions of a vector; the model has 256."""
HELLO = Rule("Hello", "Hello from afar.")
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tell the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def settings(url: str) -> str:
    """Return the proxy's settings as JSON, which is valid YAML."""
    ollama = {"api_base": url}
    own = {"api_base": f"{url}/v1", "api_key": "none"}
    models = {
        "ollama": {"model": f"ollama_chat/{MODEL}"} | ollama,
        "openai": {"model": f"openai/{MODEL}"} | own,
        # OpenAI's client requests base64, which LiteLLM does not support for Ollama.
        "ollama-vectors": {"model": f"ollama/{MODEL}", "drop_params": True} | ollama,
        # LiteLLM accepts `dimensions` only for model names of OpenAI.
        "openai-vectors": {"model": f"openai/{MODEL}", "allowed_openai_params": ["dimensions"]}
        | own,
    }
    listed = [{"model_name": name, "litellm_params": one} for name, one in models.items()]
    return json.dumps({"model_list": listed, "router_settings": {"num_retries": 0}})


@pytest.fixture(scope="module")
def proxy(scripted_fleet: FleetProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the proxy, which sends requests only to the fleet."""
    directory = tmp_path_factory.mktemp("litellm")
    (directory / "config.yaml").write_text(settings(scripted_fleet.url), encoding="utf-8")
    port = free_port(HOST, 41000)
    address = ("--host", HOST, "--port", str(port))
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", START, "--config", "config.yaml", *address],
            cwd=directory,
            env=os.environ
            | {
                "PYTHONPATH": str(PACKAGES),
                "LITELLM_MASTER_KEY": KEY,
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "LITELLM_TELEMETRY": "False",
            },
            stdout=log,
            stderr=log,
        )
    url = f"http://{HOST}:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, (directory / "log").read_text(encoding="utf-8")
        with suppress(httpx2.TransportError):
            return httpx2.get(f"{url}/health/liveliness").status_code == 200
        return False

    try:
        wait_until(is_ready, PATIENCE_S, "LiteLLM's proxy answers")
        yield url
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


@pytest.fixture
def client(proxy: str) -> Iterator[Any]:
    with openai.OpenAI(
        base_url=f"{proxy}/v1",
        api_key=KEY,
        max_retries=0,
        http_client=openai.DefaultHttpxClient(),
    ) as opened:
        yield opened


@pytest.mark.parametrize("model", ["ollama", "openai"])
def test_a_greeting_is_answered_whole_and_streamed(
    script: Callable[..., FleetProcess],
    client: Any,  # noqa: ANN401
    model: str,
) -> None:
    script(HELLO)
    asked: Any = {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].message.content == HELLO.says
    assert answer.usage.completion_tokens > 0
    chunks = [one.choices[0] for one in client.chat.completions.create(**asked, stream=True)]
    assert "".join(one.delta.content or "" for one in chunks) == HELLO.says
    assert [one.finish_reason for one in chunks if one.finish_reason] == ["stop"]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("model", ["ollama", "openai"])
def test_a_tool_is_called_and_its_result_is_taken(
    script: Callable[..., FleetProcess],
    client: Any,  # noqa: ANN401
    model: str,
    is_streamed: bool,
) -> None:
    script(*LOOP)
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    if is_streamed:
        with client.chat.completions.stream(model=model, messages=turns, tools=TOOLS) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        answer = client.chat.completions.create(model=model, messages=turns, tools=TOOLS)
        message = answer.choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather",
        {"city": "Rome"},
    )
    result = {"role": "tool", "tool_call_id": call.id, "content": get_weather("Rome")}
    turns += [{"role": "assistant", "tool_calls": [call.to_dict()]}, result]
    answer = client.chat.completions.create(model=model, messages=turns, tools=TOOLS)
    assert answer.choices[0].message.content == ADVICE


@pytest.mark.parametrize("model", ["ollama-vectors", "openai-vectors"])
def test_texts_get_vectors_of_the_length_that_is_asked_for(
    script: Callable[..., FleetProcess],
    client: Any,  # noqa: ANN401
    model: str,
) -> None:
    script()
    found = client.embeddings.create(model=model, input=["a cat", "a dog"], dimensions=SIZE)
    first, second = (one.embedding for one in found.data)
    assert len(first) == len(second) == SIZE
    assert first != second
    assert sum(number * number for number in first) == pytest.approx(1)

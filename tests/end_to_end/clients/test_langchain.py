"""Tests of LangChain: models for the OpenAI and Anthropic APIs, agents and embeddings."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from tests.end_to_end.scripted_model import Rule, tool_call
from tests.lazily import lazily

from .installed import ADVICE, LOOP, MODEL, QUESTION, get_weather, needed, needed_later

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import openai

    from tests.end_to_end.fleet_process import FleetProcess
else:
    openai = lazily("openai")

langchain_openai = needed_later("langchain_openai", "langchain-openai")
pytestmark = pytest.mark.slow

FORECAST = {"city": "Rome", "degrees": 31}


class Forecast(BaseModel):
    """A temperature to expect."""

    city: str
    degrees: int


@pytest.fixture(params=["chat", "responses"])
def model(
    script: Callable[..., FleetProcess], request: pytest.FixtureRequest
) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a model with a script."""
    # Pass clients, because the model's own connections would outlive the test.
    with openai.DefaultHttpxClient() as connections:

        def open_model(*rules: Rule) -> Any:  # noqa: ANN401
            return langchain_openai.ChatOpenAI(
                base_url=f"{script(*rules).url}/v1",
                api_key="none",
                model=MODEL,
                max_retries=0,
                use_responses_api=request.param == "responses",
                http_client=connections,
            )

        yield open_model


def test_a_tool_is_called_and_its_result_is_taken(model: Callable[..., Any]) -> None:
    messages = needed("langchain_core.messages", "langchain-core")
    bound = model(*LOOP).bind_tools([get_weather])
    turns = [messages.HumanMessage(QUESTION)]
    turns.append(bound.invoke(turns))
    (called,) = turns[-1].tool_calls
    assert (called["name"], called["args"]) == ("get_weather", {"city": "Rome"})
    turns.append(messages.ToolMessage(get_weather(**called["args"]), tool_call_id=called["id"]))
    assert bound.invoke(turns).text == ADVICE
    assert "".join(chunk.text for chunk in bound.stream(turns)) == ADVICE


def test_an_agent_calls_its_tool(model: Callable[..., Any]) -> None:
    agents = needed("langchain.agents", "langchain")
    agent = agents.create_agent(model(*LOOP), tools=[get_weather])
    result = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})
    assert result["messages"][-1].text == ADVICE


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("json_schema", json.dumps(FORECAST)),
        ("json_mode", json.dumps(FORECAST)),
        ("function_calling", tool_call("Forecast", **FORECAST)),
    ],
)
def test_a_result_has_its_type(model: Callable[..., Any], method: str, says: str) -> None:
    structured = model(Rule(QUESTION, says)).with_structured_output(Forecast, method=method)
    assert structured.invoke(QUESTION) == Forecast(**FORECAST)


def test_texts_become_vectors(script: Callable[..., FleetProcess]) -> None:
    fleet = script()
    with openai.DefaultHttpxClient() as connections:
        embeddings = langchain_openai.OpenAIEmbeddings(
            base_url=f"{fleet.url}/v1",
            api_key="none",
            model=MODEL,
            # Otherwise it counts tokens with a file that it downloads.
            check_embedding_ctx_length=False,
            http_client=connections,
        )
        one, two = embeddings.embed_documents(["A fox.", "The moon."])
        assert embeddings.embed_query("A fox.") == pytest.approx(one)
    assert len(one) == len(two)
    assert one != two


def test_the_model_for_anthropic_calls_a_tool(script: Callable[..., FleetProcess]) -> None:
    langchain_anthropic = needed("langchain_anthropic", "langchain-anthropic")
    messages = needed("langchain_core.messages", "langchain-core")
    fleet = script(*LOOP)
    bound = langchain_anthropic.ChatAnthropic(
        base_url=fleet.url, api_key="none", model=MODEL, max_tokens=200, max_retries=0
    ).bind_tools([get_weather])

    def streamed(turns: Any) -> Any:  # noqa: ANN401
        first, *others = bound.stream(turns)
        return sum(others, first)

    for ask in (bound.invoke, streamed):
        turns = [messages.HumanMessage(QUESTION)]
        turns.append(ask(turns))
        (called,) = turns[-1].tool_calls
        turns.append(messages.ToolMessage(get_weather(**called["args"]), tool_call_id=called["id"]))
        assert ask(turns).text == ADVICE
    # It cannot be closed, and its connections would outlive the test.
    bound.bound._client.close()

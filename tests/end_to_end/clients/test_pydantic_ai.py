"""Tests of pydantic-ai over chat completions and Responses: tools, structured results, streams."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from tests.end_to_end.scripted_model import Rule, tool_call
from tests.lazily import lazily

from .installed import ADVICE, LOOP, MODEL, QUESTION, get_weather, needed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import openai

    from tests.end_to_end.fleet_process import FleetProcess
else:
    openai = lazily("openai")

pydantic_ai = needed("pydantic_ai", "pydantic-ai")
openai_models = needed("pydantic_ai.models.openai", "pydantic-ai")
openai_provider = needed("pydantic_ai.providers.openai", "pydantic-ai")
pytestmark = pytest.mark.slow

KINDS = ("OpenAIChatModel", "OpenAIResponsesModel")
FORECAST = {"city": "Rome", "degrees": 31}


class Forecast(BaseModel):
    """A temperature to expect."""

    city: str
    degrees: int


def run(fleet: FleetProcess, kind: str, use: Callable[[Any], Awaitable[Any]]) -> Any:  # noqa: ANN401
    """Run a function with a model of the library and return its result."""

    async def opened() -> Any:  # noqa: ANN401
        async with openai.AsyncOpenAI(
            base_url=f"{fleet.url}/v1", api_key="none", max_retries=0
        ) as client:
            provider = openai_provider.OpenAIProvider(openai_client=client)
            return await use(getattr(openai_models, kind)(MODEL, provider=provider))

    return asyncio.run(opened())


@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_calls_its_tool(script: Callable[..., FleetProcess], kind: str) -> None:
    async def use(model: Any) -> Any:  # noqa: ANN401
        return await pydantic_ai.Agent(model, tools=[get_weather]).run(QUESTION)

    assert run(script(*LOOP), kind, use).output == ADVICE


@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_streams(script: Callable[..., FleetProcess], kind: str) -> None:
    async def use(model: Any) -> tuple[str, int]:  # noqa: ANN401
        agent = pydantic_ai.Agent(model, tools=[get_weather])
        async with agent.run_stream(QUESTION) as result:
            pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
        return "".join(pieces), len(pieces)

    text, num_pieces = run(script(*LOOP), kind, use)
    assert text == ADVICE
    assert num_pieces > 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("ToolOutput", tool_call("final_result", **FORECAST)),
        ("NativeOutput", json.dumps(FORECAST)),
        ("PromptedOutput", json.dumps(FORECAST)),
    ],
)
def test_a_result_has_its_type(
    script: Callable[..., FleetProcess], kind: str, output: str, says: str
) -> None:
    async def use(model: Any) -> Any:  # noqa: ANN401
        agent = pydantic_ai.Agent(model, output_type=getattr(pydantic_ai, output)(Forecast))
        return await agent.run(QUESTION)

    assert run(script(Rule(QUESTION, says)), kind, use).output == Forecast(**FORECAST)
